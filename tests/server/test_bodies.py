"""Bodies are checked against limits before parsing, and nobody waits for another's body or images."""

import asyncio
import gc
import os
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.errors import RequestError
from saccade.server.http import body_scan
from saccade.server.http.body_scan import CONTAINER_VALUES, MAX_DEPTH, STRING_VALUES, BodyScan
from saccade.server.http.json_body import parse_json
from saccade.server.routes.chat import ChatRoute
from tests.server.fake import HANG_S, Caller, FakeEngine, Script, two_words

Scripted = Callable[..., tuple[Caller, FakeEngine, Any]]
MIB = 2**20
MOST = 2**20
SILENT_S = 1.0  # a longer pause of the event loop delays probes; measured pauses are hundredths
CHAT, HELLO = "/v1/chat/completions", [{"role": "user", "content": "hi"}]

# A scan may get quotes, backslashes and brackets inside strings wrong.
texts = st.text(st.sampled_from('ab"\\/[]{},:é😀\n'), max_size=40)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=30,
)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_scan, "CHUNK", 7)
    monkeypatch.setattr("saccade.server.http.json_body.CHUNK", 7)


def depth_of(value: Any) -> int:
    if isinstance(value, dict | list):
        return 1 + max(map(depth_of, value.values() if isinstance(value, dict) else value), default=0)
    return 0


def count(value: Any) -> int:
    """The commas, colons, strings and containers of a value, weighted as in a scan."""
    if isinstance(value, str):
        return STRING_VALUES
    if isinstance(value, dict):
        inside = sum(count(name) + count(item) + 1 for name, item in value.items())
    elif isinstance(value, list):
        inside = sum(map(count, value))
    else:
        return 0
    return CONTAINER_VALUES + inside + max(len(value) - 1, 0)


@pytest.mark.usefixtures("small_chunks")
@given(value=values, is_plain=st.booleans())
def test_any_body_is_read_as_by_the_parser_alone(value: Any, is_plain: bool) -> None:
    body = orjson.dumps(value) if is_plain else orjson.dumps(value, option=orjson.OPT_INDENT_2).replace(b"/", b"\\/")
    assert parse_json(body, MOST) == value
    scan = BodyScan(body)
    while scan.advance():
        pass
    assert scan.depth == depth_of(value)
    if not scan.long_strings:
        assert scan.num_values == 1 + count(value)


@pytest.mark.usefixtures("small_chunks")
@given(body=st.binary(max_size=60) | st.text(st.sampled_from('"\\/[]{},: a1'), max_size=60).map(str.encode))
def test_invalid_json_is_refused_as_by_the_parser_alone(body: bytes) -> None:
    try:
        expected = orjson.loads(body)
    except orjson.JSONDecodeError:
        with pytest.raises(RequestError):
            parse_json(body, MOST)
    else:
        assert parse_json(body, MOST) == expected


def test_an_empty_body_is_called_empty() -> None:
    with pytest.raises(RequestError, match=r"^the body is empty; it must be a JSON object$"):
        parse_json(b"", MOST)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("run", range(1, 40))
def test_runs_of_backslashes_are_counted_wherever_a_chunk_ends(run: int) -> None:
    for ending in (b"", b'"[['):
        text = b"aaaaaaaaaaaaaaaaaaaaa" + b"\\" * run
        body = b'["' + text + (b'"' if run % 2 else b"") + ending.replace(b'"', b'\\"') + b'",[]]'
        assert parse_json(body, MOST) == orjson.loads(body)


def test_a_long_member_name_is_not_taken_for_a_value() -> None:
    long = "x" * (3 * body_scan.CHUNK)
    for body in (
        orjson.dumps({long: {"a": long}}),
        b'{"a":"b",  "' + long.encode() + b'"  \n:1, "c":"' + long.encode() + b'"}',
    ):
        assert parse_json(body, MOST) == orjson.loads(body)


URL = "data:image/png;base64," + "x" * body_scan.CHUNK


@pytest.mark.parametrize(
    "body",
    [
        orjson.dumps({"a": [URL, {"b": URL + "y"}, URL], "c": "data:,short", "d": 1}),
        orjson.dumps({"a": URL, URL: 2}),
        orjson.dumps({"a": 'he said "' + URL + '" and left', "b": URL}),
        orjson.dumps({"a": '"' + URL, "b": [URL.replace("x", "/")]}).replace(b"/", b"\\/"),
        orjson.dumps({"a": URL + '"', "b": "x/" + "y" * body_scan.CHUNK + "\\"}).replace(b"/", b"\\/"),
        b'{"a":"' + URL.encode() + b'","a":"b"}',
        b'{"a":"' + URL.encode() + b'\\u0041"}',
        b'"' + URL.encode() + b'"',
        orjson.dumps([URL] * 70),
        orjson.dumps({"a": URL, "b": list(range(30_000)), "c": URL}),
    ],
    ids=[
        "values",
        "a name",
        "quoted",
        "escapes",
        "escaped quotes",
        "said twice",
        "another escape",
        "alone",
        "many",
        "with much else",
    ],
)
def test_data_urls_are_read_as_by_the_parser_alone(body: bytes) -> None:
    assert parse_json(body, MOST) == orjson.loads(body)


def test_data_urls_do_not_hide_an_exceeded_limit() -> None:
    for rest in (b"[" * (MAX_DEPTH + 1), many(200_000, b"[]"), b'"' + URL.encode() + b'"'):
        with pytest.raises(RequestError):
            parse_json(b'{"a":"' + URL.encode() + b'","b":' + rest, MOST)


def test_control_characters_in_long_strings_are_refused() -> None:
    with pytest.raises(RequestError):
        parse_json(b'{"a":"' + b"x" * (2 * body_scan.CHUNK) + b"\n" + b"x" * (2 * body_scan.CHUNK) + b'"}', MOST)


def many(num: int, item: bytes) -> bytes:
    return b"[" + b",".join([item] * num) + b"]"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (many(200_000, b"[]"), 413),
        (many(200_000, b"{}"), 413),
        (many(1_100_000, b"1"), 413),
        (many(400_000, b'""'), 413),
        (b"[" * (MAX_DEPTH + 1), 400),
        (b" " * body_scan.CHUNK + b"[" * (MAX_DEPTH + 1), 400),
        (b'[1,"' + b'\\"' * (10 * MIB) + b'"]', 413),
        (b" " * (17 * MIB), 413),
    ],
    ids=["lists", "objects", "numbers", "strings", "deep", "deep and long", "escapes", "spaces"],
)
def test_bodies_over_a_limit_are_refused_before_parsing(
    body: bytes, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orjson, "loads", lambda body: pytest.fail("it was parsed"))
    with pytest.raises(RequestError) as refused:
        parse_json(body, MOST)
    assert refused.value.status == status and refused.value.code in ("body_too_large", "invalid_json")


@pytest.mark.parametrize("escape", [b"/", b"\\/"])
def test_an_image_of_twenty_megabytes_costs_next_to_nothing(escape: bytes) -> None:
    data = b64encode(os.urandom(15 * MIB))
    body = b'{"messages":[{"content":[{"image_url":{"url":"data:,' + data.replace(b"/", escape) + b'"}}]}],"n":1}'
    begun = time.process_time()
    found = parse_json(body, MOST)
    seconds = time.process_time() - begun
    assert found["messages"][0]["content"][0]["image_url"]["url"] == "data:," + data.decode() and found["n"] == 1
    assert seconds < 2.0, f"{seconds:.3f} s of CPU time; byte by byte it would take several"


class Ticker:
    """The longest pause of an event loop in CPU time, so that other programs do not count."""

    def __init__(self) -> None:
        self.silent_s = 0.0
        self._last = time.process_time()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0.005)
            now = time.process_time()
            self.silent_s, self._last = max(self.silent_s, now - self._last), now


def many_members(num: int) -> bytes:
    return b",".join(b'"%d":null' % i for i in range(num))


HOSTILE: dict[str, Callable[[], bytes]] = {
    "empty lists": lambda: b'{"prompt":"hi","x":' + many(20 * MIB, b"[]") + b"}",
    "one text": lambda: b'{"prompt":"' + b"x" * (60 * MIB) + b'"}',
    "wrong stops": lambda: b'{"prompt":"hi","stop":' + many(1_000_000, b"null") + b"}",
    "wrong biases": lambda: b'{"prompt":"hi","logit_bias":{' + many_members(200_000) + b"}}",
    "lists below the limit": lambda: b'{"prompt":"hi","stop":' + many(110_000, b"[]") + b"}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_health_is_answered_whatever_arrives(scripted: Scripted, name: str) -> None:
    caller, _, _ = scripted()
    body = HOSTILE[name]()
    gc.collect()
    gc.freeze()  # as a server does after its start: a collection then does not scan what earlier tests left
    ticker = Ticker()

    async def run() -> None:
        ticking = asyncio.create_task(ticker.run())
        posting = asyncio.create_task(caller.post("/v1/completions", body))
        num_answers = 0
        while not posting.done():
            assert (await caller.get("/health")).status == 200
            num_answers += 1
            await asyncio.sleep(0.002)
        ticking.cancel()
        found = posting.result()
        assert found.status in (400, 413) and num_answers > 0, found.body

    asyncio.run(run())
    assert ticker.silent_s < SILENT_S


def held_prompts(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Semaphore]:
    """Stands for slow images, which take until the event is set. The semaphore counts those that have begun."""
    is_free, begun = threading.Event(), threading.Semaphore(0)
    original = ChatRoute.prompts

    def prompts(self: ChatRoute, *args: Any) -> Any:
        begun.release()
        assert is_free.wait(HANG_S)
        return original(self, *args)

    monkeypatch.setattr(ChatRoute, "prompts", prompts)
    monkeypatch.setattr(ChatRoute, "is_simple", lambda self, request: False)
    return is_free, begun


def test_a_timeout_includes_image_decoding(
    scripted: Callable[..., tuple[Caller, FakeEngine, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while a request waits for a thread behind the images of others."""
    script: Script = two_words
    caller, engine, service = scripted(script, preprocess_threads=1)
    is_free, begun = held_prompts(monkeypatch)

    async def run() -> None:
        try:
            async with asyncio.timeout(HANG_S):
                while not begun.acquire(blocking=False):  # until one times out while it is being prepared
                    first = await caller.post(CHAT, {"messages": HELLO, "timeout": 0.05})
                    assert first.status == 408 and first.json["error"]["code"] == "deadline_exceeded"
            behind = await caller.post(CHAT, {"messages": HELLO, "timeout": 0.05})
            assert behind.status == 408 and not begun.acquire(blocking=False), "it never began"
        finally:
            is_free.set()
        assert (await caller.post(CHAT, {"messages": HELLO})).status == 200
        async with asyncio.timeout(HANG_S):
            while not service.is_idle:
                await asyncio.sleep(0.01)

    asyncio.run(run())
    assert len(engine.seen) == 1
