"""The graph core on a GPU: replays against eager runs, real varlen attention, no allocations, no waits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.config import GraphSettings, Mode
from saccade.graphs import (
    Arena,
    Capacity,
    Frame,
    GraphKey,
    GraphRunner,
    Phase,
    boundaries,
    copy_out,
    lane_for,
    output,
    rows,
)
from saccade.graphs.capture import capture
from saccade.graphs.frame import run_body
from tests.graphs import toy
from tests.graphs.mutations import Mutations

HEADS, HEAD_WIDTH = 16, 64


class TestOnCuda(Mutations):
    device = "cuda"


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replay_is_bit_identical_to_an_eager_run_on_the_same_buffers(mode: Mode, dtype: torch.dtype) -> None:
    capacity = Capacity.of(tokens=96, segments=8)
    phase = toy.make_phase(((96, 8),), encoder=toy.Encoder(dtype=dtype), device="cuda")
    arena = phase.arena
    graph = capture(phase.body, GraphKey("toy", mode, capacity), arena, lane_for(arena.device), state=phase.state)
    rng = torch.Generator().manual_seed(0)
    for lengths in [(40, 50), (45, 45), (96,), (1,), (3, 3, 3, 80), (40, 50)]:
        arena.fill(arena.admit(phase.example(lengths, rng)), capacity)
        graph.replay()
        replayed = arena.views(capacity)["y"].clone()
        arena.views(capacity)["y"].fill_(float("nan"))
        with torch.no_grad():
            run_body(phase.body, Frame(arena, capacity))
        assert torch.equal(replayed, arena.views(capacity)["y"])


def torch_varlen(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    attended = varlen_attn(q, k, v, cu, cu, longest, longest)
    assert isinstance(attended, Tensor)
    return attended


def flash_attention_4(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int) -> Tensor:
    """Its tiles reach past the end of a segment. Keys there get weight zero, but zero times NaN is NaN, so values must
    be finite everywhere, including padding."""
    interface = pytest.importorskip("flash_attn.cute.interface")
    attended = interface.flash_attn_varlen_func(
        q, k, v.nan_to_num(), cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest
    )
    first: Tensor = attended[0] if isinstance(attended, tuple) else attended
    return first


@pytest.mark.parametrize("attend", [torch_varlen, flash_attention_4])
def test_one_graph_is_right_for_200_segmentations_of_its_bucket(attend: Callable[..., Tensor]) -> None:
    tokens, segments = 1024, 24
    runner = attention_runner(attend, tokens, segments)
    rng = torch.Generator().manual_seed(11)
    worst = 0.0
    for trial in range(200):
        total = tokens if trial % 4 == 0 else int(torch.randint(1, tokens, (), generator=rng))
        count = int(torch.randint(1, min(segments - 1, total) + 1, (), generator=rng))
        cuts = sorted((torch.randperm(total - 1, generator=rng)[: count - 1] + 1).tolist()) if total > 1 else []
        qkv, cu = packed(total, rng), [0, *cuts, total]
        values = {"qkv": qkv, "cu": cu}
        actual = runner.replay(runner.graphs[0].key, runner.phase.arena.admit(values), copy_out, poison=True)["y"]
        expected = segment_by_segment(qkv, cu)
        worst = max(worst, relative_error(actual, expected))
    print(f"{attend.__name__}: largest relative error of 200 segmentations {worst:.1e}")
    assert worst < 1e-2


def attention_runner(attend: Callable[..., Tensor], tokens: int, segments: int) -> GraphRunner:
    shape = ("tokens", 3, HEADS, HEAD_WIDTH)
    buffers = [
        rows("qkv", shape, torch.bfloat16),
        boundaries("cu", of="tokens", count="segments"),
        output("y", ("tokens", HEADS, HEAD_WIDTH), torch.bfloat16),
    ]

    def body(frame: Frame) -> dict[str, Tensor]:
        q, k, v = (part.contiguous() for part in frame["qkv"].unbind(1))
        return {"y": attend(q, k, v, frame["cu"], frame.longest("cu"))}

    def example(lengths: tuple[int, ...], rng: torch.Generator) -> dict[str, Any]:
        return {"qkv": packed(sum(lengths), rng), "cu": [sum(lengths[:i]) for i in range(len(lengths) + 1)]}

    phase = Phase(
        name="attention",
        body=body,
        arena=Arena(buffers, {"tokens": tokens, "segments": segments}, "cuda"),
        rows="tokens",
        buckets=(Capacity.of(tokens=tokens, segments=segments),),
        example=example,
    )
    runner = GraphRunner(phase)
    runner.capture_buckets()
    return runner


def packed(total: int, rng: torch.Generator) -> Tensor:
    return torch.randn(total, 3, HEADS, HEAD_WIDTH, generator=rng).to("cuda", torch.bfloat16)


def segment_by_segment(qkv: Tensor, cu: list[int]) -> Tensor:
    parts = []
    for low, high in pairwise(cu):
        q, k, v = qkv[low:high].float().permute(1, 2, 0, 3)
        parts.append(F.scaled_dot_product_attention(q[None], k[None], v[None])[0].transpose(0, 1))
    return torch.cat(parts)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    error = (actual.float() - expected).norm() / expected.norm()
    return float(error) if error.isfinite() else float("inf")


@contextmanager
def no_allocation_and_no_wait() -> Iterator[None]:
    """Fails if the block allocates device memory or makes the host wait for the device."""
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_the_check_for_allocations_and_waits_can_fail() -> None:
    with pytest.raises(AssertionError), no_allocation_and_no_wait():
        torch.zeros(4, device="cuda")
    x = torch.zeros(4, device="cuda")
    with pytest.raises(RuntimeError, match="synchronizing"), no_allocation_and_no_wait():
        x[0].item()


def test_a_full_replay_allocates_nothing_and_waits_for_nothing() -> None:
    runner = toy.make_runner(device="cuda")
    kept = torch.empty(32, toy.WIDTH, device="cuda")
    batches = [toy.batch(*lengths, device="cuda") for lengths in ((4, 6, 8), (5, 5, 8), (3,), (32,))] * 3

    def into_kept(outputs: Any) -> None:
        kept[: outputs["y"].shape[0]].copy_(outputs["y"])

    runner.run(batches[0], into_kept)
    torch.cuda.synchronize()
    with no_allocation_and_no_wait():
        for values in batches:
            runner.run(values, into_kept)
    torch.testing.assert_close(kept, runner.eager(batches[-1], copy_out)["y"], rtol=0, atol=1e-4)
    assert runner.stats.fallbacks.total() == 0


def test_a_piecewise_replay_allocates_nothing_where_its_calls_write_in_place() -> None:
    def scaled_into(attended: Tensor, factor: Tensor, qkv: Tensor) -> Tensor:
        return torch.mul(qkv[:, : toy.WIDTH], factor, out=attended)

    factor = torch.tensor(0.5, device="cuda")

    def body(frame: Frame) -> dict[str, Tensor]:
        x = frame["x"]
        for _ in range(3):
            wide = torch.cat([x, x, x], dim=1)
            x = x + frame.outside(scaled_into, frame["attended"], factor, out="attended", qkv=wide)
        return {"y": x}

    phase = replace(toy.make_phase(device="cuda", state={"factor": factor}), body=body)
    runner = GraphRunner(phase, GraphSettings(mode=Mode.PIECEWISE))
    runner.capture_buckets()
    values = toy.batch(4, 6, 8, device="cuda")
    kept = torch.empty(18, toy.WIDTH, device="cuda")

    def into_kept(outputs: Any) -> None:
        kept.copy_(outputs["y"])

    torch.cuda.synchronize()
    with no_allocation_and_no_wait():
        for _ in range(5):
            runner.run(values, into_kept)
    torch.testing.assert_close(kept, values["x"] * 1.5**3)


@pytest.mark.parametrize("mode", Mode)
def test_the_host_may_run_ahead_of_the_device(mode: Mode) -> None:
    """Metadata of later batches must not overtake the replay of earlier ones."""
    runner = toy.make_runner(GraphSettings(mode=mode), device="cuda")
    rng = torch.Generator().manual_seed(2)
    busy = torch.randn(4096, 4096, device="cuda")
    batches = [runner.phase.example(lengths, rng) for lengths in ((4, 6, 8), (5, 5, 8), (18,), (2, 16), (9, 9)) * 6]
    expected = [runner.eager(values, copy_out)["y"] for values in batches]
    torch.cuda.synchronize()
    for _ in range(20):
        busy = busy @ busy * 1e-3  # puts the device behind from the start
    actual = [runner.run(values, copy_out)["y"] for values in batches]
    for mine, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-4)


def test_memory_is_flat_over_a_thousand_batches() -> None:
    runner = toy.make_runner(device="cuda")
    rng = torch.Generator().manual_seed(4)

    def run_some(count: int) -> None:
        for _ in range(count):
            lengths = torch.randint(1, 9, (int(torch.randint(1, 5, (), generator=rng)),), generator=rng).tolist()
            runner.run(runner.phase.example(tuple(lengths), rng), lambda outputs: None)
        torch.cuda.synchronize()

    run_some(50)
    before = torch.cuda.memory_allocated()
    run_some(1000)
    assert torch.cuda.memory_allocated() == before


def test_smaller_buckets_fit_into_the_memory_of_the_largest() -> None:
    runner = toy.make_runner(buckets=tuple((tokens, 8) for tokens in range(64, 4097, 64)), device="cuda")
    sizes = {graph.key.capacity["tokens"]: graph.nbytes for graph in runner.graphs}
    rest = sum(nbytes for tokens, nbytes in sizes.items() if tokens != 4096)
    print(f"largest {sizes[4096] / 2**20:.0f} MiB, the other {len(sizes) - 1} together {rest / 2**20:.0f} MiB")
    assert rest < sizes[4096]


def test_costs_are_measured_on_the_device() -> None:
    """Which is faster depends on the device; both must be timed at every size."""
    runner = toy.make_runner(device="cuda")
    costs = runner.calibrate()
    for curve in (costs.eager, costs.graph):
        assert [rows for rows, _ in curve.points] == [16, 32] and all(0 < s < 10 for _, s in curve.points)
