"""A link delivers every message whole and in order, and nobody who sends has to wait."""

import errno
import socket
import threading
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from saccade.wire.link import HEAD, RECEIVE_BYTES, Link, OtherEndGoneError

BOUND_S = 60.0
MIB = 2**20


@pytest.fixture
def links() -> Iterator[tuple[Link, Link]]:
    ours, theirs = map(Link, socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def receive(link: Link) -> list[bytes]:
    while (frames := link.receive()) is None:
        assert link.wait(BOUND_S), "no message arrived"
    return [bytes(frame) for frame in frames]


def random_message(random: Random) -> list[bytes]:
    sizes = [random.choice((0, 1, 9, 1000, 70_000, MIB)) for _ in range(random.randint(1, 4))]
    return [random.randbytes(size) for size in sizes]


@pytest.mark.parametrize("seed", range(3))
def test_messages_arrive_whole_and_in_order_though_nobody_reads_while_they_are_sent(
    links: tuple[Link, Link], seed: int
) -> None:
    random = Random(seed)
    said = [random_message(random) for _ in range(40)]
    for message in said:
        links[0].send(message)
    assert [receive(links[1]) for _ in said] == said
    assert links[1].receive() is None


def test_threads_may_send_at_the_same_time(links: tuple[Link, Link]) -> None:
    def send(name: int) -> None:
        for number in range(50):
            links[0].send([bytes([name, number]) * 30_000])

    threads = [threading.Thread(target=send, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    found = [receive(links[1])[0] for _ in range(200)]
    for thread in threads:
        thread.join()
    assert all(data == data[:2] * 30_000 for data in found)
    for name in range(4):
        assert [data[1] for data in found if data[0] == name] == list(range(50))


def test_a_message_with_more_frames_than_one_system_call_takes_arrives(links: tuple[Link, Link]) -> None:
    said = [b"%d" % number for number in range(3000)]
    links[0].send(said)
    assert receive(links[1]) == said


def test_a_large_message_does_not_keep_its_receiver_from_other_work(links: tuple[Link, Link]) -> None:
    said = [bytes(3 * RECEIVE_BYTES)]
    links[0].send(said)
    num_calls = 1
    while (frames := links[1].receive()) is None:
        assert links[1].wait(BOUND_S)
        num_calls += 1
    assert num_calls >= 3 and frames == said


def test_part_of_a_message_is_not_a_message() -> None:
    whole = HEAD.pack(5, False) + b"hello" + HEAD.pack(0, False) + HEAD.pack(2, True) + b"is"
    ours, theirs = socket.socketpair()
    link = Link(theirs)
    for byte in whole[:-1]:
        ours.send(bytes([byte]))
        assert link.wait(BOUND_S) and link.receive() is None
    ours.send(whole[-1:])
    assert receive(link) == [b"hello", b"", b"is"]
    ours.close()
    link.close()


def test_flush_waits_for_what_was_not_sent_at_once(links: tuple[Link, Link]) -> None:
    ours, theirs = links
    ours.send([b"x" * (64 * MIB)])
    ours.flush(0.01)  # nobody reads
    reader = threading.Thread(target=receive, args=(theirs,))
    reader.start()
    ours.flush(BOUND_S)
    ours.close()  # nothing is lost
    reader.join(BOUND_S)
    assert not reader.is_alive()


def test_an_end_that_is_gone_is_noticed_only_by_who_receives(links: tuple[Link, Link]) -> None:
    ours, theirs = links
    ours.send([b"last"])
    theirs.send([b"unread" * MIB])  # more than the socket takes
    ours.close()
    theirs.send([b"x"])
    theirs.flush(BOUND_S)
    with pytest.raises(OtherEndGoneError):
        receive(theirs)
        receive(theirs)


class FullSocket(socket.socket):
    """Takes half of what is sent, once; then there is no memory for more."""

    is_full = False

    def sendmsg(self, buffers: Any, *given: Any) -> int:
        if self.is_full:
            raise OSError(errno.ENOBUFS, "no memory")
        self.is_full = True
        return super().send(b"".join(buffers)[: sum(map(len, buffers)) // 2])


def test_nothing_follows_a_message_that_was_cut_off() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = Link(FullSocket(fileno=ours.detach())), Link(theirs)
    receiver.send([b"said before"])
    sender.send([b"half of this is lost"])
    sender._socket.is_full = False  # type: ignore[attr-defined]
    sender.send([b"this would be taken for the other half"])
    for link, said in ((sender, [b"said before"]), (receiver, None)):
        assert said is None or receive(link) == said
        with pytest.raises(OtherEndGoneError):
            receive(link)
        link.close()


def test_closing_ends_a_thread_that_waits_for_the_reader(links: tuple[Link, Link]) -> None:
    before = set(threading.enumerate())  # some of them, of other tests, may end meanwhile
    links[0].send([b"x" * (64 * MIB)])
    [sender] = set(threading.enumerate()) - before
    links[0].close()
    assert not sender.is_alive()
