"""The event loop prepares short texts itself, one after the other, in short slices."""

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest

from saccade.server.http.json_body import without_urls
from saccade.server.requests import intake
from saccade.server.requests.intake import MAX_LOOP_BYTES, SHORT_BYTES
from saccade.server.routes.chat import ChatRoute
from saccade.server.routes.completions import CompletionRoute
from saccade.server.routes.generate import GenerateRoute
from saccade.server.routes.responses_api import ResponsesRoute
from saccade.server.sharing import loop_work
from saccade.server.sharing.loop_work import LoopWork
from tests.e2e.pictures import asked, encoded, image_part, picture
from tests.server.fake import HANG_S
from tests.server.test_limits import Scripted, talk

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


class PanicException(BaseException):
    """What libraries in Rust raise when they panic."""


def test_callers_take_turns() -> None:
    async def run() -> list[str]:
        work, order = LoopWork(), list[str]()
        calls = [work.run(partial(order.append, name), name) for name in "aaaab"]
        await asyncio.wait_for(asyncio.gather(*calls), HANG_S)
        return order

    assert asyncio.run(run()) == ["a", "b", "a", "a", "a"]


def test_the_loop_does_other_work_between_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the fake clock, each piece of work takes half a slice."""
    ticks = count()
    monkeypatch.setattr(loop_work, "monotonic", lambda: float(next(ticks)))

    async def run() -> list[Any]:
        work, order, loop = LoopWork(slice_s=2.0), list[Any](), asyncio.get_running_loop()

        def others(left: int) -> None:
            order.append("others")
            if left:
                loop.call_soon(others, left - 1)

        calls = [asyncio.ensure_future(work.run(partial(order.append, i))) for i in range(6)]
        await asyncio.sleep(0)  # all are queued, and the queue's turn is next
        loop.call_soon(others, 5)
        await asyncio.wait_for(asyncio.gather(*calls), HANG_S)
        return order

    order = asyncio.run(run())
    assert [item for item in order if item != "others"] == [0, 1, 2, 3, 4, 5]
    assert order[:6] == [0, 1, "others", 2, 3, "others"]


def test_cancelled_calls_are_skipped() -> None:
    async def run() -> list[int]:
        work, done = LoopWork(), list[int]()
        calls = [asyncio.ensure_future(work.run(partial(done.append, i))) for i in range(3)]
        await asyncio.sleep(0)
        calls[1].cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await work.run(lambda: done.append(3))
        return done

    assert asyncio.run(run()) == [0, 2, 3]


@pytest.mark.parametrize("error", [ValueError("a"), PanicException("b"), StopIteration("c")])
def test_a_failure_affects_no_other_work(error: BaseException) -> None:
    def fail() -> None:
        raise error

    async def run() -> list[Any]:
        work = LoopWork()
        calls = asyncio.gather(work.run(fail), work.run(lambda: 5), return_exceptions=True)
        return [*await asyncio.wait_for(calls, HANG_S)]

    failed, fine = asyncio.run(run())
    assert isinstance(failed, Exception) and fine == 5


def test_the_queue_survives_a_base_exception() -> None:
    """Such as a signal handler raises in the middle of the work."""

    def leave() -> None:
        raise asyncio.CancelledError

    async def run() -> list[Any]:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        work = LoopWork()
        calls = asyncio.gather(work.run(leave), work.run(lambda: 5), return_exceptions=True)
        return [*await asyncio.wait_for(calls, HANG_S), await asyncio.wait_for(work.run(lambda: 6), HANG_S)]

    left, *fine = asyncio.run(run())
    assert isinstance(left, asyncio.CancelledError) and fine == [5, 6]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each prompt, whether the event loop's thread made it."""
    found: list[bool] = []
    for route in (ChatRoute, CompletionRoute, GenerateRoute):
        monkeypatch.setattr(route, "prompts", _noting(route.prompts, found))
    return found


def _noting(original: Callable[..., Any], found: list[bool]) -> Callable[..., Any]:
    def prompts(self: Any, *args: Any) -> Any:
        found.append(threading.current_thread() is threading.main_thread())
        return original(self, *args)

    return prompts


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]}),
        (CHAT, {"messages": HELLO, "response_format": {"type": "text"}}),
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 5}),
        (COMPLETIONS, {"prompt": "Hello"}),
        (GENERATE, {"text": "Hello"}),
    ],
    ids=str,
)
def test_the_loop_prepares_short_texts(
    scripted: Scripted, threads: list[bool], path: str, body: dict[str, Any]
) -> None:
    caller, engine, _ = scripted()
    assert asyncio.run(caller.post(path, body)).status == 200
    assert threads == [True] and len(engine.seen) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO, "tools": [TOOL]}),
        (CHAT, {"messages": HELLO, "response_format": {"type": "json_object"}}),
        (CHAT, {"messages": HELLO, "guided_regex": "a+"}),
        (CHAT, {"messages": HELLO, "user": "x" * SHORT_BYTES}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 5, "tools": [{"name": "look", "input_schema": {}}]}),
        (COMPLETIONS, {"prompt": ["Hello"] * 30}),
        (COMPLETIONS, {"prompt": "Hello", "guided_choice": ["a", "b"]}),
        (GENERATE, {"text": "Hello", "sampling_params": {"regex": "a+"}}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_short_bodies_that_may_be_slow_go_to_threads(
    scripted: Scripted, threads: list[bool], path: str, body: dict[str, Any]
) -> None:
    caller, _, _ = scripted()
    assert asyncio.run(caller.post(path, body)).status == 200
    assert threads == [False]


def test_images_go_to_threads(scripted: Scripted, threads: list[bool]) -> None:
    caller, _, _ = scripted()
    messages = talk((40, 40))
    assert len(str(messages)) < SHORT_BYTES
    assert asyncio.run(caller.post(CHAT, {"messages": messages})).status == 200
    assert threads == [False]


def test_the_loop_parses_bodies_that_are_short_without_their_images(
    scripted: Scripted, threads: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the text is long too, or the images are very large."""
    caller, _, _ = scripted()
    found: list[bool] = []
    monkeypatch.setattr(ChatRoute, "read", _noting(ChatRoute.read, found))
    image = image_part(encoded(picture(size=(250, 250))))
    assert SHORT_BYTES < len(str(image)) < MAX_LOOP_BYTES < 3 * len(str(image))

    async def run() -> None:
        assert (await caller.post(CHAT, {"messages": asked(image)})).status == 200
        assert (await caller.post(CHAT, {"messages": asked(image), "user": "x" * SHORT_BYTES})).status == 200
        assert (await caller.post(CHAT, {"messages": asked(image, image, image)})).status == 200

    asyncio.run(run())
    assert found == [True, False, False] and threads == [False] * 3


@pytest.mark.parametrize(
    ("body", "rest"),
    [
        ('["data:URL"]', '[""]'),
        ('["data:URL", "data:URL", 5]', '["", "", 5]'),
        ('["a\\"data:URL", 5]', '["a\\"", 5]'),
        ('["a"data:URL", 5]', '["a"", 5]'),  # not JSON
        ('["data:URL\\"[5, 5]"]', '[""[5, 5]"]'),
        ('["URL", "a data:URL"]', '["URL", "a data:URL"]'),
        ('["data:short"]', '["data:short"]'),
    ],
)
def test_data_urls_do_not_count_toward_the_size_of_a_body(body: str, rest: str) -> None:
    url = "A" * 100_000
    assert without_urls(body.replace("URL", url).encode()) == rest.replace("URL", url).encode()


@pytest.fixture
def reading_threads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each request of /v1/responses, whether the event loop's thread read it."""
    found: list[bool] = []
    monkeypatch.setattr(ResponsesRoute, "read", _noting(ResponsesRoute.read, found))
    return found


def test_stored_conversations_go_to_threads(
    scripted: Scripted, threads: list[bool], reading_threads: list[bool]
) -> None:
    """A short body may continue a conversation that is long or has images."""
    caller, _, _ = scripted(response_store_bytes=10**6)
    image = talk((40, 40))[0]["content"][0]["image_url"]["url"]
    asked = {"role": "user", "content": [{"type": "input_image", "image_url": image}]}
    long = {"role": "user", "content": "word " * 40}

    async def run() -> None:
        for first in (asked, long):
            begun = await caller.post("/v1/responses", {"input": [first], "store": True})
            again = {"input": "And now?", "previous_response_id": begun.json["id"]}
            assert (await caller.post("/v1/responses", again)).status == 200

    asyncio.run(run())
    assert threads == [False] * 4 == reading_threads


def test_a_deadline_that_passes_in_the_queue_is_reported(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    caller, engine, _ = scripted()
    monkeypatch.setattr(intake, "monotonic", lambda: time.monotonic() + 3600)
    found = asyncio.run(caller.post(CHAT, {"messages": HELLO, "timeout": 60}))
    assert found.status == 408 and found.json["error"]["code"] == "deadline_exceeded" and not engine.seen


@pytest.mark.parametrize("more", [{}, {"tools": [TOOL]}, {"user": "x" * SHORT_BYTES}], ids=["brief", "short", "long"])
def test_parse_time_includes_reading_the_body(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """By the fake clock, only reading takes time."""
    caller, _, service = scripted()
    now, read, noted = [0.0], ChatRoute.read, dict[str, float]()

    def slow(*args: Any) -> Any:
        now[0] += 5.0
        return read(*args)

    monkeypatch.setattr(intake, "monotonic", lambda: now[0])
    monkeypatch.setattr(ChatRoute, "read", slow)
    monkeypatch.setattr(service.metrics, "note_stage", noted.__setitem__)
    assert asyncio.run(caller.post(CHAT, {"messages": HELLO, **more})).status == 200
    assert noted["parse"] == 5.0
