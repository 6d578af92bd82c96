"""Whether a document is a trace that Perfetto and chrome://tracing show as it is meant."""

from typing import Any

PHASES = {"vision", "prefill", "decode", "head", "sample"}
STAGES = {"request", "prepare", "prepare media", "queued", "prefill", "decode"}
COUNTERS = {"requests": {"running", "waiting"}, "KV cache in use": {"share"}}
META = {"process_name", "thread_name"}
Spans = dict[tuple[str, str], list[dict[str, Any]]]


def spans_of(document: dict[str, Any]) -> Spans:
    """Spans by the names of their process and track. Fails where the format is not kept."""
    names: dict[tuple[int, int], str] = {}
    processes: dict[int, str] = {}
    for event in document["traceEvents"]:
        assert {"name", "ph", "ts", "pid", "tid", "args"} <= event.keys(), event
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and event["ts"] >= 0, event
        assert event["ph"] in ("M", "X", "C"), event
        if event["ph"] == "M":
            assert event["name"] in META, event
            target: dict[Any, str] = processes if event["name"] == "process_name" else names
            key: Any = event["pid"] if event["name"] == "process_name" else (event["pid"], event["tid"])
            assert key not in target, f"{event} is named twice"
            target[key] = event["args"]["name"]
        elif event["ph"] == "C":
            assert event["args"].keys() == COUNTERS[event["name"]], event
            assert all(isinstance(value, int | float) for value in event["args"].values()), event
    tracks: Spans = {}
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            process, track = processes[event["pid"]], names[event["pid"], event["tid"]]
            assert event["name"].split()[0] in PHASES if process == "engine" else event["name"] in STAGES, event
            tracks.setdefault((process, f"{event['tid']} {track}"), []).append(event)
    for spans in tracks.values():
        check_nesting(spans)
    return tracks


def check_nesting(spans: list[dict[str, Any]]) -> None:
    """Two spans of a track are apart, or one is in the other. Numbers are rounded to nanoseconds."""
    open_ends: list[float] = []
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        end = span["ts"] + span["dur"]
        while open_ends and open_ends[-1] <= span["ts"] + 0.002:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + 0.002, f"{span} outlasts the span that it is in"
        open_ends.append(end)
