"""The data behind the page's live view and the note under an answer."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from saccade.inputs.placeholders import Prompt
from saccade.server.figures.recent_load import KEPT_S, RecentLoad
from saccade.server.service import Service
from saccade.wire.messages import StatsReply
from saccade.wire.passes import PassCount, PassRecord, PassShape
from saccade.wire.sampling_params import SamplingParams
from tests.server.fake import Caller, FakeEngine, service_for

Scripted = Callable[..., tuple[Caller, FakeEngine, Service]]
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
COUNT = PassCount("decode", "decode/full requests=1 tokens=1", "", passes=3, rows=3, padded=0)


async def counted(prompt: Prompt, params: SamplingParams) -> AsyncGenerator[dict[str, Any], None]:
    assert params.reports_passes
    yield {"text": "yes", "token_ids": (5,)}
    yield {"token_ids": (6,), "finish_reason": "stop", "passes": (COUNT,), "timings": {"queue": 0.0}}


def test_a_request_for_timings_gets_its_passes(scripted: Scripted) -> None:
    caller, _, _ = scripted(counted)
    whole = asyncio.run(caller.post("/v1/chat/completions", {**CHAT, "timings": True})).json
    streamed = asyncio.run(caller.post("/v1/chat/completions", {**CHAT, "timings": True, "stream": True})).events
    expected = {"phase": "decode", "graph": COUNT.graph, "reason": "", "passes": 3, "rows": 3, "padded": 0}
    assert whole["passes"] == streamed[-2]["passes"] == [expected]


def test_other_requests_get_no_passes(scripted: Scripted) -> None:
    caller, engine, _ = scripted()
    assert "passes" not in asyncio.run(caller.post("/v1/chat/completions", CHAT)).json
    assert not engine.seen[0][1].reports_passes


def test_live_returns_the_newest_passes(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = PassShape("prefill", "", "graphs are off", 7, 0)
    asked: list[int | None] = []
    plain = engine.stats

    async def stats(passes_since: int | None = None) -> StatsReply:
        asked.append(passes_since)
        found = await plain()
        return StatsReply(0, found.scheduler, found.phases, passes=[PassRecord(8, "language", 1.5, 0.25, 2, (shape,))])

    monkeypatch.setattr(engine, "stats", stats)
    found = asyncio.run(Caller(service_for(engine)).call("GET", "/live", b"", {}, query=b"since=7"))
    [one] = found.json["passes"]
    assert (one["number"], one["seconds"], one["requests"]) == (8, 0.25, 2)
    assert one["passes"][0]["reason"] == "graphs are off"
    assert asked == [7] and found.json["scheduler"]["running"] == 0 and found.json["now"] > 0


def test_an_invalid_since_is_refused(engine: FakeEngine) -> None:
    for text in (b"since=-1", b"since=x", b"since=1.5", b"since=" + b"9" * 99, b"since=%C2%B2"):
        found = asyncio.run(Caller(service_for(engine)).call("GET", "/live", b"", {}, query=text))
        assert (found.status, found.json["error"]["param"]) == (400, "since")
    assert asyncio.run(Caller(service_for(None)).get("/live")).json["error"]["code"] == "starting"


def test_the_load_of_the_last_minutes_is_kept_by_second() -> None:
    time = 1000.25
    load = RecentLoad(lambda: time)
    load.note_tokens(prompt=10)
    load.note_first(0.5)
    time += 0.5
    load.note_tokens(output=2)
    time += 1
    load.note_tokens(output=3)
    first, second = load.seconds()
    assert (first["second"], first["prompt_tokens"], first["output_tokens"]) == (1000, 10, 2)
    assert (first["first_tokens"], first["first_token_s"]) == (1, 0.5)
    assert (second["second"], second["output_tokens"], second["first_tokens"]) == (1001, 3, 0)
    for _ in range(2 * KEPT_S):
        time += 1
        load.note_tokens(output=1)
    assert KEPT_S - 1 <= len(load.seconds()) <= KEPT_S, "old seconds are dropped"
    time += 2 * KEPT_S
    assert load.seconds() == [], "everything is too old"


def test_an_answer_counts_as_load_and_as_a_sign_of_life(engine: FakeEngine) -> None:
    service = service_for(engine)
    assert service.last_output is None
    reply = asyncio.run(Caller(service).post("/v1/completions", {"prompt": "a b"}))
    seconds = service.metrics.recent_load.seconds()
    assert sum(second["prompt_tokens"] for second in seconds) == reply.json["usage"]["prompt_tokens"]
    assert sum(second["output_tokens"] for second in seconds) == reply.json["usage"]["completion_tokens"] == 2
    assert sum(second["first_tokens"] for second in seconds) == 1 and service.last_output is not None
