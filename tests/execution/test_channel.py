"""Messages through shared memory arrive as they were sent, however slow the readers or small the memory."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from saccade.errors import SaccadeError
from saccade.execution import channel
from saccade.execution.channel import MAX_OUTSTANDING, ReaderBehindError, ReaderGoneError, Receiver, Sender
from saccade.execution.codec import ALIGNMENT, Codec, CodecError
from saccade.execution.rank_messages import Done, Heard, NotStarted, OrderOutcome, RankReady, RankReply

BOUND_S = 120.0  # a wait longer than this is a hang, whatever else the machine does
Array = npt.NDArray[Any]


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    rows: npt.NDArray[np.int32]
    color: Color = Color.RED
    mask: npt.NDArray[np.bool_] | None = None
    inner: "Part | None" = None


class Encode(msgspec.Struct, frozen=True, tag=True):
    pixels: npt.NDArray[np.uint8]


class Copy(msgspec.Struct, frozen=True, tag=True):
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Order:
    name: str
    parts: tuple[Part, ...] = ()
    work: tuple[Encode | Copy, ...] = ()
    named: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    digest: bytes = b""
    level: Level = Level.LOW
    numbers: frozenset[int] = frozenset()
    reason: Color | Part | None = None
    scale: float = 1.0
    anything: Any = None


class Blob(msgspec.Struct, frozen=True):
    data: npt.NDArray[Any]


CODEC = Codec(Order, Blob)


def packed(message: object) -> npt.NDArray[np.uint8]:
    found = CODEC.pack(message)
    memory = np.full(found.num_bytes, 0xAA, np.uint8)
    found.write(memory)
    return memory


def round_trip(message: object) -> Any:
    return CODEC.unpack(packed(message))


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    match expected:
        case np.ndarray():
            assert found.dtype == expected.dtype and found.shape == expected.shape
            assert np.array_equal(found, expected)
        case tuple():
            assert len(found) == len(expected)
            for pair in zip(found, expected, strict=True):
                assert_same(*pair)
        case dict():
            assert list(found) == list(expected)
            for name, value in expected.items():
                assert_same(found[name], value)
        case Order() | Part() | Blob() | Encode() | Copy():
            for name in type(expected).__annotations__:
                assert_same(getattr(found, name), getattr(expected, name))
        case _:
            assert found == expected


def random_array(rng: np.random.Generator, dtypes: str = "?bBhHiIlLefdF", max_size: int = 9) -> Array:
    shape = rng.integers(0, max_size, rng.integers(0, 4))
    array: Array = rng.integers(0, 256, shape).astype(dtypes[rng.integers(len(dtypes))])
    match rng.integers(5):
        case 0:
            return array.T
        case 1 if array.ndim:
            return array[::2]
        case 2 if array.ndim:
            return np.flip(array, 0)
        case 3:
            return np.asfortranarray(array)
    return array


def random_part(rng: np.random.Generator, depth: int = 0) -> Part:
    return Part(
        rows=random_array(rng, "i"),
        color=Color.BLUE if rng.random() < 0.5 else Color.RED,
        mask=random_array(rng, "?") if rng.random() < 0.5 else None,
        inner=random_part(rng, depth + 1) if depth < 3 and rng.random() < 0.3 else None,
    )


def random_order(rng: np.random.Generator) -> Order:
    work = [Encode(random_array(rng, "B")), Copy(tuple((int(n), int(n) + 1) for n in rng.integers(0, 9, 3)))]
    return Order(
        name="".join(chr(c) for c in rng.integers(32, 0x2FFF, rng.integers(20))),
        parts=tuple(random_part(rng) for _ in range(rng.integers(4))),
        work=tuple(work[n] for n in rng.integers(0, 2, rng.integers(4))),
        named={f"n{i}": random_array(rng) for i in range(rng.integers(6))},
        digest=rng.bytes(16),
        numbers=frozenset(rng.integers(0, 2**60, 3).tolist()),
        reason=(None, Color.BLUE, random_part(rng))[rng.integers(3)],
        scale=float(rng.normal()),
    )


def test_every_kind_of_value_survives_a_round_trip() -> None:
    """Catches overlapping arrays, lost strides, and types that msgpack does not keep (tuple, enum)."""
    rng = np.random.default_rng()
    for _ in range(300):
        order = random_order(rng)
        assert_same(round_trip(order), order)


@pytest.mark.parametrize(
    "array",
    [
        np.empty(0, np.int32),
        np.empty((3, 0, 2), np.float16),
        np.array(7.5),
        np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1)[::-1, :, ::2],
        np.broadcast_to(np.arange(3, dtype=np.uint8), (4, 3)),
        np.array([1, -2], ">i2"),
        np.array([np.nan, np.inf]).view(np.int64),
    ],
    ids=["empty", "empty axis", "scalar", "strided", "broadcast", "big-endian", "bits of nan"],
)
def test_odd_arrays_survive_a_round_trip(array: Array) -> None:
    assert_same(round_trip(Blob(array)), Blob(array))


def test_arrays_are_aligned_views_and_read_only_if_the_memory_is() -> None:
    memory = packed(Order("x", named={name: np.ones(3, np.uint8) for name in "abc"}))
    memory.flags.writeable = False
    arrays = list(CODEC.unpack(memory).named.values())
    first = arrays[0].ctypes.data
    for array in arrays:
        assert np.shares_memory(array, memory) and not array.flags.writeable
        assert (array.ctypes.data - first) % ALIGNMENT == 0


def test_an_array_that_appears_twice_is_sent_once() -> None:
    array = np.random.default_rng().integers(0, 2**40, 1000)
    message = Order("x", named={"a": array, "b": array.copy(), "c": array})
    assert packed(message).nbytes < 2 * array.nbytes + 500
    assert_same(round_trip(message), message)


def test_numpy_numbers_become_python_numbers() -> None:
    copy = round_trip(Order("x", work=(Copy(((np.int64(3), np.int32(4)),)),), scale=np.float32(0.5)))  # type: ignore[arg-type]
    assert copy.work == (Copy(((3, 4),)),) and type(copy.scale) is float and copy.scale == 0.5


def test_unsupported_messages_are_refused_with_a_reason() -> None:
    @dataclass(frozen=True)
    class Other:
        either: Part | Order

    with pytest.raises(CodecError, match=r"Other cannot be a message.*Structs with tag=True"):
        Codec(Other)
    with pytest.raises(CodecError, match="Part is not a message type; known types are Order, Blob"):
        CODEC.pack(Part(rows=np.empty(0, np.int32)))
    with pytest.raises(CodecError, match="an array of object cannot be sent"):
        CODEC.pack(Blob(np.array([None])))
    with pytest.raises(CodecError, match=r"an array of .* cannot be sent"):
        CODEC.pack(Blob(np.zeros(2, [("a", "i4")])))
    with pytest.raises(CodecError, match="a value of type object cannot be sent"):
        CODEC.pack(Order("x", anything=object()))


def test_readers_refuse_values_that_do_not_match_annotations() -> None:
    """An array in a field annotated `Any` would arrive as a list of three values."""
    with pytest.raises(CodecError, match="1 arrays of Order are in fields annotated otherwise"):
        round_trip(Order("x", anything=np.ones(3)))
    with pytest.raises(CodecError, match="received an invalid Order: Expected `str`, got `int`"):
        round_trip(Order(3))  # type: ignore[arg-type]


@dataclass
class Rig:
    sender: Sender
    receivers: dict[int, Receiver]
    replies: list[tuple[int, RankReply]]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + BOUND_S
        while not condition():
            assert time.monotonic() < deadline, f"hangs; behind: {self.sender.behind()}"
            self.sender.wait(0.01)

    def read(self, rank: int) -> Any:
        """Takes the next message and acknowledges it."""
        received = self.receivers[rank].receive()
        assert received is not None
        message = CODEC.unpack(received[1].copy())
        self.receivers[rank].reply(Done(received[0], OrderOutcome()))
        return message


@contextmanager
def rig(num_readers: int = 2, capacity_bytes: int = 2**20) -> Iterator[Rig]:
    replies: list[tuple[int, RankReply]] = []
    sender = Sender(CODEC, num_readers, lambda *reply: replies.append(reply), capacity_bytes=capacity_bytes)
    receivers = {rank: Receiver(end.detach(), os.dup(sender.memory_fd)) for rank, end in sender.reader_sockets.items()}
    try:
        yield Rig(sender, receivers, replies)
    finally:
        for receiver in receivers.values():
            receiver.close()
        sender.close()


def test_ten_thousand_messages_reach_slow_readers_through_a_small_memory() -> None:
    """Catches bytes overwritten before the slowest reader has read them, and lost or duplicate notices."""
    seed = int(np.random.default_rng().integers(2**31))
    print(f"seed {seed}")
    num_messages, failures = 10_000, []

    def messages() -> Iterator[Blob]:
        rng = np.random.default_rng(seed)
        for _ in range(num_messages):
            size = int(rng.integers(1, 200)) if rng.random() < 0.98 else int(rng.integers(1, 20_000))
            yield Blob(rng.integers(0, 256, size, dtype=np.uint8))

    def listen(rank: int, receiver: Receiver) -> None:
        rng = np.random.default_rng()
        try:
            for expected in messages():
                received = receiver.receive()
                assert received is not None
                found = CODEC.unpack(received[1])
                if rng.random() < 0.005:
                    time.sleep(rng.random() * 0.005 * rank)
                assert np.array_equal(found.data, expected.data)
                receiver.reply(Done(received[0], OrderOutcome()))
            assert receiver.receive() is None
        except BaseException as error:
            failures.append(error)
            receiver.close()

    with rig(num_readers=3, capacity_bytes=8192) as found:
        threads = [threading.Thread(target=listen, args=pair) for pair in found.receivers.items()]
        for thread in threads:
            thread.start()
        sent = [found.sender.send(message, timeout_s=BOUND_S) for message in messages()]
        found.wait_until(lambda: not found.sender.behind())
        found.sender.tell_to_close()
        for thread in threads:
            thread.join(BOUND_S)
        assert not failures and sent == sorted(set(sent)) and len(sent) == num_messages
        for rank in found.receivers:
            assert [reply.sequence for who, reply in found.replies if who == rank and isinstance(reply, Done)] == sent


def test_the_memory_grows_for_a_larger_message() -> None:
    rng = np.random.default_rng()
    with rig(num_readers=2, capacity_bytes=4096) as found:
        blobs = [Blob(rng.integers(0, 256, size, dtype=np.uint8)) for size in (5000, 100, 123_457, 4096, 4032)]
        read: dict[int, list[Blob]] = {1: [], 2: []}
        threads = [
            threading.Thread(target=lambda rank=rank: read[rank].extend(found.read(rank) for _ in blobs))
            for rank in read
        ]
        for thread in threads:
            thread.start()
        numbers = [found.sender.send(blob, timeout_s=BOUND_S) for blob in blobs]
        for thread in threads:
            thread.join(BOUND_S)
        for blob, *others in zip(blobs, *read.values(), strict=True):
            for other in others:
                assert_same(other, blob)
        found.wait_until(lambda: not found.sender.behind())
        done = [reply.sequence for rank, reply in found.replies if rank == 1 and isinstance(reply, Done)]
        assert done == numbers, "each message is acknowledged once, by the number that its sender knows"


def test_64_megabytes_of_pixels_fit_in_one_message() -> None:
    with rig(num_readers=1, capacity_bytes=channel.CAPACITY_BYTES) as found:
        pixels = np.random.default_rng().integers(0, 256, (4000, 5600, 3), np.uint8)
        assert pixels.nbytes > 64 * 2**20
        found.sender.send(Blob(pixels), timeout_s=BOUND_S)
        received = found.receivers[1].receive()
        assert received is not None and np.array_equal(CODEC.unpack(received[1]).data, pixels)


def test_arrays_are_copied_when_sent_and_kept_until_acknowledged() -> None:
    with rig(capacity_bytes=1024) as found:
        data = np.arange(100, dtype=np.uint8)
        first = found.sender.send(Blob(data), timeout_s=BOUND_S)
        data[:] = 0
        received = found.receivers[1].receive()
        assert received is not None and received[0] == first
        view = CODEC.unpack(received[1]).data
        found.read(2)
        with pytest.raises(ReaderBehindError):
            for _ in range(20):
                found.sender.send(Blob(data), timeout_s=0.0)
        assert np.array_equal(view, np.arange(100)) and not view.flags.writeable


def test_a_sender_waits_for_the_slowest_reader_and_names_it() -> None:
    with rig(num_readers=3, capacity_bytes=2048) as found:
        blob, sent = Blob(np.zeros(900, np.uint8)), 1
        found.sender.send(blob, timeout_s=BOUND_S)
        found.read(1)
        found.read(3)
        with pytest.raises(ReaderBehindError, match=r"rank 2 is \d messages behind and has not made room for 0.1 s"):
            for _ in range(3):
                found.sender.send(blob, timeout_s=0.1)
                sent += 1
        found.sender.collect()
        assert found.sender.behind() == {1: sent - 1, 2: sent, 3: sent - 1}
        for rank, count in found.sender.behind().items():
            for _ in range(count):
                found.read(rank)
        assert found.sender.send(blob, timeout_s=BOUND_S) == sent + 1


def test_tiny_messages_nobody_reads_never_fill_the_sockets() -> None:
    """A full socket would raise BlockingIOError, or block, with most of the memory free."""
    with rig() as found:
        for _ in range(MAX_OUTSTANDING):
            found.sender.send(Blob(np.zeros(1)), timeout_s=0.0)
        with pytest.raises(ReaderBehindError):
            found.sender.send(Blob(np.zeros(1)), timeout_s=0.05)
        for _ in range(MAX_OUTSTANDING):
            found.read(1)
            found.read(2)
        found.sender.collect()
        assert not found.sender.behind()


def test_a_reader_that_is_gone_is_named() -> None:
    with rig() as found:
        found.sender.send(Blob(np.zeros(9)), timeout_s=BOUND_S)
        found.receivers[2].reply(NotStarted("last words"))
        found.receivers[2].close()  # with unread data, so that the kernel reports an error before the last words
        with pytest.raises(ReaderGoneError, match="rank 2 has closed its end"):
            found.sender.send(Blob(np.zeros(9)), timeout_s=BOUND_S)
        assert found.sender.gone() == [2]
        found.sender.collect()
        assert (2, NotStarted("last words")) in found.replies


def test_a_sender_that_waits_for_room_notices_a_dead_reader() -> None:
    with rig(num_readers=1, capacity_bytes=1024) as found:
        found.sender.send(Blob(np.zeros(900, np.uint8)), timeout_s=BOUND_S)
        threading.Timer(0.1, found.receivers[1].close).start()
        with pytest.raises(ReaderGoneError):
            found.sender.send(Blob(np.zeros(900, np.uint8)), timeout_s=BOUND_S)


def test_a_reader_gets_all_messages_before_it_learns_that_the_sender_is_gone() -> None:
    with rig() as found:
        found.sender.send(Blob(np.arange(5)), timeout_s=BOUND_S)
        found.sender.close()
        received = found.receivers[1].receive()
        assert received is not None and CODEC.unpack(received[1]).data.tolist() == [0, 1, 2, 3, 4]
        assert found.receivers[1].receive() is None


def test_replies_arrive_in_order_and_overlong_ones_become_errors() -> None:
    with rig(num_readers=1) as found:
        receiver = found.receivers[1]
        receiver.reply(RankReady({"tokens": 5}))
        found.sender.send(Blob(np.zeros(1)), timeout_s=BOUND_S)
        received = receiver.receive()
        assert received is not None
        receiver.reply(Done(received[0], OrderOutcome(digest="x" * 10**6)))
        found.wait_until(lambda: len(found.replies) == 2)
        (_, ready), (_, done) = found.replies
        assert ready == RankReady({"tokens": 5})
        assert isinstance(done, Done) and "the limit is 65536" in done.outcome.error and not done.outcome.digest
        with pytest.raises(SaccadeError, match="the limit is 65536"):
            receiver.reply(RankReady("x" * 10**6))


def test_silence_counts_only_while_an_answer_is_owed() -> None:
    with rig() as found:
        sender, now = found.sender, time.monotonic()
        assert sender.silent_s(1, now + 1000) == 0
        sender.send(Blob(np.zeros(1)), timeout_s=BOUND_S)
        sender.ping(5.0, now + 1000)
        assert 900 < sender.silent_s(1, now + 1000) <= 1000, "it owes an answer to the message; no ping was needed"
        found.read(1)
        sender.collect()
        assert sender.silent_s(1, now + 1000) == 0 < sender.silent_s(2, now + 1000)
        sender.ping(5.0, now + 1000)
        assert 0 < sender.silent_s(1, now + 1010) <= 10
        sender.forgive(now + 1010)
        assert sender.silent_s(1, now + 1010) == sender.silent_s(2, now + 1010) == 0
        sender.tell_to_close()
        assert found.receivers[1].receive() is None
        sender.collect()
        assert (1, Heard()) in found.replies and sender.silent_s(1, now + 2000) == 0
