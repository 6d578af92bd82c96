"""The choice of kernels is complete, has reasons, and keeps every signature."""

import inspect
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade.config import KEEPS_ATTENTION, KERNEL_CACHES
from saccade.errors import ConfigError
from saccade.kernels import dispatch, reference
from saccade.kernels.backends import AttentionDispatch, PackedCall, PagedCall
from saccade.kernels.dispatch import Kernels, KernelTable, SamplingKernels, device_named, kernels_for

FUNCTIONS = Kernels.kernel_names()


def test_a_cpu_gets_the_reference_with_a_reason_for_each_function() -> None:
    kernels = kernels_for(torch.device("cpu"), torch.float32)
    assert kernels.name == "reference"
    assert kernels.rms_norm is reference.rms_norm
    rows = kernels.describe()
    assert [row[0] for row in rows] == FUNCTIONS
    assert all(implementation and reason for _, implementation, reason in rows)
    assert ("paged_attention", "reference_attention", "the device is a CPU") in rows


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="allowed: cpu, cuda"):
        kernels_for("meta", torch.float32)


def choose(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, flash: Any) -> Kernels:
    adapters = pytest.importorskip("saccade.kernels.adapters")
    monkeypatch.setattr(adapters, "load_flash_attention", lambda: flash)
    return dispatch._cuda_kernels(capability, dtype)


def test_a_hopper_gpu_with_flash_attention_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = pytest.importorskip("saccade.kernels.adapters")
    kernels = choose(monkeypatch, (9, 0), torch.bfloat16, adapters.FlashAttention(lambda: None))
    found = {name: (origin, reason) for name, origin, reason in kernels.describe()}
    assert found["paged_attention"] == ("flash-attn-4 or triton", "the first that supports a call takes it")
    assert kernels.name.endswith("+flash-attn-4")
    assert found["add_rms_norm"][0] == "fused"


@pytest.mark.parametrize(
    ("capability", "dtype", "varlen", "reason"),
    [
        ((9, 0), torch.bfloat16, "torch varlen or triton", "not installed here"),
        ((8, 6), torch.float16, "torch varlen or triton", "compute capability 9.0"),
        ((9, 0), torch.float32, "triton", "float16 and bfloat16"),
        ((7, 5), torch.float16, "triton", "compute capability 8.0"),
    ],
)
def test_without_flash_attention_the_reason_is_recorded(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, varlen: str, reason: str
) -> None:
    kernels = choose(monkeypatch, capability, dtype, "not installed here")
    found = {name: (origin, why) for name, origin, why in kernels.describe()}
    assert found["paged_attention"][0] == found["varlen_attention"][0] == varlen
    assert reason in found["varlen_attention"][1]


@pytest.mark.parametrize("table", [Kernels, SamplingKernels])
def test_every_implementation_has_the_signature_of_its_oracle(table: type[KernelTable]) -> None:
    """mypy checks calls against the oracle, so implementations must have the same signature."""
    pytest.importorskip("triton")
    from saccade.kernels import (
        fused,
        fused_sampling,
        fused_vision,
        products,
        scaled,
    )

    modules = (fused, fused_sampling, fused_vision, scaled)
    owners = (*modules, AttentionDispatch, products.HopperProducts)
    for name in table.kernel_names():
        found = [getattr(owner, name) for owner in owners if hasattr(owner, name)]
        assert found, f"no GPU kernel is called {name}"
        for function in found:
            signature = inspect.signature(function)
            ours = [p for p in signature.parameters.values() if p.name != "self"]
            assert signature.replace(parameters=ours) == inspect.signature(getattr(table, name)), function


def test_a_kernel_that_has_no_oracle_is_refused() -> None:
    with pytest.raises(AssertionError, match="Kernels has no kernel called rms_morn"):
        kernels_for("cpu", torch.float32).replacing(rms_morn=reference.rms_norm)


@pytest.mark.parametrize(
    ("case", "taken_by"),
    [
        ({}, "flash-attn-4"),
        ({"max_query": 1, "num_rows": 64, "num_requests": 64}, "flash-attn-4"),
        ({"max_query": 1, "num_rows": 4, "num_requests": 4}, "triton"),
        ({"max_query": 1, "num_rows": 4, "num_requests": 4, "window": 500}, "flash-attn-4"),
        ({"has_limits": True}, "triton"),
        ({"head_width": 100}, "triton"),
        ({"head_width": 512}, "triton"),
    ],
)
def test_each_paged_call_goes_to_the_first_backend_that_supports_it(case: dict[str, Any], taken_by: str) -> None:
    chosen = flash_and_triton()
    call = PagedCall(
        num_rows=900, num_heads=32, num_groups=8, head_width=128, dtype=torch.bfloat16, num_requests=3, block_size=128,
        max_query=600, max_keys=32768, window=None, has_limits=False,
    )._replace(**case)  # fmt: skip
    assert chosen._chosen(call)[0].name == taken_by


@pytest.mark.parametrize(("longest", "taken_by"), [(64, "triton"), (65, "flash-attn-4")])
def test_segments_of_one_tile_go_to_triton(longest: int, taken_by: str) -> None:
    call = PackedCall(
        num_rows=900, num_heads=16, num_groups=16, head_width=80, dtype=torch.bfloat16, num_segments=20,
        max_seqlen=longest, causal=False,
    )  # fmt: skip
    assert flash_and_triton()._chosen(call)[0].name == taken_by


def flash_and_triton() -> AttentionDispatch:
    adapters = pytest.importorskip("saccade.kernels.adapters")
    attention = pytest.importorskip("saccade.kernels.fused_attention")
    return AttentionDispatch(adapters.FlashAttention(lambda: None), attention.TritonAttention())


def test_the_torch_adapter_supports_every_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keywords of torch 2.10, 2.11 and 2.13, with a stand-in that computes the same."""
    adapters = pytest.importorskip("saccade.kernels.adapters")
    from tests.kernels.cases import boundaries, qkv_slices

    q, k, v = qkv_slices(200, 4, 2, 16, seed=1)
    starts = boundaries([120, 80])

    def release(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, **options: Any) -> Any:
        causal = options.get("is_causal", False) or options.get("window_size", (-1, -1)) == (-1, 0)
        assert options.get("enable_gqa", False) or q.shape[1] == k.shape[1]
        scale = options.get("scale", 16**-0.5)
        return reference.varlen_attention(q, k, v, cu_q, max_q, scale=scale, causal=causal), "log-sum-exp"

    for accepts in ({"is_causal"}, {"window_size", "scale"}, {"window_size", "scale", "enable_gqa"}):
        adapter = AttentionDispatch(adapters.TorchVarlen(release, frozenset(accepts)))
        for causal in (False, True):
            ours = adapter.varlen_attention(q, k, v, starts, 120, scale=0.3, causal=causal)
            theirs = reference.varlen_attention(q, k, v, starts, 120, scale=0.3, causal=causal)
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_installed_torch_has_an_adapter() -> None:
    adapters = pytest.importorskip("saccade.kernels.adapters")
    assert {"cu_seq_q", "max_q"} <= adapters.load_torch_varlen().accepts
    refusal = adapters.load_flash_attention()
    assert not isinstance(refusal, str) or "saccade-vlm[cuda]" in refusal


def test_compiled_kernels_are_stored_where_only_their_user_can_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in (KERNEL_CACHES[0], KERNEL_CACHES[2], KEEPS_ATTENTION):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)
    monkeypatch.setenv(KERNEL_CACHES[1], "/chosen/by/the/user")
    choose(monkeypatch, (9, 0), torch.bfloat16, "not installed here")
    folder = tmp_path / "saccade" / "kernels"
    assert os.environ[KERNEL_CACHES[0]] == str(folder)
    assert os.environ[KERNEL_CACHES[1]] == "/chosen/by/the/user"
    assert os.environ[KEEPS_ATTENTION] == "1"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("word", "num_gpus", "meant"),
    [
        ("auto", 0, "cpu"),
        ("auto", 2, "cuda"),
        ("auto:1", 2, "cuda:1"),
        ("auto:1", 0, "cpu"),
        ("cpu", 2, "cpu"),
        ("cuda", 1, "cuda"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_device_names_are_resolved(monkeypatch: pytest.MonkeyPatch, word: str, num_gpus: int, meant: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: num_gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    assert device_named(word) == torch.device(meant)


@pytest.mark.parametrize(
    ("word", "num_gpus", "message"),
    [
        ("tpu", 1, "device is 'tpu'; allowed: auto, cpu, cuda"),
        ("cpu:0", 1, "allowed: auto"),
        ("cuda", 0, "finds no GPU on this machine; `saccade doctor`"),
        ("cuda:2", 2, "this machine has GPUs 0..1 (--device, --data-parallel-size)"),
        ("auto:2", 2, "device is cuda:2; this machine has GPUs 0..1 (--device, --data-parallel-size)"),
    ],
)
def test_a_missing_device_is_refused(monkeypatch: pytest.MonkeyPatch, word: str, num_gpus: int, message: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: num_gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    with pytest.raises(ConfigError) as refused:
        device_named(word)
    assert message in str(refused.value)
