"""Plain-torch attention against loops in float64 and against the Gemma-3 masks of transformers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model, get_block_sequence_ids_for_mask

from saccade.kernels import reference
from tests.kernels.cases import POISON, Paged, boundaries, paged_case, qkv_slices, randn, span_limits


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """One head at a time, in float64."""
    out = torch.empty_like(q, dtype=torch.float64)
    share = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        scores = q[:, head].double() @ k[:, head // share].double().T * scale
        scores = scores.masked_fill(~visible, float("-inf"))
        out[:, head] = scores.softmax(-1) @ v[:, head // share].double()
    return out.to(q.dtype)


def loop_over_segments(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float, causal: bool) -> Tensor:
    parts = []
    for a, b, c in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        visible = torch.ones(len(a), len(a), dtype=torch.bool)
        parts.append(softmax_attention(a, b, c, visible.tril() if causal else visible, scale))
    return torch.cat(parts)


def loop_over_requests(
    case: Paged,
    scale: float,
    window: int | None = None,
    spans: dict[int, list[tuple[int, int]]] | None = None,
) -> Tensor:
    parts = []
    for r, (n, length) in enumerate(zip(case.num_queries, case.num_keys, strict=True)):
        q = case.q[case.query_start[r] : case.query_start[r + 1]]
        if length == 0:
            parts.append(torch.zeros_like(q))
            continue
        visible = torch.zeros(n, length, dtype=torch.bool)
        for i in range(n):
            position = length - n + i
            for j in range(length):
                same_image = any(a <= position < b and a <= j < b for a, b in (spans or {}).get(r, []))
                recent = window is None or j > position - window
                visible[i, j] = recent and (j <= position or same_image)
        parts.append(softmax_attention(q, case.keys[r], case.values[r], visible, scale))
    return torch.cat(parts)


SEGMENTS = [[12], [5, 7], [1, 0, 6, 4, 0, 1], [0, 12], [3, 3, 3, 3]]


@pytest.mark.parametrize("lengths", SEGMENTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("room", [0, 5])
@pytest.mark.parametrize("heads", [(3, 3), (4, 2), (7, 1)])
def test_varlen(lengths: list[int], causal: bool, room: int, heads: tuple[int, int]) -> None:
    q, k, v = qkv_slices(12, *heads, 24, seed=1)
    ours = reference.varlen_attention(q, k, v, boundaries(lengths), max(lengths) + room, scale=0.2, causal=causal)
    torch.testing.assert_close(ours, loop_over_segments(q, k, v, lengths, 0.2, causal), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("max_seqlen", [5, 14])
def test_varlen_poison_stays_in_its_segment(max_seqlen: int) -> None:
    lengths = [4, 5, 0, 5]
    q, k, v = qkv_slices(14, 4, 2, 16, seed=2)
    for x in (q, k, v):
        x[9:] = POISON
    ours = reference.varlen_attention(q, k, v, boundaries(lengths), max_seqlen, scale=0.3)
    expected = loop_over_segments(q[:9], k[:9], v[:9], lengths[:2], 0.3, False)
    torch.testing.assert_close(ours[:9], expected, rtol=1e-5, atol=1e-5)
    assert torch.isnan(ours[9:]).all()


@pytest.mark.parametrize("max_seqlen", [8, 40])
def test_varlen_does_not_hide_nonfinite_values(max_seqlen: int) -> None:
    q, k, v = qkv_slices(40, 2, 2, 16, seed=3)
    v[10, 1, 3] = float("inf")
    starts = boundaries([8] * 5)
    ours = reference.varlen_attention(q, k, v, starts, max_seqlen, scale=0.3)
    assert not torch.isfinite(ours[8:16]).all()
    assert torch.isfinite(ours[:8]).all()
    assert torch.isfinite(ours[16:]).all()


def test_a_frozen_length_that_is_too_small_gives_wrong_rows() -> None:
    """Like a GPU kernel, which launches no further tiles, the oracle must not return the right rows by chance."""
    q, k, v = qkv_slices(12, 2, 2, 16, seed=4)
    short = reference.varlen_attention(q, k, v, boundaries([3, 6, 3]), 3, scale=0.3)
    case = paged_case([6, 1], [6, 9], num_heads=2, num_groups=1, head_width=16)
    few = reference.paged_attention(*case.inputs, max_query=2, max_keys=9, scale=0.2)
    assert not short[6:9].any() and not few[2:6].any()
    torch.testing.assert_close(few[:2], loop_over_requests(case, 0.2)[:2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("share", [1, 2, 4, 7])
@pytest.mark.parametrize("options", [{}, {"window": 4}, {"window": 9}])
def test_paged(share: int, options: dict[str, Any]) -> None:
    case = paged_case([6, 3, 1, 0, 1, 5], [6, 14, 17, 8, 1, 0], num_heads=2 * share, num_groups=2, head_width=24)
    ours = reference.paged_attention(*case.inputs, max_query=7, max_keys=20, scale=0.2, **options)
    torch.testing.assert_close(ours, loop_over_requests(case, 0.2, **options), rtol=1e-5, atol=1e-5)


def test_paged_ignores_unused_table_entries() -> None:
    case = paged_case([2, 1], [5, 20], num_heads=2, num_groups=1, head_width=16, block_size=4, seed=4)
    expected = reference.paged_attention(*case.inputs, max_query=2, max_keys=20, scale=0.2)
    case.block_tables[0, 2:] = 10**6
    case.block_tables[1, 5:] = -1
    ours = reference.paged_attention(*case.inputs, max_query=2, max_keys=24, scale=0.2)
    torch.testing.assert_close(ours, expected)


def test_paged_in_half_precision_returns_its_dtype() -> None:
    case = paged_case([3], [9], num_heads=2, num_groups=1, head_width=16, dtype=torch.bfloat16)
    ours = reference.paged_attention(*case.inputs, max_query=3, max_keys=9, scale=0.2)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, loop_over_requests(case, 0.2), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("window", [None, 3, 8])
def test_paged_limits_match_the_masks_of_gemma3(window: int | None) -> None:
    """The masks transformers builds for global and sliding layers, over a prompt with two images."""
    length, images = 26, [(2, 9), (13, 24)]
    case = paged_case([length], [length], num_heads=4, num_groups=2, head_width=16, seed=5)
    token_types = torch.zeros(1, length, dtype=torch.int64)
    for a, b in images:
        token_types[:, a:b] = 1
    config = Gemma3TextConfig(
        hidden_size=8,
        num_hidden_layers=2,
        sliding_window=window or 4,
        layer_types=["sliding_attention", "full_attention"],
    )
    config._attn_implementation = "sdpa"
    masks = create_masks_for_vision_model(
        config=config,
        inputs_embeds=torch.zeros(1, length, 8),
        attention_mask=None,
        past_key_values=None,
        position_ids=torch.arange(length)[None],
        block_sequence_ids=get_block_sequence_ids_for_mask(token_types),
    )
    visible = masks["full_attention" if window is None else "sliding_attention"][0, 0]
    limits = span_limits(case, {0: images})
    ours = reference.paged_attention(
        *case.inputs, max_query=length, max_keys=length, scale=0.2, window=window, limits_T=limits
    )
    expected = softmax_attention(case.q, case.keys[0], case.values[0], visible, 0.2)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(ours, loop_over_requests(case, 0.2, window=window), atol=1e-3)


def test_paged_limits_over_several_requests() -> None:
    """One image is in a later chunk. Limits of dummy rows must not matter."""
    case = paged_case([8, 6, 3], [8, 15, 0], num_heads=2, num_groups=2, head_width=16, seed=6)
    spans = {0: [(1, 5)], 1: [(10, 14)]}
    limits = span_limits(case, spans)
    limits[-3:] = 1000
    for window in (None, 3):
        ours = reference.paged_attention(
            *case.inputs, max_query=8, max_keys=16, scale=0.2, window=window, limits_T=limits
        )
        expected = loop_over_requests(case, 0.2, window=window, spans=spans)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


class Recorder(TorchDispatchMode):
    """Records aten calls, and refuses calls whose output or shape depends on data."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        banned = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        assert not banned & set(func.tags), f"{func} reads data on the host"
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        """Runs the calls again and copies each result to where the first run put it."""
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            pairs = zip(result, again, strict=True) if isinstance(result, tuple | list) else [(result, again)]
            for old, new in pairs:
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def test_varlen_recorded_once_is_right_for_other_boundaries() -> None:
    """Other images with the same total: the batch [4, 6, 8] is replayed as [5, 5, 8] and as [18, 0, 0]."""
    others = {8: ([5, 5, 8], [8, 2, 8], [4, 6, 8]), 18: ([18, 0, 0], [5, 5, 8])}
    for max_seqlen, compositions in others.items():
        q, k, v = qkv_slices(18, 4, 2, 16, seed=7)
        starts = boundaries([4, 6, 8])
        body = partial(reference.varlen_attention, q, k, v, starts, max_seqlen, scale=0.2)
        recorder = record(body)
        out = recorder.calls[-1][-1]
        for lengths in compositions:
            starts.copy_(boundaries(lengths))
            q.copy_(randn(18, 4, 16, seed=lengths[0]))
            recorder.replay()
            torch.testing.assert_close(out, loop_over_segments(q, k, v, lengths, 0.2, False), rtol=1e-5, atol=1e-5)


def test_paged_recorded_once_is_right_for_other_requests() -> None:
    shape: dict[str, Any] = {"num_heads": 4, "num_groups": 2, "head_width": 16, "block_size": 4}
    first = paged_case([5, 3, 2], [9, 17, 0], **shape, seed=8)
    limits = span_limits(first, {0: [(5, 8)]})
    options: dict[str, Any] = {"max_query": 10, "max_keys": 20, "scale": 0.2, "window": 11, "limits_T": limits}
    recorder = record(partial(reference.paged_attention, *first.inputs, **options))
    out = recorder.calls[-1][-1]
    for queries, keys, spans in (([2, 7, 1], [19, 7, 0], {1: [(1, 6)]}), ([0, 1, 9], [3, 11, 12], {2: [(4, 12)]})):
        other = paged_case(queries, keys, **shape, seed=9)
        for old, new in zip(first.inputs, other.inputs, strict=True):
            old.fill_(POISON if old.is_floating_point() else 0)[tuple(map(slice, new.shape))].copy_(new)
        limits.copy_(span_limits(other, spans))
        recorder.replay()
        expected = loop_over_requests(other, 0.2, window=11, spans=spans)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def record(body: Callable[[], Tensor]) -> Recorder:
    """Records one node, which reads boundaries when it runs and not while it is recorded."""
    recorder = Recorder()
    with recorder, torch.no_grad():
        body()
    assert len(recorder.calls) == 1
    return recorder
