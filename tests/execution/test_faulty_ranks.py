"""A rank that fails, differs or stalls: the engine ends at once, with one reason that names the rank."""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from saccade import LLM, SamplingParams
from saccade.errors import ConfigError, EngineDeadError, GraphError, SaccadeError
from saccade.execution import rank_processes, ranks
from saccade.execution.build import Built, build_engine
from saccade.inputs.placeholders import text_prompt
from saccade.inputs.processor import Processor
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings
from tests.e2e.checkpoint import make_checkpoint
from tests.engine.rig import run
from tests.execution.engine_ranks import LIMITS, python_path
from tests.execution.test_rank_processes import gone, wait_until

SOON_S = 120.0  # on a busy machine; whoever waits for a rank that is gone does so for 600 s
SETTINGS = EngineSettings(
    device="cpu", block_size=8, kv_cache_tokens=192, encoder_cache_tokens=64, verify="off", tensor_parallel_size=2
)
SHORT = replace(LIMITS, max_num_seqs=2, max_num_batched_tokens=8, encoder_budget_tokens=16, prefill_chunk_tokens=0)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks find the tests; a test leaves no process, and no group that the next one would meet."""
    monkeypatch.setenv("PYTHONPATH", python_path())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    before = children()
    yield
    wait_until(lambda: children() <= before, "all ranks are gone")
    assert not torch.distributed.is_initialized()


def children() -> set[int]:
    """Of this process, by whichever thread; without those that have ended."""
    found = [file.read_text().split() for file in Path("/proc/self/task").glob("*/children")]
    return {int(pid) for pids in found for pid in pids if not gone(int(pid))}


@contextmanager
def built(folder: Path, factory: str, **settings: object) -> Iterator[Built]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "FACTORY", f"tests.execution.faulty_followers:{factory}")
        chosen = replace(SETTINGS, **settings)  # type: ignore[arg-type]
        found = build_engine(folder, chosen, SHORT, processor=Processor.from_folder(folder))
    try:
        yield found
    finally:
        found.close()


@pytest.mark.parametrize(
    ("factory", "kind", "reason"),
    [
        ("fails_before_it_connects", EngineDeadError, "rank 1 failed to start: RuntimeError: no such device"),
        ("fails_while_it_loads", ConfigError, "rank 1 failed to start: a file of the weights cannot be read"),
        ("is_killed_while_it_captures", EngineDeadError, "rank 1 of 2 was ended by SIGKILL before it was ready"),
        ("fails_when_it_is_compared", EngineDeadError, "rank 1 failed to start: RuntimeError: no results"),
    ],
)
def test_a_rank_that_fails_while_it_is_built(
    folder: Path, factory: str, kind: type[SaccadeError], reason: str
) -> None:
    """Rank 0 is in another place each time: it waits for the other one to come, or for its share of a sum."""
    begun = time.monotonic()
    with pytest.raises(SaccadeError) as caught, built(folder, factory):
        pass
    assert str(caught.value) == reason and type(caught.value) is kind
    assert time.monotonic() - begun < SOON_S


@pytest.mark.parametrize(
    ("factory", "kind", "reason"),
    [
        ("fails_while_it_verifies", EngineDeadError, "rank 1 failed to start: MemoryError: too little memory"),
        ("has_a_sampler_that_does_nothing", GraphError, r"on rank 1 of 2: graph \[sample/.*Not serving.*"),
        ("has_a_decode_graph_without_a_product", GraphError, r"on rank 0, 1 of 2: graph \[decode/.*Not serving.*"),
    ],
)
def test_a_graph_that_is_wrong_on_one_rank_alone(
    folder: Path, factory: str, kind: type[SaccadeError], reason: str
) -> None:
    """Verification goes on in step to its end; then all ranks refuse."""
    with pytest.raises(SaccadeError) as caught, built(folder, factory, verify="short"):
        pass
    assert re.fullmatch(reason, str(caught.value), re.DOTALL) and type(caught.value) is kind
