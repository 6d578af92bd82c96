"""Passes over meta tensors compile the kernels they would launch, and several processes share the work."""

import importlib
import os
import shutil
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from saccade import bundled
from saccade.dry_run.blueprint import draw
from saccade.dry_run.compile_process import passes
from saccade.execution.assembly import new_executor
from saccade.execution.executor import DeviceExecutor
from saccade.execution.resolving import resolve
from saccade.graphs import Frame
from saccade.kernels import adapters, compile_only, dispatch, products
from saccade.kernels.adapters import FlashAttention
from saccade.kernels.compile_only import CompileOnly, Share
from saccade.kernels.dispatch import SamplingKernels
from saccade.kernels.launch import Launcher
from saccade.kernels.products import EVERY_TILE, HopperProducts, Kind, Tile, choose
from saccade.kernels.weight import E4M3, Layout, Scaled, new_weight
from saccade.models.weights import load_model
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton is interpreting")

DATA = Path(__file__).parents[1] / "data"
CPU = torch.device("cpu")  # stands in for the GPU on which packages compile
COUNT = 2
LIMITS = SchedulerSettings(max_num_seqs=4, max_num_batched_tokens=512, encoder_budget_tokens=512, max_model_len=512)


class FakePackages:
    """Stand-ins for whatever compiles: Triton's compiler, quack's products, flash-attn-4's cache and function."""

    def __init__(self) -> None:
        self.triton: list[str] = []
        self.tiles: list[object] = []
        self.attention: list[object] = []
        self.cache = _new_cache_class(self.attention)
        self._flash_cache = self.cache()

    def forget(self) -> None:
        """Drops everything compiled so far, as in a new process."""
        self._flash_cache = self.cache()
        for kernel in _jit_functions():
            kernel.device_caches.clear()

    def compile(self, src: Any, **options: Any) -> Any:
        self.triton.append(f"{src.fn.fn.__name__} {src.signature} {src.constants} {src.attrs}")
        return SimpleNamespace(run=None)

    def product(
        self, x: torch.Tensor, *args: Any, config: Tile, activation: str = "", bias: Any, **options: Any
    ) -> None:
        assert x.device == CPU, "only small products are computed, to compile them"
        self.tiles.append((activation, bias is None, config))

    def attend(self, q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        assert q.device == CPU
        assert all(t.sum() == 0 for t in options.values() if isinstance(t, torch.Tensor)), "no boundaries at random"
        key = (q.shape[1:], options.get("window_size"), options["max_seqlen_q"] == 1)
        if key not in self._flash_cache:
            self._flash_cache[key] = "compiled"
        self._flash_cache[key](q)
        return q

    def load_products(self) -> HopperProducts:
        return HopperProducts(self.product, self.product, {tile: tile for _, tile in EVERY_TILE})


def _new_cache_class(compiled: list[object]) -> Any:
    class Cache:
        """Like flash-attn-4's cache, but without its disk part."""

        cache_path = Path("fwd")

        def __init__(self) -> None:
            self._kept: dict[object, object] = {}

        def __contains__(self, key: object) -> bool:
            return key in self._kept

        def __getitem__(self, key: object) -> Any:
            raise AssertionError("a kernel is about to be launched")

        def __setitem__(self, key: object, value: object) -> None:
            compiled.append(key)
            self._kept[key] = value

    return Cache


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> FakePackages:
    fake = FakePackages()
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # else Triton warns
    monkeypatch.setattr(compile_only, "kernels_for", lambda device, dtype: dispatch._cuda_kernels((9, 0), dtype))
    monkeypatch.setattr(products, "load_products", fake.load_products)
    monkeypatch.setattr(adapters, "load_flash_attention", lambda: FlashAttention(fake.attend))
    monkeypatch.setattr(dispatch, "use_private_kernel_cache", lambda: None)
    monkeypatch.setattr("saccade.kernels.overlap._can_overlap", lambda device: True)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    device = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: id(fake), get_current_stream=lambda device: 0
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", device)
    monkeypatch.setattr("triton.compiler.compile", fake.compile)
    flash = SimpleNamespace(JITPersistentCache=fake.cache)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.cache_utils", flash)
    return fake


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    shutil.copy(DATA / "cli_qwen3_vl_8b_config.json", made / "config.json")
    shutil.copy(DATA / "cli_qwen3_vl_8b_preprocessor.json", made / "preprocessor_config.json")
    return made


def sampling() -> SamplingKernels:
    module = importlib.import_module("saccade.kernels.fused_sampling")
    return SamplingKernels("triton", {name: getattr(module, name) for name in SamplingKernels.kernel_names()})


def compile_share(folder: Path, index: int, count: int) -> int:
    only = CompileOnly(CPU, torch.bfloat16, Share(index, count), Share(index, count))
    blueprint = draw(folder, EngineSettings(load_format="dummy"), LIMITS, tables=(only.kernels, sampling()))
    num_passes = 0
    with torch.no_grad(), only.compiling():
        for run in passes(blueprint):
            run()
            num_passes += 1
    return num_passes


def test_each_kernel_belongs_to_one_share() -> None:
    shares = [Share(i, COUNT) for i in range(COUNT)]
    owners = [[i for i, share in enumerate(shares) if share.has(key)] for key in "abcabcdefga"]
    assert all(len(found) == 1 for found in owners)
    assert owners[0] == owners[3] == owners[-1]
    assert Counter(found[0] for found in owners[:3] + owners[6:10]) == {0: 4, 1: 3}


def test_several_processes_compile_a_model_without_launching_anything(packages: FakePackages, folder: Path) -> None:
    packages.forget()
    compile_share(folder, 0, 1)
    alone = [Counter(map(str, each)) for each in (packages.triton, packages.tiles, packages.attention)]
    assert all(alone)
    assert all(max(each.values()) == 1 for each in alone), "nothing is compiled twice"
    names = {each.split()[0] for each in packages.triton}
    assert {"norm_kernel", "rotary_kernel", "greedy_kernel", "job_rows_kernel", "note_kernel"} <= names
    assert "varlen_kernel" in names, "verification captures an exact graph of small images"
    for found in (packages.triton, packages.tiles, packages.attention):
        found.clear()
    for index in range(COUNT):
        packages.forget()
        compile_share(folder, index, COUNT)
    together = [Counter(map(str, each)) for each in (packages.triton, packages.tiles, packages.attention)]
    assert together == alone


def test_one_mask_kernel_serves_rows_of_any_width(packages: FakePackages) -> None:
    """A request's own mask is as wide as the vocabulary, and the vocabulary as it is."""
    packages.forget()
    logits = torch.empty(2, 4096, device="meta")
    with CompileOnly(CPU, torch.bfloat16, Share(0, 1), Share(0, 1)).compiling():
        for width in (1, 128, 129):
            sampling().allow_only(logits, torch.empty(2, width, dtype=torch.int32, device="meta"))
    assert len(packages.triton) == 1


def test_steps_without_graphs_compile_nothing_for_another_number_of_rows(packages: FakePackages) -> None:
    packages.forget()
    only = CompileOnly(CPU, torch.bfloat16, Share(0, 1), Share(0, 1))
    images = torch.empty(4, 64, 1024, device="meta", dtype=torch.bfloat16)
    with only.compiling():
        for num_rows in (1, 16, 17):
            embeds = torch.empty(num_rows, 1024, device="meta", dtype=torch.bfloat16)
            only.kernels.place_rows(embeds, images, torch.empty(num_rows, dtype=torch.int32, device="meta"))
    assert len(packages.triton) == 1


def _jit_functions() -> list[Any]:
    modules = [importlib.import_module(f"saccade.kernels.{name}") for name in MODULES]
    return [value.kernel for module in modules for value in vars(module).values() if isinstance(value, Launcher)]


MODULES = (
    "triton_attention", "triton_fused", "triton_logits", "triton_sampling", "triton_vectors",
    "fused_images", "fused_vision",
)  # fmt: skip


def test_meta_tensors_stand_in_for_real_ones(packages: FakePackages, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine looks kernels up by the types, strides and alignments of its tensors."""
    folder, settings = bundled.path(), EngineSettings(load_format="dummy", dtype="bfloat16")
    limits = SchedulerSettings(max_num_seqs=4, max_num_batched_tokens=64, encoder_budget_tokens=64, max_model_len=64)
    for_meta, for_real = Share(1, 10**9), Share(1, 10**9)  # only numbers the kernels
    only = CompileOnly(CPU, torch.bfloat16, for_meta, for_meta)
    run_all(draw(folder, settings, limits, tables=(only.kernels, sampling())).executor, only)
    packages.forget()
    monkeypatch.setattr(torch, "empty", torch.zeros)  # no kernel writes the tokens that a pass reads
    only = CompileOnly(CPU, torch.bfloat16, for_real, for_real)
    model = load_model(folder, dtype=torch.bfloat16, load_format="dummy", kernels=only.kernels)
    found = resolve(folder, settings, limits, model, is_cuda=True)
    run_all(new_executor(model, found.sizes, found.executor, sampling()), only)
    assert len(for_meta.numbers) > 10
    assert for_meta.numbers.keys() == for_real.numbers.keys()


def run_all(executor: DeviceExecutor, only: CompileOnly) -> None:
    with torch.no_grad(), only.compiling():
        for runner in executor.phases:
            for bucket in runner.phase.buckets:
                runner.phase.body(Frame(runner.phase.arena, bucket, is_warmup=True))


def test_kernels_launch_again_afterwards(packages: FakePackages) -> None:
    function = importlib.import_module("triton.runtime.jit").JITFunction
    before = function.run, triton.knobs.runtime.jit_cache_hook, packages.cache.__contains__
    with CompileOnly(CPU, torch.bfloat16, Share(0, 1), Share(0, 1)).compiling():
        assert function.run is not before[0]
    assert before == (function.run, triton.knobs.runtime.jit_cache_hook, packages.cache.__contains__)


@pytest.mark.parametrize(
    ("kind", "n", "k"), [("plain", 6144, 4096), ("plain", 4096, 12288), ("gated", 24576, 4096), ("bias", 3456, 1152)]
)
def test_every_tile_that_rows_can_choose_is_compiled(kind: Kind, n: int, k: int) -> None:
    found = HopperProducts(lambda: None, lambda: None, {})
    found.shapes_seen.add((kind, n, k))
    chosen = {choose(kind, m, n, k) for m in range(1, 2200)} - {None}
    assert chosen <= {tile for of, tile in found.tiles() if of == kind}
    assert len(found.tiles()) < len(EVERY_TILE)


def test_only_products_of_torch_are_skipped() -> None:
    def scaled_linear(*args: object) -> torch.Tensor:
        raise RuntimeError("it cannot be compiled")

    meta = torch.device("meta")
    weight = new_weight(128, 256, layout=Layout.ROWS, dtype=torch.bfloat16, device=meta)
    few, many = (Scaled(torch.empty(n, 256, device=meta, dtype=E4M3), torch.empty(n, device=meta)) for n in (6, 406))
    call = compile_only._without_product(scaled_linear)
    y = call(many, weight)
    assert (y.shape, y.dtype, y.device.type) == ((406, 128), torch.bfloat16, "meta")
    with pytest.raises(RuntimeError, match="cannot be compiled"):
        call(few, weight)
