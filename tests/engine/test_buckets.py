"""A CPU captures few graphs of bounded size, and every batch still has one."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.graphs import Capacity
from saccade.offline.llm import LLM
from saccade.scheduling.buckets import COARSE_ROWS, decode_buckets, few_buckets, prefill_buckets, row_buckets
from saccade.wire.sampling_params import SamplingParams
from tests.models import tiny

PREFILLS = [(16, 3), (200, 5), (256, 5), (1000, 129), (2048, 9), (8192, 65), (16384, 257)]


@pytest.mark.parametrize(("max_tokens", "max_requests"), PREFILLS)
def test_few_prefill_buckets_hold_every_batch_that_all_of_them_hold(max_tokens: int, max_requests: int) -> None:
    every = prefill_buckets(max_tokens, max_requests)
    few = few_buckets(every, "tokens")
    rows = [bucket["tokens"] for bucket in few]
    assert set(few) <= set(every) and rows == sorted(set(rows))
    assert few[-1] == every[-1], "the largest holds every batch"
    assert rows[0] == every[0]["tokens"]
    assert all(bucket["requests"] == min(bucket["tokens"] + 1, max_requests) for bucket in few)
    assert len(few) <= 14 and sum(n for n in rows if n > COARSE_ROWS) <= 2.5 * max_tokens


@pytest.mark.parametrize("largest", [1, 3, 4, 64, 256])
def test_few_decode_buckets_include_the_smallest_and_the_largest(largest: int) -> None:
    every = tuple(Capacity.of(tokens=n, requests=n) for n in decode_buckets(largest))
    few = few_buckets(every, "tokens")
    assert {few[0], few[-1]} == {every[0], every[-1]} and len(few) <= 9


def test_an_engine_for_8192_rows_takes_little_memory_and_replays_everything(
    made: tiny.Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    """A graph of 8192 rows would take 2 GiB: its recorded body computes attention over every request at its longest."""
    limits: dict[str, Any] = {"max_num_batched_tokens": 8192, "max_num_seqs": 64, "max_model_len": 512}
    llm = LLM(made.folder, device="cpu", graphs_strict=True, **limits)
    assert "a step on a CPU has at most 1024 tokens, not 8192" in caplog.text
    graphs = [graph for phase in llm.executor.phases for graph in phase.graphs]
    assert len(graphs) <= 30
    assert sum(graph.nbytes for graph in graphs) < 1 << 27
    prompts = [[3 + i % 90 for i in range(length)] for length in (1, 40, 300, 500)]
    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), progress=False)
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [4] * 4
    assert all(not phase.stats.fallbacks for phase in llm.executor.phases)


@given(st.integers(1, 20_000), st.integers(1, 64))
def test_buckets_rise_from_the_smallest_to_the_largest(largest: int, smallest: int) -> None:
    buckets = row_buckets(largest, smallest=smallest)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[0] == min(smallest, largest)
    assert buckets[-1] == largest


@pytest.mark.parametrize("largest", [1024, 8192, 10_000])
def test_uniform_sizes_are_padded_by_less_than_six_percent(largest: int) -> None:
    buckets = np.array(row_buckets(largest))
    sizes = np.arange(1, largest + 1)
    padded = buckets[np.searchsorted(buckets, sizes)] - sizes
    assert padded.sum() / sizes.sum() < 0.06
    assert len(buckets) < 90
    assert {64, 512, 1024} <= set(buckets.tolist())
    assert row_buckets(16, smallest=1) == tuple(range(1, 17)), "a step is at least one row"
