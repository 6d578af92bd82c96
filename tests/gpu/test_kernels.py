"""bfloat16 kernels on the GPU at the dimensions of real models, against the float32 oracle, also inside graphs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade.kernels import overlap, reference
from saccade.kernels.backends import AttentionDispatch
from saccade.kernels.dispatch import Kernels, _attention_backends, kernels_for
from saccade.kernels.weight import Weight
from tests.kernels.cases import boundaries, paged_case, qkv_slices, randn, rotary_tables, span_limits, turned

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return kernels_for("cuda", BF16)


def every_attention(*, is_paged: bool) -> list[AttentionDispatch]:
    """The backends chosen for this GPU, Triton alone, and torch's if available."""
    from saccade.kernels.adapters import load_torch_varlen
    from saccade.kernels.fused_attention import TritonAttention

    chosen, _ = _attention_backends(torch.cuda.get_device_capability(), BF16)
    found = [AttentionDispatch(*chosen), AttentionDispatch(TritonAttention())]
    varlen = load_torch_varlen()
    if not is_paged and not isinstance(varlen, str):
        found.append(AttentionDispatch(varlen, TritonAttention()))
    return found


def error_of(actual: Tensor, expected: Tensor) -> float:
    """The norm of the difference relative to that of the expected result, in float64."""
    assert torch.isfinite(actual).all()
    actual, expected = actual.double().cpu(), expected.double().cpu()
    return float((actual - expected).norm() / expected.norm())


def check(actual: Tensor, expected: Tensor, bound: float = 5e-3) -> None:
    assert error_of(actual, expected) < bound


def cuda(*shape: int, seed: int) -> Tensor:
    return randn(*shape, seed=seed, dtype=BF16, device="cuda")


@pytest.mark.parametrize(("rows", "width"), [(406, 4096), (1296, 1152), (1, 4096), (70, 2560)])
def test_norms(kernels: Kernels, rows: int, width: int) -> None:
    x, residual, weight, bias = (cuda(*s, seed=i) for i, s in enumerate([(rows, width)] * 2 + [(width,)] * 2))
    floats = [t.float() for t in (x, residual, weight, bias)]
    total = (x + residual).float()
    check(kernels.rms_norm(x, weight, 1e-6, offset=1.0), reference.rms_norm(floats[0], floats[2], 1e-6, offset=1.0))
    check(kernels.layer_norm(x, weight, bias, 1e-6), reference.layer_norm(floats[0], floats[2], floats[3], 1e-6))
    y, summed = kernels.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(summed, x + residual)
    check(y, reference.rms_norm(total, floats[2], 1e-6))
    y, summed = kernels.add_layer_norm(x, residual, weight, bias, 1e-6)
    assert torch.equal(summed, x + residual)
    check(y, reference.layer_norm(total, floats[2], floats[3], 1e-6))


@pytest.mark.parametrize(
    ("rows", "width", "kind"), [(406, 12288, "silu"), (1296, 3420, "silu"), (99, 10240, "gelu_tanh"), (7, 4304, "gelu")]
)
def test_gated_activation(kernels: Kernels, rows: int, width: int, kind: str) -> None:
    x = cuda(rows, 2 * width, seed=1)
    check(kernels.gated_activation(x, kind), reference.gated_activation(x.float(), kind))


@pytest.mark.parametrize(
    ("rows", "heads", "groups", "width"), [(406, 32, 8, 128), (1296, 16, 16, 72), (1296, 16, 16, 80), (300, 8, 4, 256)]
)
def test_rotary_and_store(kernels: Kernels, rows: int, heads: int, groups: int, width: int) -> None:
    q, k, v = qkv_slices(rows, heads, groups, width, seed=2, dtype=BF16, device="cuda")
    cos, sin = rotary_tables(rows, width, seed=3, device="cuda")
    q_weight, k_weight = cuda(width, seed=4), cuda(width, seed=5)
    slots = (torch.randperm(rows, device="cuda") + 128).to(torch.int32)
    caches = [torch.full((rows // 128 + 3, 128, groups, width), float("nan"), dtype=BF16, device="cuda") for _ in "kv"]
    for ours, theirs in zip(
        turned(kernels, q, k, cos, sin), turned(reference, q.float(), k.float(), cos, sin), strict=True
    ):
        check(ours, theirs)
    q_out = kernels.qk_norm_rotary_store(q, k, v, q_weight, k_weight, 1e-6, cos, sin, slots, *caches)
    weights = q_weight.float(), k_weight.float()
    q_expected, k_expected = turned(reference, q.float(), k.float(), cos, sin, weights)
    check(q_out, q_expected)
    check(caches[0].flatten(0, 1)[slots.long()], k_expected)
    assert torch.equal(caches[1].flatten(0, 1)[slots.long()], v)
    assert torch.isnan(caches[0][0]).all()


@pytest.mark.parametrize("rows", [1, 406, 8192])
def test_tables_of_positions(kernels: Kernels, rows: int) -> None:
    """Angles of up to 300,000 radians are float32, as in transformers; their cosines are exact."""
    positions = torch.randint(0, 300_000, (3, rows + 7), device="cuda", dtype=torch.int32)[:, :rows]
    axes = torch.arange(64, device="cuda") % 3
    frequencies = 5e6 ** (-torch.arange(64, device="cuda") / 64)
    angles = (positions[axes].T.float() * frequencies).double().repeat(1, 2)
    cos, sin = kernels.rotary_tables(positions, axes, frequencies)
    torch.testing.assert_close(cos, angles.cos().float(), rtol=0, atol=1e-6)
    torch.testing.assert_close(sin, angles.sin().float(), rtol=0, atol=1e-6)


def test_newest_tokens(kernels: Kernels) -> None:
    for rows in (1, 64, 8192):
        ids, pending = (torch.randint(low, 64, (rows,), device="cuda", dtype=torch.int32) for low in (0, -20))
        newest = torch.randint(0, 2**40, (64,), device="cuda")
        found = kernels.newest_tokens(ids, pending, newest)
        assert torch.equal(found, reference.newest_tokens(ids, pending, newest))


VARLEN = [
    ("Qwen3-VL vision", 16, 72, [1296, 700, 0, 64, 236]),
    ("Qwen2.5-VL vision", 16, 80, [1296, 20, 980]),
    ("Qwen2.5-VL windows", 16, 80, [64] * 20 + [16, 48, 0, 4, 60]),
    ("Gemma-3 SigLIP", 16, 72, [4096]),
]


@pytest.mark.parametrize(("name", "heads", "width", "lengths"), VARLEN, ids=[v[0] for v in VARLEN])
def test_varlen_attention_in_and_out_of_a_graph(
    kernels: Kernels, name: str, heads: int, width: int, lengths: list[int]
) -> None:
    rows, longest = sum(lengths), max(lengths)
    q, k, v = qkv_slices(rows, heads, heads, width, seed=6, dtype=BF16, device="cuda")
    scale = width**-0.5
    layouts = [lengths, lengths[::-1], [longest, *[0] * (len(lengths) - 2), rows - longest]]
    layouts = [layout for layout in layouts if max(layout) <= longest and len(layout) == len(lengths)]
    for attention in every_attention(is_paged=False):
        attend = attention.varlen_attention
        starts = boundaries(lengths, "cuda")
        graph, out = captured(partial(attend, q, k, v, starts, longest, scale=scale))
        for layout in layouts:
            starts.copy_(boundaries(layout, "cuda"))
            expected = reference.varlen_attention(q.float(), k.float(), v.float(), starts, longest, scale=scale)
            check(attend(q, k, v, starts, longest, scale=scale), expected, 1e-2)
            graph.replay()
            check(out, expected, 1e-2)


def test_poisoned_padding_changes_nothing_in_varlen_attention(kernels: Kernels) -> None:
    """flash-attn-4 gives values past a segment weight zero, so they must be finite; all else may be NaN."""
    q, k, v = qkv_slices(1000, 16, 16, 72, seed=7, dtype=BF16, device="cuda")
    for attention in every_attention(is_paged=False):
        attend = attention.varlen_attention
        starts = boundaries([500, 300, 200], "cuda")
        clean = attend(q, k, v, starts, 500, scale=0.1)
        for x in (q, k, v):
            x[800:] = float("nan")
        if "flash" in attention.name:
            v[800:] = 1e4
        assert torch.equal(attend(q, k, v, starts, 500, scale=0.1)[:800], clean[:800])
        for x in (q, k, v):
            x[800:] = 1.0


PAGED: list[tuple[str, int, int, int, dict[str, Any]]] = [
    ("Qwen3-VL-8B", 32, 8, 128, {}),
    ("Qwen2.5-VL-7B", 28, 4, 128, {}),
    ("Gemma-3-4B global", 8, 4, 256, {}),
    ("Gemma-3-4B sliding", 8, 4, 256, {"window": 300}),
]
BATCHES = [([406, 1, 130, 0, 60], [406, 900, 512, 33, 0]), ([1, 400, 6, 190, 0], [1, 401, 700, 190, 0])]


@pytest.mark.parametrize(("name", "heads", "groups", "width", "options"), PAGED, ids=[p[0] for p in PAGED])
def test_paged_prefill_in_and_out_of_a_graph(
    kernels: Kernels, name: str, heads: int, groups: int, width: int, options: dict[str, Any]
) -> None:
    run_paged(kernels, BATCHES, heads, groups, width, max_query=600, max_keys=1024, options=options)


@pytest.mark.parametrize(("name", "heads", "groups", "width", "options"), PAGED, ids=[p[0] for p in PAGED])
def test_paged_decode_in_and_out_of_a_graph(
    kernels: Kernels, name: str, heads: int, groups: int, width: int, options: dict[str, Any]
) -> None:
    few = [([1, 1, 1], [3000, 1, 0]), ([1, 1, 1], [129, 2048, 4000])]
    many = [([1] * 70, [17 * i + 1 for i in range(69)] + [0]), ([1] * 70, [900 - 7 * i for i in range(70)])]
    for batches, room in ((few, 4096), (many, 2048)):
        run_paged(kernels, batches, heads, groups, width, max_query=1, max_keys=room, options=options)


def run_paged(
    kernels: Kernels,
    batches: list[tuple[list[int], list[int]]],
    heads: int,
    groups: int,
    width: int,
    *,
    max_query: int,
    max_keys: int,
    options: dict[str, Any],
) -> None:
    """Captures with the first batch, then refills the same buffers with each batch.

    flash-attn-4 needs finite values in the unused slots of a used block, so its cache is poisoned with large numbers.
    """
    settings: dict[str, Any] = {"max_query": max_query, "max_keys": max_keys, "scale": width**-0.5, **options}
    for attention in every_attention(is_paged=True):
        attend = attention.paged_attention
        poison = 1e4 if "flash" in attention.name else float("nan")
        cases = [
            paged_case(
                queries, keys, num_heads=heads, num_groups=groups, head_width=width,
                block_size=128, seed=i, dtype=BF16, device="cuda", poison=poison,
            )
            for i, (queries, keys) in enumerate(batches)
        ]  # fmt: skip
        rows = max(c.q.shape[0] for c in cases)
        assert all(c.q.shape[0] == rows for c in cases), "batches of one bucket have equal rows"
        shapes = [
            torch.stack([torch.tensor(x.shape) for x in column]).amax(0).tolist()
            for column in zip(*(c.inputs for c in cases), strict=True)
        ]
        buffers = [torch.zeros(s, dtype=x.dtype, device="cuda") for s, x in zip(shapes, cases[0].inputs, strict=True)]
        refill(buffers, cases[0].inputs)
        graph, out = captured(partial(attend, *buffers, **settings))
        for case in [*cases, cases[0]]:
            refill(buffers, case.inputs)
            cleaned = [x.float() if x.is_floating_point() else x for x in buffers]
            expected = reference.paged_attention(*cleaned, **settings)
            real = torch.repeat_interleave(case.key_lengths > 0, case.query_start.diff().long())
            graph.replay()
            for result in (out, attend(*buffers, **settings)):
                check(result[real], expected[real], 1e-2)
                assert (result[~real] == 0).all()


def refill(buffers: list[Tensor], values: tuple[Tensor, ...]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.zero_()[tuple(map(slice, value.shape))].copy_(value)


def test_paged_limits_of_gemma3(kernels: Kernels) -> None:
    case = paged_case(
        [700, 90], [700, 600], num_heads=8, num_groups=4, head_width=256, block_size=128, dtype=BF16, device="cuda"
    )
    limits = span_limits(case, {0: [(5, 261), (300, 556)], 1: [(520, 590)]})
    cleaned = [x.float() if x.is_floating_point() else x for x in case.inputs]
    for window in (None, 200):
        settings: dict[str, Any] = {
            "max_query": 700,
            "max_keys": 768,
            "scale": 1 / 16,
            "window": window,
            "limits_T": limits,
        }
        for attention in every_attention(is_paged=True):
            attend = attention.paged_attention
            check(attend(*case.inputs, **settings), reference.paged_attention(*cleaned, **settings), 1e-2)


def captured(body: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Warms up the body on a side stream, captures it, and returns the graph with its output."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            body()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = body()
    return graph, out


def test_overlapping_kernels_read_what_their_predecessors_wrote(kernels: Kernels) -> None:
    """A chain of single rows, whose products norm them and read weights before their inputs are ready, always has the
    bits of a chain without overlap. Two rows take turns, so that leftovers of the last replay are wrong."""
    width, count = 4096, 24
    weights = [cuda(width, width, seed=i) * width**-0.5 for i in range(count)]
    norm, starts = cuda(width, seed=99), [cuda(1, width, seed=seed) for seed in (100, 101)]
    start = starts[0].clone()

    def chain() -> list[Tensor]:
        x, residual, rows = start, start, []
        for weight in weights:
            inputs, residual = kernels.rms_inputs(x, residual, norm, 1e-6, Weight(weight, BF16), offset=0.0)
            row = kernels.multiply(inputs, Weight(weight, BF16))
            x = kernels.rms_norm(row, norm, 1e-6)
            rows += [row, x, residual]
        return rows

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(overlap, "_can_overlap", lambda device: False)
        expected = []
        for row in starts:
            start.copy_(row)
            expected.append(torch.cat(chain()))
    graph = torch.cuda.CUDAGraph()
    chain()
    with torch.cuda.graph(graph):
        found = torch.cat(chain())
    for row, right in zip(starts * 25, expected * 25, strict=True):
        start.copy_(row)
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, right)
