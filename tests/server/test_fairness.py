"""What each caller may use, who may go ahead of others, and when to retry."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from saccade.errors import CapacityError, ConfigError
from saccade.server.http_errors import HttpError
from saccade.server.sharing import admission, callers
from saccade.server.sharing.admission import Admission, EndRate
from saccade.server.sharing.caller_limits import CallerLimits, LimitsFile, read_limits
from saccade.server.sharing.callers import MANY, Caller, Callers
from tests.server.fake import Answer, FakeEngine, service_for
from tests.server.fake import Caller as Client

Scripted = Callable[..., tuple[Client, FakeEngine, Any]]
CHAT, HELLO = "/v1/chat/completions", [{"role": "user", "content": "hi"}]
FILE = """
default: {max_requests: 2}
callers:
  batch: {key: "sk-batch", weight: 0.5, tokens_per_minute: 600}
  boss: {key: "sk-boss", priority: true, max_requests: 0}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "limits.yaml").write_text(FILE)
    return str(tmp_path / "limits.yaml")


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for module in (callers, admission):
            monkeypatch.setattr(module, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


async def ask(client: Client, key: str = "", **fields: Any) -> Answer:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return await client.post(CHAT, {"messages": HELLO, **fields}, **headers)


def test_keys_in_the_limits_file_are_api_keys(scripted: Scripted, file: str) -> None:
    client, engine, _ = scripted(limits=file, api_key=("sk-other",))

    async def run() -> list[int]:
        return [(await ask(client, key)).status for key in ("sk-batch", "sk-boss", "sk-other", "", "wrong")]

    assert asyncio.run(run()) == [200, 200, 200, 401, 401]
    turns = [terms.turn for _, _, terms in engine.seen]
    assert [(turn.tenant, turn.weight) for turn in turns] == [("batch", 0.5), ("boss", 1.0), ("key 0", 1.0)]


def test_only_permitted_callers_go_ahead_of_others(scripted: Scripted, file: str) -> None:
    client, engine, _ = scripted(limits=file)

    async def run() -> None:
        refused = await ask(client, "sk-batch", priority=-1)
        assert refused.status == 403 and refused.json["error"]["param"] == "priority"
        assert "--limits" in refused.json["error"]["message"] and not engine.seen
        assert (await ask(client, "sk-batch", priority=5)).status == 200, "anyone may go behind others"
        assert (await ask(client, "sk-boss", priority=-1)).status == 200
        alone, _, _ = scripted()
        assert (await ask(alone, priority=-(2**31))).status == 403
        open_, _, _ = scripted(allow_priority=True)
        assert (await ask(open_, priority=-1)).status == 200

    asyncio.run(run())


def test_a_caller_is_limited_to_max_requests(scripted: Scripted, file: str) -> None:
    is_free = asyncio.Event()

    async def held(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
        await is_free.wait()
        yield {"text": "a", "token_ids": (5,), "finish_reason": "stop"}

    client, engine, service = scripted(held, limits=file)

    async def run() -> None:
        first = [asyncio.create_task(ask(client, "sk-batch")) for _ in range(2)]
        while len(engine.running) < 2:
            await asyncio.sleep(0.001)
        refused = await ask(client, "sk-batch")
        assert refused.status == 429 and int(refused.headers["retry-after"]) >= 1
        assert (
            refused.json["error"]["type"] == "rate_limit_error" and "max_requests" in refused.json["error"]["message"]
        )
        others = [asyncio.create_task(ask(client, "sk-boss")) for _ in range(5)]
        while len(engine.running) < 7:
            await asyncio.sleep(0.001)
        is_free.set()
        assert {(await task).status for task in (*first, *others)} == {200}
        assert (await ask(client, "sk-batch")).status == 200 and service.is_idle

    asyncio.run(run())


def test_a_token_debt_is_paid_back_before_the_next_request(clock: Clock) -> None:
    caller = Caller("a", CallerLimits(tokens_per_minute=600))
    caller.check(1.0)
    caller.take(650)
    with pytest.raises(HttpError) as refused:
        caller.check(1.0)
    assert refused.value.status == 429 and refused.value.retry_after_s == pytest.approx(5.1)
    clock.now += refused.value.retry_after_s or 0.0
    caller.check(1.0)
    clock.now += 10_000
    caller.take(700)
    with pytest.raises(HttpError):
        caller.check(1.0)


@pytest.mark.usefixtures("clock")
def test_prompt_and_output_tokens_are_charged(scripted: Scripted, tmp_path: Path) -> None:
    (tmp_path / "l").write_text("default: {tokens_per_minute: 5}")
    client, engine, _ = scripted(limits=str(tmp_path / "l"))

    async def run() -> None:
        assert (await ask(client)).status == 200
        refused = await ask(client)
        assert refused.status == 429 and "tokens_per_minute" in refused.json["error"]["message"]
        paid = len(engine.seen[0][0]) + 2 - 5
        assert int(refused.headers["retry-after"]) >= paid * 60 / 5 - 1

    asyncio.run(run())


def places(num: int) -> Admission:
    made = Admission(max_inside=num, max_reading=100, max_pending=100, max_pending_bytes=1000, retry_after_s=1.0)
    made.max_running = 4
    return made


@pytest.fixture
def inside() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def fill(inside: ExitStack, made: Admission, caller: Caller, num: int) -> None:
    for _ in range(num):
        place = inside.enter_context(made.enter(caller))
        place.prepare()
        place.pass_on()


def test_a_flood_leaves_places_for_others(inside: ExitStack) -> None:
    made, flood, other = places(80), Caller("flood", CallerLimits()), Caller("other", CallerLimits())
    fill(inside, made, flood, 70)
    with pytest.raises(CapacityError, match="of this caller"):
        fill(inside, made, flood, 1)
    fill(inside, made, other, 10)
    with pytest.raises(CapacityError):
        fill(inside, made, other, 1)
    assert made.inside == 80


def prepare(inside: ExitStack, made: Admission, caller: Caller, num: int, *, has_media: bool = False) -> None:
    """Admits requests whose bodies have arrived."""
    for _ in range(num):
        place = inside.enter_context(made.enter(caller))
        place.prepare()
        if has_media:
            place.prepare_media()


def test_slow_preparation_leaves_places_for_others(inside: ExitStack) -> None:
    made, flood, other = places(1000), Caller("flood", CallerLimits()), Caller("other", CallerLimits())
    prepare(inside, made, flood, 88)  # of 100
    with pytest.raises(CapacityError, match="are being prepared"):
        prepare(inside, made, flood, 1)
    prepare(inside, made, other, 12)
    with pytest.raises(CapacityError, match="are being prepared"):
        prepare(inside, made, other, 1)
    assert made.pending == 100


def test_media_leave_places_for_text_of_the_same_caller(inside: ExitStack) -> None:
    made, caller = places(1000), Caller("a", CallerLimits())
    prepare(inside, made, caller, 76, has_media=True)
    with pytest.raises(CapacityError, match="with media"), ExitStack() as refused:
        prepare(refused, made, caller, 1, has_media=True)
    prepare(inside, made, caller, 12)
    assert made.pending == 88 and made.pending_media == 76
    inside.close()
    assert made.pending == made.pending_media == made.pending_bytes == 0


def test_slow_senders_leave_places_for_others(inside: ExitStack) -> None:
    made, slow, other = places(1000), Caller("slow", CallerLimits()), Caller("other", CallerLimits())
    for _ in range(88):  # of 100
        inside.enter_context(made.enter(slow))
    with pytest.raises(CapacityError, match="are being read"):
        inside.enter_context(made.enter(slow))
    for _ in range(12):
        inside.enter_context(made.enter(other))


def test_large_requests_leave_memory_for_small_ones(inside: ExitStack) -> None:
    made, caller = places(1000), Caller("a", CallerLimits())
    made.max_pending_bytes = 80 * 2**20
    large = [inside.enter_context(made.enter(caller)) for _ in range(2)]
    large[0].hold(60 * 2**20)
    with pytest.raises(CapacityError, match="bytes are being prepared"):
        large[1].hold(11 * 2**20)
    large[1].hold(10 * 2**20)
    for _ in range(10):
        inside.enter_context(made.enter(caller)).hold(2**20)
    with pytest.raises(CapacityError, match="bytes are being prepared"):
        inside.enter_context(made.enter(caller)).hold(1)


def test_a_lone_request_may_use_all_memory(inside: ExitStack) -> None:
    made, caller = places(1000), Caller("a", CallerLimits())
    made.max_pending_bytes = 80 * 2**20
    alone = inside.enter_context(made.enter(caller))
    for _ in range(2):
        alone.hold(40 * 2**20)


def test_queue_share_limits_a_callers_places(inside: ExitStack) -> None:
    made, caller = places(80), Caller("a", CallerLimits(queue_share=0.25))
    fill(inside, made, caller, 20)
    with pytest.raises(HttpError, match="queue_share"):
        fill(inside, made, caller, 1)


def test_retry_after_follows_how_fast_requests_end(clock: Clock, inside: ExitStack) -> None:
    made, caller = places(24), Caller("a", CallerLimits())
    fill(inside, made, caller, 21)
    with pytest.raises(CapacityError) as early:
        fill(inside, made, caller, 1)
    assert early.value.retry_after_s == 1.0, "nothing has ended yet"
    for _ in range(10):
        made.pace.note_end()
        clock.now += 2.0
    with pytest.raises(CapacityError) as refused:
        fill(inside, made, caller, 1)
    assert refused.value.retry_after_s == pytest.approx(2.0 * (21 - 4)), "two seconds each, with 17 waiting"
    clock.now += 10_000
    assert made.drained_s() == 1.0, "old ends do not count"


def test_a_thread_may_ask_for_retry_after_while_requests_end() -> None:
    """A thread that decodes an image is refused memory, and the event loop goes on between any two of its steps."""

    class Moment(float):
        def __gt__(self, other: float) -> bool:
            rate.note_end()
            return super().__gt__(other)

    rate = EndRate()
    for _ in range(2):
        rate._ends.append(Moment(time.monotonic()))
    assert rate.seconds_for(1) is not None and len(rate._ends) == 4


def test_without_keys_callers_are_addresses() -> None:
    found = Callers(LimitsFile(), ())
    assert found.find(None, "10.0.0.1") is found.find(None, "10.0.0.1") is not found.find(None, "10.0.0.2")
    assert found.find(None, "2001:db8::1") is found.find(None, "2001:db8::ffff") is not found.find(None, "2001:db9::1")
    assert found.find(None, "::ffff:10.0.0.1") is found.find(None, "10.0.0.1")
    assert found.find(None, None).name == "address "


def test_idle_callers_are_forgotten_but_debtors_are_not(clock: Clock) -> None:
    found = Callers(LimitsFile(CallerLimits(tokens_per_minute=60)), ())
    debtor = found.find(None, "debtor")
    debtor.take(1000)
    for number in range(3 * MANY):
        found.find(None, f"host{number}")
    assert len(vars(found)["_known"]) <= MANY and found.find(None, "debtor") is debtor


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[", "YAML"),
        ("- a", "name: value"),
        ("limits: {}", "unknown limits"),
        ("default: {max: 1}", "unknown max"),
        ("default: {max_requests: -1}", "max_requests is -1"),
        ("default: {max_requests: true}", "max_requests is True"),
        ("default: {weight: .nan}", "weight is nan"),
        ("default: {queue_share: 2}", "queue_share is 2"),
        ("default: {priority: 1}", "true or false"),
        ("callers: {a: {weight: 1}}", "callers: a: key is missing"),
        ("callers: {a: {key: 5}}", "callers: a: key is missing"),
        ("callers: {a: {key: x}, b: {key: x}}", "keys must differ"),
        ("callers: 5", "name: value"),
    ],
)
def test_invalid_limits_files_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "l").write_text(text)
    with pytest.raises(ConfigError, match="--limits") as refused:
        read_limits(str(tmp_path / "l"))
    assert problem in str(refused.value)


def test_a_missing_limits_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml cannot be read"):
        service_for(None, limits=str(tmp_path / "nothing.yaml"))


def test_named_callers_inherit_the_default(file: str) -> None:
    found = read_limits(file)
    assert found.default == CallerLimits(max_requests=2)
    batch = CallerLimits(max_requests=2, weight=0.5, tokens_per_minute=600)
    assert found.callers["batch"] == batch and found.keys["sk-batch"] == "batch"
