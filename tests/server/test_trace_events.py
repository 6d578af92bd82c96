import numpy as np
import pytest

from saccade.server.figures.running_requests import PreparedRequest, RunningRequests
from saccade.server.figures.trace_events import trace_document
from saccade.wire.trace_records import EngineTrace, TracedLoad, TracedPass, TracedRequest
from tests.e2e.trace_format import check_nesting, spans_of

PHASES = ("vision", "prefill", "decode", "head", "sample")


def made_up(rng: np.random.Generator) -> tuple[EngineTrace, dict[str, PreparedRequest]]:
    """Passes one after the other, and requests that each reached a random stage."""
    begin = float(rng.uniform(0, 1e6))
    end, now = begin + 5, begin
    passes = []
    for step in range(40):
        phase = str(rng.choice(PHASES))
        begun = now + float(rng.exponential(1e-3))
        now = begun + float(rng.exponential(1e-3))
        rows = int(rng.integers(1, 50))
        graph = f"{phase}/full tokens=64" if rng.random() < 0.5 else ""
        passes.append(TracedPass(phase, step, begun, now, graph, "graphs are off", rows, 64 if graph else rows))
    requests, prepared = [], {}
    for idx in range(20):
        times = sorted(float(t) for t in rng.uniform(begin - 2, end, 5))
        reached = int(rng.integers(1, 5))
        known = [time if place < reached else None for place, time in enumerate(times[1:])]
        assert known[0] is not None
        name = f"{idx}" if rng.random() < 0.7 else f"{idx}:1"
        requests.append(TracedRequest(name, known[0], known[1], known[2], known[3], "", 9, 0, 3))
        if rng.random() < 0.7:
            prepared[f"{idx}"] = PreparedRequest(f"mine-{idx}", times[0], {"parse": 0.001}, has_media=bool(idx % 2))
    loads = [TracedLoad(float(time), 1, 2, 0.5) for time in np.sort(rng.uniform(begin, end, 10))]
    return EngineTrace(begin=begin, end=end, passes=passes, requests=requests, loads=loads), prepared


@pytest.mark.parametrize("seed", range(5))
def test_any_trace_follows_the_format(seed: int) -> None:
    trace, prepared = made_up(np.random.default_rng(seed))
    tracks = spans_of(trace_document(trace, prepared))
    passes = [span for (process, _), spans in tracks.items() if process == "engine" for span in spans]
    assert len(passes) == 40
    for one, span in zip(trace.passes, sorted(passes, key=lambda span: span["args"]["step"]), strict=True):
        assert span["dur"] == pytest.approx((one.end - one.begin) * 1e6, abs=0.5)
        assert ("graph" in span["args"]) != ("eager" in span["args"])
        assert span["args"]["padded_share"] == pytest.approx(1 - one.rows / one.room, abs=1e-4)
    requests = {track: spans for (process, track), spans in tracks.items() if process == "requests"}
    assert len(requests) == 20
    for spans in requests.values():
        whole, *stages = spans
        assert whole["name"] == "request" and whole["dur"] == pytest.approx(sum(one["dur"] for one in stages), abs=1)


def test_crossing_spans_are_noticed() -> None:
    with pytest.raises(AssertionError, match="outlasts"):
        check_nesting([{"ts": 0.0, "dur": 2.0}, {"ts": 1.0, "dur": 2.0}])


def test_ended_requests_are_kept_only_while_a_trace_is_recorded() -> None:
    running = RunningRequests()

    def known() -> list[str]:
        return [one.public_id for one in running.known().values()]

    with running.inside(PreparedRequest("long", 0.0, {})):
        with running.inside(PreparedRequest("before", 0.0, {})):
            pass
        assert known() == ["long"]
        with running.recording():
            with running.inside(PreparedRequest("meanwhile", 0.0, {})):
                pass
            assert sorted(known()) == ["long", "meanwhile"]
        assert known() == ["long"]
