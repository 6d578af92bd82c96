"""An engine's trace as the JSON that Perfetto (https://ui.perfetto.dev) and chrome://tracing read."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from saccade.server.figures.running_requests import PreparedRequest
from saccade.wire.trace_records import EngineTrace, TracedLoad, TracedPass, TracedRequest

ENGINE, REQUESTS = 1, 2  # process ids: groups of tracks
PHASES = ("vision", "prefill", "decode", "head", "sample")
Event = dict[str, Any]


def trace_document(trace: EngineTrace, prepared: Mapping[str, PreparedRequest]) -> dict[str, Any]:
    """`prepared` is keyed by the first part of a request's id. Times are in microseconds since the earliest one."""
    starts = [trace.begin, *(one.begin for one in trace.passes), *(one.arrived for one in trace.requests)]
    known = [prepared[name].arrived for one in trace.requests if (name := _family(one)) in prepared]
    clock = _Clock(min(starts + known))
    events = [
        _name("process_name", ENGINE, 0, "engine"),
        _name("process_name", REQUESTS, 0, "requests"),
        *_passes(trace.passes, clock),
        *(event for load in trace.loads for event in _load(load, clock)),
    ]
    for track, request in enumerate(trace.requests, 1):
        events += _request(request, prepared.get(_family(request)), track, trace.end, clock)
    about = {"dropped_events": trace.num_dropped, "seconds": round(trace.end - trace.begin, 3)}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


class _Clock:
    def __init__(self, zero: float) -> None:
        self._zero = zero

    def us(self, time: float) -> float:
        return round((time - self._zero) * 1e6, 3)


def _passes(passes: Iterable[TracedPass], clock: _Clock) -> Iterator[Event]:
    """One track per phase. Times are rounded, so a pass is made to begin no earlier than the previous one ended."""
    ends: dict[str, float] = {}
    for one in passes:
        track = 1 + PHASES.index(one.phase)
        if one.phase not in ends:
            yield _name("thread_name", ENGINE, track, one.phase)
        begin = max(clock.us(one.begin), ends.get(one.phase, 0.0))
        ends[one.phase] = end = max(clock.us(one.end), begin)
        share = 0.0 if not one.room else round(1 - one.rows / one.room, 4)
        details: dict[str, Any] = {"step": one.step, "rows": one.rows, "computed_rows": one.room, "padded_share": share}
        details |= {"graph": one.graph} if one.graph else {"eager": one.reason}
        name = f"{one.phase} {one.rows}/{one.room}" + ("" if one.graph else " eager")
        yield _span(name, ENGINE, track, begin, end, details)


def _load(load: TracedLoad, clock: _Clock) -> Iterator[Event]:
    at = {"ph": "C", "ts": clock.us(load.time), "pid": ENGINE, "tid": 0}
    yield {"name": "requests", **at, "args": {"running": load.running, "waiting": load.waiting}}
    yield {"name": "KV cache in use", **at, "args": {"share": round(load.kv_usage, 4)}}


def _request(
    one: TracedRequest, prepared: PreparedRequest | None, track: int, end: float, clock: _Clock
) -> Iterator[Event]:
    """A span of the whole request, and within it one for each stage. If the request has not ended, its last stage lasts
    to the end of the trace."""
    last = one.ended or end
    title = one.request_id if prepared is None else prepared.public_id
    yield _name("thread_name", REQUESTS, track, title)
    details = {
        "prompt_tokens": one.num_prompt_tokens,
        "cached_tokens": one.num_cached_tokens,
        "output_tokens": one.num_output_tokens,
        "finish_reason": one.finish_reason or "still running",
    }
    arrived = one.arrived if prepared is None else min(prepared.arrived, one.arrived)
    yield _span("request", REQUESTS, track, clock.us(arrived), clock.us(last), details)
    marks: list[tuple[str, float | None, dict[str, Any]]] = []
    if prepared is not None:
        stages = {f"{name}_ms": round(value * 1000, 3) for name, value in prepared.seconds.items()}
        marks.append(("prepare media" if prepared.has_media else "prepare", prepared.arrived, stages))
    marks += [("queued", one.arrived, {}), ("prefill", one.started, {}), ("decode", one.first_token, {})]
    begun = [(name, time, args) for name, time, args in marks if time is not None]
    ends = [time for _, time, _ in begun[1:]] + [last]
    for (name, time, args), until in zip(begun, ends, strict=True):
        yield _span(name, REQUESTS, track, clock.us(time), max(clock.us(until), clock.us(time)), args)


def _family(one: TracedRequest) -> str:
    return one.request_id.partition(":")[0]


def _name(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": {"name": name}}


def _span(name: str, pid: int, tid: int, begin: float, end: float, args: dict[str, Any]) -> Event:
    return {"name": name, "ph": "X", "ts": begin, "dur": round(end - begin, 3), "pid": pid, "tid": tid, "args": args}
