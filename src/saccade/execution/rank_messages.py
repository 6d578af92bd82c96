"""What the ranks of an engine say to each other beside orders: how a rank starts, and what it did with an order."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
        return f"/proc/self/fd/{self.store_fd}"


class OrderOutcome(Struct, frozen=True, kw_only=True):
    """What a rank did with one order. Ranks must agree on `digest`, a short text such as the keys of the graphs that
    were replayed, and on whether there was an error and of which type."""

    digest: str = ""
    error: str = ""  # "TypeOfError: its text"; empty when all went well

    @property
    def error_type(self) -> str:
        return self.error.partition(":")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExecutor:
    """What a rank's factory makes of a RankStart. `order_types` are those that rank 0 sends, in the same sequence. The
    arrays of an order are only valid until `execute` returns; `take_digest` then says what was done, also after an
    error. `facts`, told to rank 0 with "ready", are anything that JSON can say."""

    order_types: tuple[type, ...]
    execute: Callable[[Any], Any]
    take_digest: Callable[[], str] = lambda: ""
    facts: Any = None
    close: Callable[[], None] = lambda: None


class RankReady(Struct, frozen=True, tag=True):
    facts: Any = None


class NotStarted(Struct, frozen=True, tag=True):
    """The last words of a rank whose executor could not be made."""

    error: str
    is_config: bool = False


class Heard(Struct, frozen=True, tag=True):
    """A ping was heard."""


class Done(Struct, frozen=True, tag=True):
    """A message was executed; its bytes are no longer read."""

    sequence: int
    outcome: OrderOutcome


RankReply = RankReady | NotStarted | Heard | Done


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_TEXT]
