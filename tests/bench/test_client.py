"""The benchmark's client: what it measures, and that no failure looks like an answer."""

import asyncio
import json
from collections.abc import Coroutine
from itertools import pairwise
from threading import Event
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.bench.load import client_connection
from saccade.bench.load.client import Client, arrivals, drive, run
from saccade.bench.load.client_connection import ServerAddress
from saccade.bench.load.client_reply import Outcome, ReplyReader
from saccade.bench.load.load_settings import LoadSettings, TargetSettings
from saccade.bench.soak.soak_settings import SoakSettings
from saccade.errors import ConfigError
from tests.bench.scripted import (
    BOUND_S,
    EVENTS_HEAD,
    Asked,
    HangupError,
    Reply,
    Script,
    Scripted,
    as_json,
    chunk,
    delta,
    event,
    nobody,
    plain,
    serving,
    stream,
    stream_of,
    usage,
)

T = TypeVar("T")
EVENTS = {"content-type": "text/event-stream; charset=utf-8"}


def bounded(work: Coroutine[Any, Any, T]) -> T:
    async def within() -> T:
        async with asyncio.timeout(BOUND_S):
            return await work

    return run(within())


def read(pieces: list[tuple[float, bytes]], headers: dict[str, str] = EVENTS, status: int = 200) -> Outcome:
    """A reply that was sent at 10 s of the clock and arrived in these pieces at these times."""
    reader = ReplyReader()
    reader.sent(10.0)
    reader.head(status, headers)
    for now, data in pieces:
        reader.body(data, now)
    return reader.outcome(3, 4.0)


def ask(script: Script, **target: Any) -> tuple[Outcome, list[Asked]]:
    with serving(script) as server:
        settings = TargetSettings(base_url=server.url, **{"request_timeout_s": BOUND_S, **target})

        async def go() -> Outcome:
            async with Client(settings) as client:
                return await client.send(client.prepare(b'{"a": 1}'))

        return bounded(go()), server.asked


def test_times_of_a_stream_are_those_of_its_tokens() -> None:
    events = [
        (10.25, delta(role="assistant", content="")),
        (10.5, delta(content="a")),
        (10.75, delta(content="b")),
        (11.5, delta(content="c")),
        (11.75, delta("length")),
        (12.0, usage(100, 3, 60)),
        (12.5, b"[DONE]"),
    ]
    outcome = read([(now, event(value)) for now, value in events])
    assert outcome.is_ok and outcome.index == 3
    assert (outcome.sent_s, outcome.ttft_s, outcome.e2el_s) == (6.0, 0.5, 1.75)
    assert outcome.itls_s == [0.25, 0.75]
    assert outcome.tpot_s == (1.75 - 0.5) / 2
    assert (outcome.prompt_tokens, outcome.image_tokens, outcome.output_tokens) == (100, 60, 3)
    assert (outcome.text, outcome.finish_reason) == ("abc", "length")


def test_several_tokens_in_one_event_are_counted_by_the_server() -> None:
    outcome = read(
        [(10.5, event(delta(content="three whole tokens"))), (11.5, event(delta("stop")) + event(usage(4, 3)))]
    )
    assert (outcome.output_tokens, outcome.tpot_s, outcome.itls_s) == (3, 0.5, [])


def test_a_token_without_text_is_a_token_and_the_name_of_the_speaker_is_none() -> None:
    silent = [(10.25, event(delta(role="assistant", content=""))), (10.5, event(delta(content="")))]
    outcome = read([*silent, (10.75, event(delta(content="x"))), (11.0, event(delta("stop", content="")))])
    assert (outcome.ttft_s, outcome.itls_s) == (0.5, [0.25])


def test_an_answer_without_any_text_has_its_first_token_at_its_end() -> None:
    outcome = read(
        [(10.25, event(delta(role="assistant", content=""))), (11.0, event(delta("length")) + event(usage(4, 1)))]
    )
    assert outcome.is_ok and (outcome.ttft_s, outcome.output_tokens) == (1.0, 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=60))
def test_how_a_stream_is_cut_into_pieces_changes_nothing(lengths: list[int]) -> None:
    told = {"queue_ms": 12.5, "fetch": 2, "note": "text"}
    data = b": a comment\r\n\r\n".join(event(value) for value in stream_of("a", "é", "c", images=3, timings=told))
    pieces, place = [], 0
    for length in lengths:
        pieces.append((11.0, data[place : place + length]))
        place += length
    outcome = read([*pieces, (11.0, data[place:])])
    assert outcome == read([(11.0, data.replace(b"\n", b"\r\n"))])
    assert outcome.is_ok and outcome.text == "aéc" and outcome.image_tokens == 3
    assert outcome.timings == {"queue": 0.0125, "fetch": 2.0}


def test_completions_and_native_replies_are_read() -> None:
    words = [{"choices": [{"text": word, "finish_reason": None}]} for word in ("a", "", "c")]
    outcome = read([(11.0 + index, event(value)) for index, value in enumerate(words)] + [(14.0, event(b"[DONE]"))])
    assert outcome.is_ok and (outcome.ttft_s, outcome.itls_s, outcome.text) == (1.0, [1.0, 1.0], "ac")
    native = [
        (11.0, {"text": "a", "meta_info": {"completion_tokens": 1, "prompt_tokens": 9, "finish_reason": None}}),
        (13.0, {"text": "ab", "meta_info": {"completion_tokens": 2, "prompt_tokens": 9, "finish_reason": None}}),
        (14.0, {"text": "ab", "meta_info": {"completion_tokens": 2, "finish_reason": {"type": "length"}}}),
    ]
    outcome = read([(now, event(value)) for now, value in native] + [(14.0, event(b"[DONE]"))])
    assert (outcome.itls_s, outcome.e2el_s, outcome.text, outcome.output_tokens) == ([2.0], 4.0, "ab", 2)
    assert outcome.finish_reason == "length"


def test_a_whole_reply_has_its_tokens_when_it_is_there() -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "abc"}, "finish_reason": "stop"}
    body = json.dumps({"choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}).encode()
    outcome = read([(11.0, body[:20]), (12.0, body[20:])], {"content-type": "application/json"})
    assert outcome.is_ok and (outcome.ttft_s, outcome.e2el_s, outcome.output_tokens) == (2.0, 2.0, 3)


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        ([event(delta(content="a"))], "incomplete reply"),
        ([], "incomplete reply"),
        ([event(b"[DONE]")], "empty reply"),
        ([event(delta(content="a")), event(delta("abort")), event(b"[DONE]")], "finish reason abort"),
        ([event(delta(content="a")), event(b"{broken"), event(b"[DONE]")], "unreadable reply"),
        ([event({"choices": 3}), event(b"[DONE]")], "unreadable reply"),
        (
            [event(delta(content="a")), event({"error": {"message": "m", "code": "engine_error"}}), event(b"[DONE]")],
            "error in the stream engine_error",
        ),
    ],
)
def test_a_broken_stream_is_a_failure(pieces: list[bytes], kind: str) -> None:
    outcome = read([(11.0, data) for data in pieces])
    assert outcome.error == kind and not outcome.is_ok


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (
            503,
            b'{"error": {"message": "full", "type": "overloaded_error", "code": "queue_full"}}',
            "HTTP 503 queue_full",
            "full",
        ),
        (400, b'{"object": "error", "message": "flat", "type": "bad", "code": 400}', "HTTP 400", "flat"),
        (502, b"<html>proxy", "HTTP 502", "<html>proxy"),
        (500, b"", "HTTP 500", ""),
        (200, b"not json", "unreadable reply", "not json"),
    ],
)
def test_a_refusal_is_a_failure_with_its_reason(status: int, body: bytes, kind: str, message: str) -> None:
    async def script(asked: Asked) -> Reply:
        yield plain(status, body)

    outcome, _ = ask(script)
    assert (outcome.error, outcome.message) == (kind, message)


def test_a_request_arrives_as_it_was_meant() -> None:
    async def script(asked: Asked) -> Reply:
        async for data in stream(stream_of("a")):
            yield data

    outcome, [asked] = ask(script, api_key="secret", endpoint="/other")
    assert outcome.is_ok
    assert (asked.method, asked.path, asked.json) == ("POST", "/other", {"a": 1})
    assert asked.headers["authorization"] == "Bearer secret" and asked.headers["content-type"] == "application/json"


def test_delays_of_the_server_are_in_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second delay begins when the client has the first token, which a busy client may read late."""
    has_token = Event()

    class Noting(ReplyReader):
        def body(self, data: bytes, now: float) -> None:
            super().body(data, now)
            if b'"a"' in data:
                has_token.set()

    async def wait(index: int) -> None:
        if index == 2:
            assert await asyncio.to_thread(has_token.wait, BOUND_S)
        await asyncio.sleep({1: 0.15, 2: 0.3}.get(index, 0))

    async def script(asked: Asked) -> Reply:
        async for data in stream(stream_of("a", "b"), wait):
            yield data

    monkeypatch.setattr("saccade.bench.load.client.ReplyReader", Noting)
    outcome, _ = ask(script)
    assert BOUND_S > outcome.ttft_s > 0.14 and outcome.e2el_s > 0.44
    assert outcome.itls_s[0] > 0.29
    assert outcome.ttft_s + sum(outcome.itls_s) <= outcome.e2el_s


async def _hang_up_at_once(asked: Asked) -> Reply:
    if asked.body:
        raise HangupError
    yield b""


async def _hang_up_later(asked: Asked) -> Reply:
    yield EVENTS_HEAD + chunk(event(delta(content="a")))
    raise HangupError


async def _say_nothing(asked: Asked) -> Reply:
    await asyncio.sleep(BOUND_S)
    yield b""


async def _speak_otherwise(asked: Asked) -> Reply:
    yield b"SSH-2.0-other\r\n"


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (_hang_up_at_once, "disconnected before a reply"),
        (_hang_up_later, "disconnected in the reply"),
        (_say_nothing, "timeout"),
        (_speak_otherwise, "disconnected before a reply"),
    ],
)
def test_a_lost_connection_is_a_failure(script: Script, kind: str) -> None:
    outcome, _ = ask(script, **({"request_timeout_s": 0.4} if kind == "timeout" else {}))
    assert outcome.error == kind


def test_a_server_that_is_not_there_is_a_failure() -> None:
    with nobody() as url:

        async def go() -> Outcome:
            async with Client(TargetSettings(base_url=url)) as client:
                return await client.send(client.prepare(b"{}"))

        assert bounded(go()).error == "cannot connect"


def test_a_server_that_is_gone_when_the_load_begins_is_a_failure_of_every_request() -> None:
    with nobody() as url:

        async def go() -> list[Outcome]:
            async with Client(TargetSettings(base_url=url)) as client:
                outcomes, _ = await drive(client, [client.prepare(b"{}")] * 3, LoadSettings(max_concurrency=2))
                return outcomes

        assert [outcome.error for outcome in bounded(go())] == ["cannot connect"] * 3


def test_a_server_that_does_not_let_in_is_not_one_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for a request where a handshake of TLS comes."""
    monkeypatch.setattr(client_connection, "CONNECT_S", 0.2)

    async def go(url: str) -> Outcome:
        async with Client(TargetSettings(base_url=url.replace("http", "https"))) as client:
            return await client.send(client.prepare(b"{}"))

    with serving(_say_nothing) as server:
        outcome = bounded(go(server.url))
    assert (outcome.error, outcome.message) == ("cannot connect", "no connection after 0.2 s")


def test_connections_that_the_server_has_closed_meanwhile_are_replaced_before_the_clock_starts() -> None:
    async def script(asked: Asked) -> Reply:
        yield as_json({})
        raise HangupError

    async def go(server: Scripted) -> None:
        async with Client(TargetSettings(base_url=server.url)) as client:
            await drive(client, [client.prepare(b"{}")] * 2, LoadSettings(max_concurrency=2))
            while server.num_connections < 4:  # the news of their end takes a moment
                await client.open(2)
                await asyncio.sleep(0.01)

    with serving(script) as server:
        bounded(go(server))


def test_a_reply_may_end_with_its_connection() -> None:
    async def script(asked: Asked) -> Reply:
        yield b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
        for value in stream_of("a"):
            yield event(value)
        raise HangupError

    outcome, _ = ask(script)
    assert outcome.is_ok and outcome.text == "a"


def test_connections_are_kept_and_given_up_ones_replaced() -> None:
    async def script(asked: Asked) -> Reply:
        async for data in stream(stream_of("a")):
            yield data
        if asked.json["n"] == 2:
            raise HangupError

    async def go(url: str) -> list[Outcome]:
        async with Client(TargetSettings(base_url=url)) as client:
            found = []
            for n in range(5):
                found.append(await client.send(client.prepare(json.dumps({"n": n}).encode()), n))
            return found

    with serving(script) as server:
        outcomes = bounded(go(server.url))
        assert [outcome.error for outcome in outcomes] == [None] * 5
        assert server.num_connections == 2 and len(server.asked) == 5


def test_a_connection_that_the_server_will_close_is_not_used_again() -> None:
    async def script(asked: Asked) -> Reply:
        yield plain(429, b"{}", more="Connection: close\r\n")

    async def go(url: str) -> list[Outcome]:
        async with Client(TargetSettings(base_url=url)) as client:
            return [await client.send(client.prepare(b"{}")) for _ in range(3)]

    with serving(script) as server:
        assert [outcome.error for outcome in bounded(go(server.url))] == ["HTTP 429"] * 3
        assert server.num_connections == 3 == len(server.asked)


def test_every_request_is_sent_once_and_no_more_at_once_than_allowed() -> None:
    async def wait(index: int) -> None:
        await asyncio.sleep(0.01)

    async def script(asked: Asked) -> Reply:
        if asked.json["n"] % 5 == 3:
            yield as_json({"error": {"message": "no", "code": "odd"}}, 429)
            return
        async for data in stream(stream_of("a"), wait):
            yield data

    async def go(url: str) -> tuple[list[Outcome], float]:
        async with Client(TargetSettings(base_url=url)) as client:
            requests = [client.prepare(json.dumps({"n": n}).encode()) for n in range(23)]
            return await drive(client, requests, LoadSettings(max_concurrency=4))

    with serving(script) as server:
        outcomes, duration_s = bounded(go(server.url))
        assert sorted(asked.json["n"] for asked in server.asked) == list(range(23))
        assert server.most_at_once <= 4 and server.num_connections <= 4
    assert [outcome.index for outcome in outcomes] == list(range(23))
    assert [outcome.index for outcome in outcomes if outcome.error == "HTTP 429 odd"] == [3, 8, 13, 18]
    assert all(outcome.sent_s >= 0 and outcome.sent_s + outcome.e2el_s <= duration_s for outcome in outcomes)


def test_arrivals_have_the_rate_and_the_burstiness_asked_for() -> None:
    assert arrivals(3, LoadSettings(), 0) == [0.0, 0.0, 0.0]
    for burstiness in (0.25, 1.0, 4.0):
        due = arrivals(20001, LoadSettings(request_rate=50, burstiness=burstiness), 7)
        gaps = [b - a for a, b in pairwise(due)]
        mean = sum(gaps) / len(gaps)
        spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
        assert due[0] == 0 and mean == pytest.approx(1 / 50, rel=0.06)
        assert spread / mean == pytest.approx(burstiness**-0.5, rel=0.06)  # of a gamma distribution
    assert due == arrivals(20001, LoadSettings(request_rate=50, burstiness=4.0), 7)


def test_a_rate_spaces_requests() -> None:
    async def script(asked: Asked) -> Reply:
        async for data in stream(stream_of("a")):
            yield data

    load = LoadSettings(request_rate=100, burstiness=1e6)

    async def go(url: str) -> tuple[list[Outcome], float]:
        async with Client(TargetSettings(base_url=url)) as client:
            return await drive(client, [client.prepare(b"{}")] * 20, load)

    with serving(script) as server:
        outcomes, _ = bounded(go(server.url))
    assert all(outcome.sent_s >= 0.01 * index - 0.005 for index, outcome in enumerate(outcomes))  # timers are coarse


def test_addresses() -> None:
    assert ServerAddress.of("http://h:81/prefix/") == ServerAddress("h", 81, False, "/prefix")
    assert ServerAddress.of("https://[::1]") == ServerAddress("::1", 443, True, "")
    assert (
        ServerAddress.of("https://[::1]")
        .request("GET", "/x", None, {})
        .startswith(b"GET /x HTTP/1.1\r\nHost: [::1]:443\r\n")
    )
    for wrong in ("ftp://h", "h:80", "", "http://h:port", "http://[::1", "http://h/a b", "http://h/\u043a"):
        with pytest.raises(ConfigError, match="address"):
            ServerAddress.of(wrong)


@pytest.mark.parametrize("key", ["k\n", "\u043a\u043b\u044e\u0447", "a\0b"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    for kind in (TargetSettings, SoakSettings):
        with pytest.raises(ConfigError, match="an HTTP header cannot carry") as refused:
            kind(api_key=key)
        assert key not in str(refused.value)
    assert TargetSettings(api_key="sk-1 \u00e9").api_key
