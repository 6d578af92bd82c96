"""Every Triton kernel compiles for the GPUs it is meant for. This needs no GPU.

The interpreter accepts programs that the compiler refuses. So the real host code runs at the dimensions of real models,
and its launches go to the compiler instead of a device.
"""

import importlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade.kernels.backends import AttentionDispatch
from saccade.kernels.reference_vision import ACTIVATIONS
from saccade.kernels.weight import E4M3, Layout, Pending, new_weight
from tests.kernels.cases import boundaries

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton is interpreting")

NAMES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    E4M3: "*fp8e4nv",
}
SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}


class Compiler:
    """Stands in for a kernel: a launch compiles it for one architecture."""

    def __init__(self, launcher: Any, capability: int) -> None:
        self.kernel, self.capability, self.launches = launcher.kernel, capability, 0
        self.last_ptx = ""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(0 < n < 2**31 for n in grid), grid
        assert all(n < 2**16 for n in grid[1:]), grid
        return self.compile

    def compile(self, *args: Any, **kwargs: Any) -> None:
        options = {k: kwargs.pop(k) for k in ("num_warps", "num_stages", "launch_pdl") if k in kwargs} | {
            "enable_fp_fusion": True
        }
        names = self.kernel.arg_names
        signature = {name: self.type_of(value) for name, value in zip(names, args, strict=False)}
        fixed = {p.name for p in self.kernel.params if not p.do_not_specialize}
        given = {name: value for name, value in zip(names, args, strict=False) if name in fixed}
        ones = {name: value for name, value in given.items() if type(value) is int and value == 1}
        signature |= dict.fromkeys([*kwargs, *ones], "constexpr")
        # A launch does this, too. Otherwise no load would be asynchronous, and kernels would need little shared memory.
        aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if is_aligned(given.get(name))}
        source = triton.compiler.ASTSource(fn=self.kernel, signature=signature, constexprs=kwargs | ones, attrs=aligned)
        target = triton.backends.compiler.GPUTarget("cuda", self.capability, 32)
        compiled = triton.compile(source, target=target, options=options)
        assert compiled.metadata.shared <= SHARED_MEMORY[self.capability]
        self.launches += 1
        self.last_ptx = compiled.asm["ptx"]

    @staticmethod
    def type_of(value: Tensor | float) -> str:
        if isinstance(value, Tensor):
            return NAMES[value.dtype]
        return "fp32" if isinstance(value, float) else "i32"


@pytest.fixture(params=[80, 90])
def compilers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Compiler]]:
    stand_ins: dict[str, Compiler] = {}
    overlap = importlib.import_module("saccade.kernels.overlap")
    monkeypatch.setattr(overlap, "_can_overlap", lambda device: request.param >= 90)
    monkeypatch.setattr("saccade.kernels.scaled._shared_bytes", lambda device: SHARED_MEMORY[request.param])
    for module in ("fused", "fused_attention", "fused_images", "fused_vision", "vectors", "scaled"):
        host = importlib.import_module(f"saccade.kernels.{module}")
        for name in [n for n in vars(host) if n.endswith("_kernel")]:
            stand_ins[name] = Compiler(getattr(host, name), request.param)
            monkeypatch.setattr(host, name, stand_ins[name])
    yield stand_ins
    assert any(c.launches for c in stand_ins.values())


def is_aligned(value: object) -> bool:
    """Whether a launch specialises on the argument being divisible by 16."""
    return isinstance(value, Tensor) or (type(value) is int and value % 16 == 0)


def bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def test_norms_and_activations(compilers: dict[str, Compiler]) -> None:
    from saccade.kernels import fused

    for width in (72, 1152, 4096):
        fused.add_rms_norm(bf16(5, width), bf16(5, width), bf16(width), 1e-6, offset=1.0)
    fused.layer_norm(bf16(5, 1152), bf16(1152), bf16(1152), 1e-6)
    for kind in ACTIVATIONS:
        fused.gated_activation(bf16(5, 2 * 4304), kind)
    assert compilers["norm_kernel"].launches == 4


def test_products_with_one_row(compilers: dict[str, Compiler]) -> None:
    from saccade.kernels import fused

    for width, inner in ((6144, 4096), (4096, 12288), (4304, 1152)):
        fused.linear(bf16(1, inner), bf16(width, inner), bf16(width))
        fused.gated_linear(bf16(1, inner), bf16(2 * width, inner), "silu")
    assert compilers["vector_kernel"].launches == 6


@pytest.mark.parametrize("compilers", [90], indirect=True)
@pytest.mark.parametrize("layout", [Layout.ROWS, Layout.BLOCKS])
def test_rows_and_products_in_e4m3(compilers: dict[str, Compiler], layout: Layout) -> None:
    from saccade.kernels import scaled

    cpu = torch.device("cpu")
    vision_kinds = ACTIVATIONS if layout is Layout.ROWS else ("gelu_tanh",)
    for width, inner, kinds in ((256, 4096, ()), (384, 12288, ("silu",)), (256, 1152, vision_kinds)):
        weight = new_weight(width, inner, layout=layout, dtype=torch.bfloat16, device=cpu)
        experts = new_weight(6, width, inner, layout=layout, dtype=torch.bfloat16, device=cpu)
        x = scaled.scale_inputs(bf16(6, inner), weight)
        if inner < 12288:  # no model has norms as wide as an MLP
            scaled.scaled_rms_norm(bf16(6, inner), bf16(6, inner), bf16(inner), 1e-6, weight)
            scaled.scaled_layer_norm(bf16(6, inner), None, bf16(inner), bf16(inner), 1e-6, weight)
        for kind in kinds:
            scaled.scaled_gated_activation(bf16(6, 2 * inner), kind, weight)
            scaled.scaled_activation(bf16(6, inner), kind, weight)
        scaled.scaled_grouped_linear(x, experts, torch.arange(6, dtype=torch.int32))
        if layout is Layout.ROWS:
            scaled.scaled_linear(x, weight, bf16(width))
        scaled.row_linear(bf16(1, inner), weight, bf16(width))
        scaled.row_gated_linear(bf16(1, inner), weight)
        pending = Pending(bf16(1, inner), bf16(1, inner), bf16(1, inner), bf16(inner), 1e-6, 0.0)
        scaled.pending_linear(pending, weight)
        scaled.pending_gated_linear(pending, weight)
    assert compilers["scaled_norm_kernel"].launches == 4
    assert compilers["scaled_rows_kernel"].launches == 3 + 2 * (1 + len(vision_kinds))
    assert compilers["grouped_kernel"].launches == 3
    assert compilers["narrow_kernel"].launches == (3 if layout is Layout.ROWS else 0)


@pytest.mark.parametrize("compilers", [89, 90], indirect=True)
def test_products_of_few_rows_in_e4m3_fit_into_shared_memory(compilers: dict[str, Compiler]) -> None:
    from saccade.kernels import scaled

    for width, inner in ((4096, 4096), (24576, 4096)):
        weight = new_weight(width, inner, layout=Layout.ROWS, dtype=torch.bfloat16, device=torch.device("cpu"))
        scaled.scaled_linear(scaled.scale_inputs(bf16(6, inner), weight), weight)
    assert compilers["narrow_kernel"].launches == 2


@pytest.mark.parametrize("compilers", [80], indirect=True)
def test_products_of_experts(compilers: dict[str, Compiler], monkeypatch: pytest.MonkeyPatch) -> None:
    from saccade.kernels import scaled

    monkeypatch.setattr(scaled, "_major", lambda device: 8)
    monkeypatch.setattr(scaled, "_shared_bytes", lambda device: SHARED_MEMORY[89])
    for dtype in (torch.bfloat16, torch.float32):
        x, weight = torch.empty(6, 4096, dtype=dtype), torch.empty(6, 768, 4096, dtype=dtype)
        scaled.grouped_linear(x, weight, torch.arange(6, dtype=torch.int32))
    assert compilers["grouped_kernel"].launches == 2


@pytest.mark.parametrize("compilers", [89, 120], indirect=True)
def test_products_of_many_rows_in_e4m3(compilers: dict[str, Compiler], monkeypatch: pytest.MonkeyPatch) -> None:
    from saccade.kernels import scaled

    monkeypatch.setattr(scaled, "_major", lambda device: 8)
    for layout in (Layout.ROWS, Layout.BLOCKS):
        weight = new_weight(768, 4096, layout=layout, dtype=torch.bfloat16, device=torch.device("cpu"))
        scaled.scaled_linear(scaled.scale_inputs(bf16(68, 4096), weight), weight, bf16(768))
    assert compilers["grouped_kernel"].launches == 2


def test_rotary_and_stores(compilers: dict[str, Compiler]) -> None:
    from saccade.kernels import fused

    slots = torch.zeros(3, dtype=torch.int32)
    for heads, groups, width, turned in ((32, 8, 128, 128), (16, 16, 72, 72), (8, 1, 256, 256), (4, 2, 96, 32)):
        q, k = bf16(3, heads, width), bf16(3, groups, width)
        cos = torch.empty(3, turned)
        cache = bf16(7, 16, groups, width)
        for weight in (None, bf16(width)) if width == 128 else (bf16(width),):
            fused.qk_norm_rotary_store(q, k, k, weight, weight, 1e-6, cos, cos, slots, cache, cache)
    assert compilers["rotary_kernel"].launches == 5


def test_tables_of_positions_and_newest_tokens(compilers: dict[str, Compiler]) -> None:
    from saccade.kernels import fused

    positions, axes = torch.zeros(3, 40, dtype=torch.int32), torch.zeros(64, dtype=torch.int64)
    for one in (positions, positions[:, :9], torch.zeros(40, 2, dtype=torch.int64).T):
        fused.rotary_tables(one, axes, torch.zeros(64))
        assert "cos.approx" not in compilers["tables_kernel"].last_ptx, "wrong for angles of many turns"
    fused.newest_tokens(positions[0], positions[1], torch.zeros(9, dtype=torch.int64))
    assert compilers["tables_kernel"].launches == 3 and compilers["newest_kernel"].launches == 1


def test_packed_attention(compilers: dict[str, Compiler]) -> None:
    from saccade.kernels.fused_attention import TritonAttention

    for width, max_seqlen in ((80, 64), (128, 96)):
        q = bf16(96, 16, width)
        AttentionDispatch(TritonAttention()).varlen_attention(q, q, q, boundaries([64, 32]), max_seqlen, scale=0.1)
    assert compilers["varlen_kernel"].launches == 2


@pytest.mark.parametrize(
    ("heads", "groups", "width", "max_query", "options"),
    [
        (32, 8, 128, 1, {}),
        (32, 8, 128, 96, {}),
        (8, 4, 256, 96, {"window": 1024, "limits_T": torch.zeros(96, dtype=torch.int32)}),
    ],
)
def test_paged_attention(
    compilers: dict[str, Compiler], heads: int, groups: int, width: int, max_query: int, options: dict[str, Any]
) -> None:
    from saccade.kernels.fused_attention import TritonAttention

    cache, starts = bf16(9, 128, groups, width), boundaries([64, 32])
    lengths, tables = torch.ones(2, dtype=torch.int32), torch.zeros(2, 40, dtype=torch.int32)
    AttentionDispatch(TritonAttention()).paged_attention(
        bf16(96, heads, width), cache, cache, starts, lengths, tables,
        max_query=max_query, max_keys=5000, scale=0.1, **options,
    )  # fmt: skip
    assert compilers["paged_kernel"].launches == 1
    assert compilers["combine_kernel"].launches == 1


def test_many_images_at_once(compilers: dict[str, Compiler]) -> None:
    from saccade.kernels import fused_images
    from saccade.kernels.image_jobs import MAX_JOBS, Column, PatchSettings, Resample

    table, bytes_ = torch.zeros(len(Column), MAX_JOBS, dtype=torch.int32), torch.zeros(8, dtype=torch.uint8)
    cases: list[tuple[int, int, int, Resample]] = [(16, 2, 2, "bicubic"), (14, 1, 4, "bilinear")]
    for patch, temporal, merge, resample in cases:
        shape = PatchSettings(
            mean=(0.5,) * 3, std=(0.5,) * 3, patch=patch, temporal_patch=temporal, merge=merge, resample=resample
        )
        out = bf16(4, 3 * temporal * patch * patch)
        fused_images.JobKernels(table, bytes_, bytes_)(out, shape, (30, 4, 64))
    assert compilers["job_rows_kernel"].launches == compilers["job_patches_kernel"].launches == 2


def test_vision_towers(compilers: dict[str, Compiler]) -> None:
    from saccade.kernels import fused_vision

    taps = torch.zeros(4, 3, dtype=torch.int32)
    for heads, head_width in ((16, 72), (16, 80)):
        width = heads * head_width
        cos = torch.empty(3, head_width)
        fused_vision.rotate_packed(bf16(3, 3 * width), heads, cos, cos)
        fused_vision.add_positions(bf16(3, width), bf16(9, width), taps, taps.float())
    fused_vision.scatter_rows(bf16(4, 3, 4096), torch.zeros(3, dtype=torch.int64), bf16(4, 9, 4096))
    fused_vision.place_rows(bf16(3, 4096), bf16(4, 9, 4096), torch.zeros(3, dtype=torch.int32))
    assert "st.global.v4" in compilers["place_kernel"].last_ptx, "a thread writes 16 bytes at once"
    assert compilers["rotate_kernel"].launches == compilers["positions_kernel"].launches == 2
    assert compilers["scatter_kernel"].launches == compilers["place_kernel"].launches == 1
