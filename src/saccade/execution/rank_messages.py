"""What the ranks of an engine say to each other beside orders: how a rank starts, and what it did with an order."""

from collections.abc import Callable
from typing import Any, Protocol

from msgspec import Struct

MAX_TEXT = 4000  # characters of an error


class RankStart(Struct, frozen=True, kw_only=True):
    """The first line that a rank reads, as JSON. `factory` is an import path: package.module:function."""

    rank: int
    num_ranks: int
    device: int
    factory: str
    settings: dict[str, Any]
    parent_pid: int
    socket_fd: int
    memory_fd: int
    store_fd: int

    @property
    def store(self) -> str:
        """The file of a torch.distributed.FileStore, the same for all ranks."""
        return store_path(self.store_fd)


class OrderOutcome(Struct, frozen=True, kw_only=True):
    """What a rank did with one order.

    Ranks must agree on `digest`, a short text such as the keys of the graphs that were replayed, and on whether there
    was an error and of which type. `value` is an answer of the rank's own: anything that JSON can say, below 64 KiB.
    """

    digest: str = ""
    error: str = ""  # "TypeOfError: its text"; empty when all went well
    value: Any = None

    @property
    def error_type(self) -> str:
        return self.error.partition(":")[0]


class RankExecutor(Protocol):
    """What a rank's factory makes: `factory(start: RankStart) -> RankExecutor`."""

    @property
    def order_types(self) -> tuple[type, ...]:
        """The types that rank 0 sends, in the same order as there."""

    @property
    def facts(self) -> Any:
        """Told to rank 0 with "ready": anything that JSON can say."""

    def execute(self, order: Any) -> OrderOutcome | None:
        """The arrays of an order are only valid until this returns."""

    def close(self) -> None: ...


class RankReady(Struct, frozen=True, tag=True):
    facts: Any = None


class NotStarted(Struct, frozen=True, tag=True):
    """The last words of a rank whose executor could not be made."""

    error: str
    is_config: bool = False


class Heard(Struct, frozen=True, tag=True):
    """A ping was heard (0), or a part of a message was taken."""

    sequence: int = 0


class Done(Struct, frozen=True, tag=True):
    """A message was executed; its bytes are no longer read."""

    sequence: int
    outcome: OrderOutcome


RankReply = RankReady | NotStarted | Heard | Done


def store_path(fd: int) -> str:
    return f"/proc/self/fd/{fd}"


def attempt(execute: Callable[[Any], OrderOutcome | None], order: Any) -> tuple[OrderOutcome, Exception | None]:
    """What became of an order. An error is part of the outcome: whether it is fatal is for rank 0 to say."""
    try:
        return execute(order) or OrderOutcome(), None
    except Exception as error:
        return OrderOutcome(error=describe(error)), error


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_TEXT]
