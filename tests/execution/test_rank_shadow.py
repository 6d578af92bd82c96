"""Several ranks check their graphs together: what is wrong on one of them is found, and nothing else is."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from saccade.choice.key import Reason
from saccade.execution.ranks import RankedExecutor
from saccade.execution.shadow_file import SUFFIX, Replayed, file_of_rank, read_file
from saccade.graphs import AuditReport, VerifyReport
from saccade.inputs.placeholders import text_prompt
from saccade.scheduling.engine import Engine
from saccade.scheduling.orders import AuditGraphs, BeginShadow, RepeatReplay, VerifyGraphs
from saccade.wire.messages import AskStats, StatsReply, encode
from saccade.wire.sampling_params import SamplingParams
from tests.engine.rig import image_settings, run
from tests.engine.test_shadow import answers, assert_same, check_all, counts
from tests.engine.test_shadow_process import Front
from tests.execution import rank_images
from tests.execution.engine_ranks import Ranks, Spoil, executor_of, started
from tests.models import tiny

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(temperature=0.9, seed=5, max_tokens=4, ignore_eos=True, logprobs=2)
PHASES = {"vision", "prefill", "decode", "head", "sample"}


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with started(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tiny.Tiny:
    found = tiny.make("qwen3_vl", tmp_path_factory.mktemp("checkpoint"))
    image_settings(found.folder)
    return found


@pytest.fixture
def engine(two: Ranks, made: tiny.Tiny, encoder_mode: str, tmp_path: Path) -> Engine:
    """Records every replay."""
    engine = two.engine(made.folder, shadow=1.0, shadow_dir=str(tmp_path), encoder_mode=encoder_mode)
    begin_shadow(engine)
    return engine


def begin_shadow(engine: Engine) -> None:
    assert isinstance(engine.executor, RankedExecutor)
    engine.idle.shadow = shadow = engine.executor.execute(BeginShadow())
    shadow.order_all = engine.executor.execute


def ask(engine: Engine, made: tiny.Tiny, *seeds: int) -> dict[str, Any]:
    """Answers to texts and images, computed from scratch: nothing is found in a cache. Two images are encoded in one
    pass; where ranks encode their own, each has one."""
    engine.scheduler.forget_cached()
    found: dict[str, Any] = {}
    for seed in seeds:
        rng = np.random.default_rng(seed)
        images = [rank_images.image(made.folder, rng, *size) for size in ((8, 16), (16, 24))]
        prompts = {"text": text_prompt(rng.integers(3, 99, 30).tolist())}
        prompts["images"] = rank_images.prompt(made.folder, rng, *images)
        asked = {f"{name} {seed}": prompt for name, prompt in prompts.items()}
        found |= answers(run(engine, asked, {f"text {seed}": SAMPLED, f"images {seed}": GREEDY}))
    return found


@pytest.mark.parametrize("encoder_mode", ["weights", "data"])
def test_checks_of_right_graphs_find_nothing_and_change_no_answer(
    two: Ranks, made: tiny.Tiny, encoder_mode: str, tmp_path: Path
) -> None:
    engine = two.engine(made.folder, shadow=1.0, shadow_dir=str(tmp_path), encoder_mode=encoder_mode)
    expected = ask(engine, made, 1, 2)
    begin_shadow(engine)
    for _ in range(2):
        assert_same(ask(engine, made, 1, 2), expected)
        assert check_all(engine) == []
    for name, phase in engine.phase_snapshots().items():
        assert phase["shadow"].keys() <= {"equal", "overwritten"}, (name, phase["shadow"])
        assert phase["shadow"]["equal"] > 0, name
    assert engine.phase_snapshots().keys() == PHASES and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("phase", "encoder_mode"), [("decode", "weights"), ("vision", "data")])
def test_a_graph_that_is_wrong_on_one_rank_is_taken_out_of_service_on_all(
    two: Ranks, made: tiny.Tiny, engine: Engine, phase: str, tmp_path: Path
) -> None:
    expected = ask(engine, made, 1)
    assert check_all(engine) == []
    two.spoil(engine, Spoil(1, phase))
    ask(engine, made, 1)
    pool = engine.scheduler.resources.pool
    assert pool.kept
    found = check_all(engine)
    assert not pool.kept, "the caches are empty"
    assert found and {one.key.phase for one in found} == {phase}
    assert all(len(one.by_rank) == 2 and not one.by_rank[0] and one.by_rank[1] for one in found)
    assert "on rank 1 of 2 it differs from an eager run" in found[0].reason
    runner = next(runner for runner in executor_of(engine).phases if runner.phase.name == phase)
    assert runner.catalogue.retired.keys() == {one.key for one in found}
    for graph in runner.graphs:
        runner.catalogue.retire(graph.key, "all of them, for the comparison")
    before = runner.stats.fallbacks[Reason.OUT_OF_SERVICE]
    assert_same(ask(engine, made, 1), expected)
    assert runner.stats.fallbacks[Reason.OUT_OF_SERVICE] > before and check_all(engine) == []
    assert_repeated(engine, found[0].path, tmp_path)


def assert_repeated(engine: Engine, path: Path | None, folder: Path) -> None:
    """Each rank wrote a file, and runs it again. On these ranks the graph is still wrong."""
    assert path is not None and path.parent == folder
    files = [file_of_rank(path, rank) for rank in range(2)]
    assert set(files) <= set(folder.iterdir()) and files[0] == path
    assert [read_file(file).rank for file in files] == [0, 1]
    assert all(file.name.endswith(f".rank{rank}{SUFFIX}") for rank, file in enumerate(files))
    for file in files:
        by_rank: list[Replayed] = engine.executor.execute(RepeatReplay(str(file)))
        assert by_rank[1].differences and not by_rank[0].differences
        assert not by_rank[0].as_recorded and not by_rank[1].as_recorded


@pytest.mark.parametrize("encoder_mode", ["weights"])
def test_a_command_that_arrives_during_a_check_is_answered_after_it(made: tiny.Tiny, engine: Engine) -> None:
    """All ranks take part in a check, so none of them may stop it."""
    ask(engine, made, 1)
    front = Front(engine)
    try:

        def has_command() -> bool:
            """None has come when the check begins; one comes right then."""
            front.link.send([encode(AskStats(1))])
            return False

        assert engine.idle.check(has_command) is None and front.told.empty()
        assert counts(engine) == {"equal": 1}
        front.worker._take_commands()
        told = front.wait_for(StatsReply)
        assert isinstance(told, StatsReply) and told.serial == 1
        assert engine.idle.check(lambda: True) is None
        assert counts(engine) == {"equal": 1}, "no check begins while a command waits"
    finally:
        front.close()
    assert check_all(engine) == []


@pytest.mark.parametrize("encoder_mode", ["data"])
def test_all_ranks_verify_together_and_a_difference_is_shown_with_its_rank(
    two: Ranks, made: tiny.Tiny, engine: Engine, encoder_mode: str
) -> None:
    assert verified(engine).is_right
    audited: AuditReport = engine.executor.execute(AuditGraphs(is_short=True))
    assert audited.is_right and {row.key.partition("/")[0] for row in audited.rows} == PHASES
    two.spoil(engine, Spoil(1, "decode"))
    two.spoil(engine, Spoil(1, "vision"))
    report = verified(engine)
    wrong = [row for row in report.rows if not row.is_right]
    assert {row.key.partition("/")[0] for row in wrong} == {"decode", "vision"}
    assert all(row.problem.startswith("on rank 1: 1 of ") for row in wrong)
    assert {row.key.partition("/")[0] for row in report.rows} == PHASES


def verified(engine: Engine) -> VerifyReport:
    report: VerifyReport = engine.executor.execute(VerifyGraphs(is_short=True))
    return report
