"""The pass log agrees with the counters of the phases, and requests that ask get their own pass counts."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from saccade.config import Mode
from saccade.scheduling import pass_log
from saccade.wire.passes import PassShape
from saccade.wire.sampling_params import SamplingParams
from tests.engine.conftest import Loaded
from tests.engine.rig import Options, build, finish, random_prompt, run

Load = Callable[[str], Loaded]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
COUNTED = replace(GREEDY, reports_passes=True)


@pytest.mark.parametrize("mode", [Mode.FULL, None])
def test_the_log_agrees_with_the_counters(loaded: Load, mode: Mode | None) -> None:
    made, model = loaded("qwen3_vl")
    engine = build(model, made.folder, Options(mode=mode))
    rng = np.random.default_rng()
    before = engine.phase_snapshots()
    run(engine, {f"r{i}": random_prompt(made, rng, num_images=i % 2) for i in range(3)}, GREEDY)
    run(engine, {"sampled": random_prompt(made, rng)}, replace(GREEDY, temperature=1.0))
    records = engine.passes.records(0)
    shapes = [shape for record in records for shape in record.passes]
    after = engine.phase_snapshots()
    assert {shape.phase for shape in shapes} == set(after) == {"vision", "prefill", "decode", "head", "sample"}
    for name, phase in after.items():
        mine = [shape for shape in shapes if shape.phase == name]
        replayed = [shape for shape in mine if shape.graph]
        assert len(replayed) == _sum(phase["replays"]) - _sum(before[name]["replays"])
        assert len(mine) - len(replayed) == _sum(phase["fallbacks"]) - _sum(before[name]["fallbacks"])
        for field, counter in (("rows", "real_rows"), ("padded", "padded_rows")):
            assert sum(getattr(shape, field) for shape in replayed) == phase[counter] - before[name][counter]
        assert all(bool(shape.graph) is not bool(shape.reason) for shape in mine)
    assert [record.number for record in records] == list(range(1, len(records) + 1))
    assert engine.passes.records(records[-3].number) == records[-2:]


def _sum(counts: dict[str, int]) -> int:
    return sum(counts.values())


def test_passes_of_a_stream_do_not_overlap(loaded: Load) -> None:
    made, model = loaded("qwen3_vl")
    engine = build(model, made.folder, Options())
    run(engine, {f"r{i}": random_prompt(made, np.random.default_rng(i), num_images=1) for i in range(3)}, GREEDY)
    for stream in ("vision", "language"):
        found = [record for record in engine.passes.records(0) if record.stream == stream]
        assert found and all(record.seconds is not None and record.seconds > 0 for record in found)
        ends = [record.start + (record.seconds or 0) for record in found]
        assert all(end <= later.start + 1e-6 for end, later in zip(ends, found[1:], strict=False))


def test_a_request_that_asks_gets_its_own_pass_counts(loaded: Load) -> None:
    made, model = loaded("qwen3_vl")
    engine = build(model, made.folder, Options(mode=Mode.FULL))
    rng = np.random.default_rng()
    run(engine, {"before": random_prompt(made, rng, num_images=1)}, GREEDY)
    engine.add("other", random_prompt(made, rng), replace(GREEDY, max_tokens=30))
    engine.add("mine", random_prompt(made, rng, num_images=1), COUNTED)
    answers = finish(engine, ["other", "mine"])
    answer = answers["mine"]
    assert answers["other"].updates[-1].passes is None
    counts = answer.updates[-1].passes
    assert counts is not None and all(update.passes is None for update in answer.updates[:-1])
    by_phase = {phase: [one for one in counts if one.phase == phase] for phase in ("vision", "prefill", "decode")}
    assert sum(one.passes for one in by_phase["vision"]) == 1
    steps = sum(one.passes for name in ("prefill", "decode") for one in by_phase[name])
    assert COUNTED.max_tokens is not None and steps >= COUNTED.max_tokens
    assert steps < 30, "passes of the other request do not count"
    assert all(one.graph and not one.reason for one in counts)
    assert answer.updates[-1].timings is not None


def test_the_log_is_bounded_and_forgets_requests(loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    made, model = loaded("qwen3_vl")
    monkeypatch.setattr(pass_log, "MAX_RECORDS", 5)
    engine = build(model, made.folder, Options())
    rng = np.random.default_rng()
    run(engine, {f"r{i}": random_prompt(made, rng) for i in range(4)}, replace(COUNTED, max_tokens=12))
    engine.add("aborted", random_prompt(made, rng), COUNTED)
    engine.step()
    [update] = engine.abort("aborted")
    assert update.passes is not None and update.passes[0].phase == "prefill"
    records = engine.passes.records(0)
    assert len(records) == 5 and records[-1].number > 10
    assert engine.passes.take_counts("aborted") is None and engine.passes.take_counts("r0") is None
    assert isinstance(records[0].passes[0], PassShape)
