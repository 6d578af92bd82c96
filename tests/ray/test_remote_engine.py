"""The front end's view of the replicas, with a scripted handle."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from time import monotonic
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import BackPressureError

from saccade.client.stream import Delta
from saccade.errors import CapacityError, EngineDeadError, RequestError, SaccadeError
from saccade.inputs.placeholders import text_prompt
from saccade.inputs.processor import Processor
from saccade.ray import remote_engine
from saccade.ray.ray_messages import ReplicaReply, decode_question, encode, ended
from saccade.ray.remote_engine import RemoteEngine
from saccade.wire import messages
from saccade.wire.engine_settings import SchedulerSettings
from saccade.wire.messages import Ready
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.turn import Terms
from tests.inputs.folders import write_qwen

PROMPT = text_prompt([1, 2, 3])


class Call:
    """One call: items, then an error or silence."""

    def __init__(self, *items: Any) -> None:
        self._items, self.is_cancelled = list(items), False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        await asyncio.sleep(0)
        if not self._items:
            raise StopAsyncIteration
        item = self._items.pop(0)
        if item is None:
            await asyncio.Event().wait()
        if isinstance(item, Exception):
            raise item
        return bytes(item)

    def cancel(self) -> None:
        self.is_cancelled = True


class Handle:
    def __init__(self, *calls: Call) -> None:
        self.calls, self.asked = list(calls), list[tuple[Any, Any]]()
        self.generate = self

    def options(self, *, stream: bool) -> "Handle":
        assert stream
        return self

    def remote(self, question: bytes, arrays: Any, *, route: Any) -> Call:
        self.asked.append((decode_question(question), route))
        return self.calls[len(self.asked) - 1]


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    return Processor.from_folder(write_qwen(tmp_path_factory.mktemp("qwen")))


@pytest.fixture
def answer(processor: Processor) -> Callable[..., list[str]]:
    """The texts of an answer, from scripted calls in turn."""

    def run(handle: Handle, **more: Any) -> list[str]:
        async def inside() -> list[str]:
            engine = RemoteEngine(handle, processor, Ready(SchedulerSettings(), 1, 1))
            async with aclosing(engine.generate("mine", PROMPT, SamplingParams(max_tokens=4), Terms(**more))) as source:
                return [f"{delta.request_id} {delta.text}" async for delta in source]

        return asyncio.run(inside())

    return run


def delta(text: str) -> bytes:
    counts: dict[str, Any] = {"num_prompt_tokens": 3, "num_cached_tokens": 0, "num_output_tokens": 1}
    found = Delta(request_id="x", index=0, token_ids=(1,), text=text, logprobs=None, **counts)
    return encode(ReplicaReply(delta=found))


def refused(error: Exception, replica: str = "r1") -> bytes:
    return encode(ReplicaReply(ended=ended(error, replica)))


def test_a_request_keeps_its_own_id_and_others_cannot_have_it(answer: Callable[..., list[str]]) -> None:
    handles = [Handle(Call(delta("a"), delta("b"))) for _ in range(2)]
    assert [answer(handle) for handle in handles] == [["mine a", "mine b"]] * 2
    assert handles[0].asked[0][0].request_id != handles[1].asked[0][0].request_id
    assert not handles[0].calls[0].is_cancelled


@pytest.mark.parametrize("lost", [ActorDiedError(), refused(EngineDeadError("dead"))])
def test_a_request_that_has_not_begun_moves_to_another_replica_once(
    answer: Callable[..., list[str]], lost: Any
) -> None:
    handle = Handle(Call(lost), Call(delta("a")))
    assert answer(handle) == ["mine a"]
    first, second = (route for _, route in handle.asked)
    assert first[:2] == second[:2] and second[3] == (("r1",) if isinstance(lost, bytes) else ())
    with pytest.raises(EngineDeadError):
        answer(Handle(Call(lost), Call(lost)))


@pytest.mark.parametrize("lost", [ActorDiedError(), refused(EngineDeadError("dead"))])
def test_a_request_that_has_begun_is_not_answered_twice(answer: Callable[..., list[str]], lost: Any) -> None:
    handle = Handle(Call(delta("a"), lost), Call(delta("a")))
    with pytest.raises(EngineDeadError):
        answer(handle)
    assert len(handle.asked) == 1


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (refused(RequestError("wrong", param="p")), RequestError),
        (refused(CapacityError("full")), CapacityError),
        (BackPressureError(num_queued_requests=1, max_queued_requests=1), CapacityError),
        (RayTaskError("generate", "Traceback", ValueError("secret")), SaccadeError),
    ],
)
def test_other_errors_are_translated_without_their_details(
    answer: Callable[..., list[str]], error: Any, kind: type[Exception]
) -> None:
    with pytest.raises(kind) as found:
        answer(Handle(Call(error), Call(error)))
    assert "secret" not in str(found.value)


class Updating:
    """Replicas during an update: at first only those with the old plan answer, then also one with the new plan."""

    def __init__(self, new: Ready) -> None:
        self.said, self.plans = messages.encode(new), list[bytes]()
        self.ready = self

    def options(self, *, stream: bool) -> "Updating":
        return self

    async def remote(self, plan: bytes) -> bytes | None:
        self.plans.append(plan)
        return None

    def broadcast(self, method: str, plan: bytes) -> "Updating":
        assert method == "ready"
        self.plans.append(plan)
        return self

    async def results_async(self, *, return_exceptions: bool) -> list[Any]:
        assert return_exceptions
        return [None, ActorDiedError(), self.said] if len(self.plans) > 3 else [None]


def test_a_front_end_takes_its_limits_from_a_replica_with_its_own_plan(
    processor: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_engine, "POLL_S", 0.0)
    handle = Updating(Ready(SchedulerSettings(max_model_len=512), 16, 1))
    engine = asyncio.run(RemoteEngine.connect(handle, processor, b"new", 2))
    assert engine.ready.limits.max_model_len == 512 and handle.plans == [b"new"] * 4
    monkeypatch.setattr(remote_engine, "MAX_POLLS", 3)
    with pytest.raises(EngineDeadError, match="no replica has the settings"):
        asyncio.run(RemoteEngine.connect(Updating(Ready(SchedulerSettings(), 16, 1)), processor, b"new", 2))


def test_closing_a_stream_cancels_its_call(processor: Processor) -> None:
    async def inside() -> None:
        handle = Handle(Call(delta("a"), None))
        engine = RemoteEngine(handle, processor, Ready(SchedulerSettings(), 1, 1))
        source = engine.generate("mine", PROMPT, SamplingParams())
        await anext(source)
        await source.aclose()
        assert handle.calls[0].is_cancelled

    asyncio.run(inside())


def test_a_request_past_its_deadline_before_a_replica_answers_is_cancelled(answer: Callable[..., list[str]]) -> None:
    handle = Handle(Call(None))
    with pytest.raises(TimeoutError):
        answer(handle, deadline=monotonic() + 0.01)
    assert handle.calls[0].is_cancelled and handle.asked[0][0].seconds <= 0.01
