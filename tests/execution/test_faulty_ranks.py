"""If a rank fails, diverges or stalls, the engine ends at once with a single reason that names the rank."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from PIL import Image

from saccade import LLM, SamplingParams
from saccade.cli import main
from saccade.errors import ConfigError, EngineDeadError, GraphError, RankGoneError, SaccadeError
from saccade.execution import check_orders, ranks
from saccade.execution.build import Built, build_engine
from saccade.execution.rank_processes import MODULE as RANK_MODULE
from saccade.inputs.placeholders import text_prompt
from saccade.inputs.processor import Processor
from saccade.layers import connect
from saccade.wire.engine_settings import EngineSettings
from saccade.wire.update import FinishReason
from tests.child_processes import children, gone, words_of
from tests.e2e.checkpoint import make_checkpoint
from tests.engine.rig import run
from tests.execution.alike import assert_close
from tests.execution.engine_ranks import LIMITS, python_path
from tests.execution.faulty_followers import BAD_TOKEN, NUM_WARM_UP, break_head
from tests.execution.test_rank_processes import wait_until

SOON_S = 120.0  # on a busy machine; waiting for a rank that is gone would take 600 s
SETTINGS = EngineSettings(
    device="cpu", block_size=8, kv_cache_tokens=192, encoder_cache_tokens=64, verify="off", tensor_parallel_size=2
)
SHORT = replace(LIMITS, max_num_seqs=2, max_num_batched_tokens=8, encoder_budget_tokens=16, prefill_chunk_tokens=0)
GRAPHS = "vision=off,prefill=off"  # to save time: only decode, head and sample have graphs
VERIFY = [
    *("--device", "cpu", "--tensor-parallel-size", "2", "--short", "--json", "--graphs", GRAPHS),
    *("--block-size", "8", "--kv-cache-tokens", "192", "--encoder-cache-tokens", "64", "--encoder-budget-tokens", "16"),
    *("--max-num-seqs", "2", "--max-num-batched-tokens", "8", "--max-model-len", "96"),
]
EXIT_INTERRUPTED = 130
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets ranks import the tests. A test must leave no process and no process group behind."""
    monkeypatch.setenv("PYTHONPATH", python_path())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    before = rank_processes()
    yield
    wait_until(lambda: rank_processes() <= before, "all ranks are gone")
    assert not torch.distributed.is_initialized()


def rank_processes() -> set[int]:
    """Live rank processes that any thread of this process started."""
    return {pid for pid in children("self") if not gone(pid) and RANK_MODULE.encode() in words_of(pid)}


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
        ("is_killed_while_it_captures", RankGoneError, "rank 1 of 2 was ended by SIGKILL before it was ready"),
        ("fails_when_it_is_compared", EngineDeadError, "rank 1 failed to start: RuntimeError: no results"),
    ],
)
def test_a_rank_that_fails_while_building_is_the_reason(
    folder: Path, factory: str, kind: type[SaccadeError], reason: str
) -> None:
    """Each time rank 0 is stuck elsewhere: it waits for the other rank to connect, or for its share of a sum."""
    begun = time.monotonic()
    with pytest.raises(SaccadeError) as caught, built(folder, factory):
        pass
    assert str(caught.value) == reason and type(caught.value) is kind
    assert time.monotonic() - begun < SOON_S


def test_the_watchdog_limits_the_wait_for_a_rank_killed_before_it_connects(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "MIN_CONNECT_S", 3.0)
    begun = time.monotonic()
    with (
        pytest.raises(RankGoneError, match=r"^rank 1 of 2 was ended by SIGKILL before it was ready$"),
        built(folder, "is_killed_before_it_connects", watchdog_timeout_s=3.0),
    ):
        pass
    assert time.monotonic() - begun < SOON_S


@pytest.mark.parametrize(
    ("factory", "kind", "reason"),
    [
        ("fails_while_it_verifies", EngineDeadError, "rank 1 failed to start: MemoryError: too little memory"),
        ("has_decode_graphs_that_fail", EngineDeadError, r"rank 1 failed to start: graph \[decode/.*out of memory"),
        ("has_a_sampler_that_does_nothing", GraphError, r"on rank 1 of 2: graph \[sample/.*Not serving.*"),
        ("has_a_decode_graph_without_a_product", GraphError, r"on rank 0, 1 of 2: graph \[decode/.*Not serving.*"),
    ],
)
def test_a_graph_that_is_wrong_on_one_rank_stops_all_ranks(
    folder: Path, factory: str, kind: type[SaccadeError], reason: str
) -> None:
    """All ranks verify in lockstep to the end, then refuse together."""
    with pytest.raises(SaccadeError) as caught, built(folder, factory, verify="short"):
        pass
    assert re.fullmatch(reason, str(caught.value), re.DOTALL) and type(caught.value) is kind


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("takes_another_bucket", "rank 1 diverged from rank 0 in step #: it did 'decode/full .*=2'; rank 0: .*=1'"),
        (
            "takes_no_graph",
            "rank 1 diverged from rank 0 in step #: it did 'decode eager .*'; rank 0: 'decode/full .*",
        ),
        ("skips_passes", "rank 0 has not finished step #, 6.4 s after rank 1, which did ''"),
    ],
)
def test_a_rank_that_runs_another_graph_ends_the_engine(folder: Path, factory: str, reason: str) -> None:
    """Another bucket makes exchanges differ in size. An eager run shows only in the rank's report. For a skipped pass,
    rank 0 would wait forever."""
    begun, watchdog_s = time.monotonic(), 8.0 if factory == "skips_passes" else 300.0
    with built(folder, factory, watchdog_timeout_s=watchdog_s) as found:
        with pytest.raises(EngineDeadError) as caught:
            for _ in range(NUM_WARM_UP):
                run(found.engine, {"r": text_prompt([5, 6, 7])}, GREEDY)
        assert re.fullmatch(reason.replace("#", r"\d+"), str(caught.value))
        with pytest.raises(EngineDeadError, match=f"^{re.escape(str(caught.value))}$"):
            found.engine.step()
    assert time.monotonic() - begun < SOON_S


def test_a_rank_that_dies_in_a_shadow_check_ends_the_engine(folder: Path) -> None:
    with built(folder, "is_killed_in_its_second_check", shadow=1.0) as found:
        run(found.engine, {"r": text_prompt([5, 6, 7])}, GREEDY)
        assert found.engine.idle.check() is None
        assert sum(found.engine.idle.shadow_counts(phase).get("equal", 0) for phase in ("prefill", "decode")) == 1
        for act in (found.engine.idle.check, lambda: run(found.engine, {"r": text_prompt([5, 6, 7])}, GREEDY)):
            with pytest.raises(RankGoneError, match=r"^rank 1 of 2 was ended by SIGKILL$"):
                act()


@pytest.mark.parametrize(("factory", "code"), [("", 0), ("has_a_sampler_that_does_nothing", 1)])
def test_verify_tells_which_rank_is_wrong(
    folder: Path, factory: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if factory:
        monkeypatch.setattr(ranks, "FACTORY", f"tests.execution.faulty_followers:{factory}")
    assert main(["verify", str(folder), *VERIFY]) == code
    told = capsys.readouterr()
    report = json.loads(told.out)
    assert report["right"] is (code == 0) and report["audit"]["right"] is (code == 0)
    wrong = [row for row in report["rows"] if not row["right"]]
    assert {row["key"].partition("/")[0] for row in wrong} == ({"sample"} if code else set())
    assert all(row["problem"].startswith("on rank 1: ") for row in wrong)
    findings = [finding for row in report["audit"]["rows"] for finding in row["findings"]]
    assert bool(findings) is bool(code) and all(finding.endswith("(on rank 1)") for finding in findings)
    assert "verifying decode" in told.err and "auditing decode" in told.err


def test_verify_that_is_interrupted_leaves_no_rank_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank has begun to verify, and waits for rank 0."""

    def interrupt(*args: object, **how: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(check_orders, "verify_graphs", interrupt)
    assert main(["verify", str(folder), *VERIFY]) == EXIT_INTERRUPTED


def test_an_error_on_all_ranks_ends_only_one_request(folder: Path) -> None:
    """The second pass of a step fails on both ranks, so they still agree."""
    with built(folder, "cannot_end_a_bad_prompt") as found:
        break_head(found.executor)
        for ids, reason in ([5, BAD_TOKEN], FinishReason.ERROR), ([5, 6], FinishReason.LENGTH):
            answer = run(found.engine, {"r": text_prompt(ids)}, replace(GREEDY, max_tokens=2))["r"]
            assert answer.finish.reason is reason, answer.finish


def test_an_llm_on_two_ranks_answers_as_on_one_and_names_a_rank_that_is_gone(folder: Path) -> None:
    chosen = {"device": "cpu", "block_size": 8, "kv_cache_tokens": 192, "max_num_seqs": 2, "max_model_len": 96}
    picture = Image.fromarray(np.random.default_rng(3).integers(0, 256, (24, 30, 3), dtype=np.uint8))
    talk = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "what?"}]}]
    params = replace(GREEDY, logprobs=20)
    answers: list[Any] = []
    for size in (1, 2):
        with LLM(folder, tensor_parallel_size=size, enforce_eager=True, **chosen) as llm:
            answers.append(llm.chat(talk, params, progress=False)[0].outputs[0])
            if size == 1:
                continue
            [rank] = rank_processes()
            killer = threading.Timer(0.5, os.kill, (rank, signal.SIGKILL))
            killer.start()
            with pytest.raises(EngineDeadError, match=r"^rank 1 of 2 was ended by SIGKILL$"):
                for _ in range(10**4):
                    llm.generate("the quick brown fox", GREEDY, progress=False)
            with pytest.raises(EngineDeadError, match=r"^rank 1 of 2 was ended by SIGKILL$"):
                llm.generate("the lazy dog", GREEDY, progress=False)
    assert answers[1].finish_reason == answers[0].finish_reason == "length"
    for found, expected in zip(answers[1].logprobs, answers[0].logprobs, strict=True):
        assert_close(*({token: score.logprob for token, score in entry.items()} for entry in (found, expected)))
    assert answers[1].token_ids == answers[0].token_ids


def test_a_model_that_cannot_be_split_is_refused_before_processes_start(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^num_heads = 4 cannot be split evenly over 3 ranks; .*--tensor-parallel"):
        LLM(folder, device="cpu", tensor_parallel_size=3)
    assert not rank_processes()
