"""Messages between ranks other than orders: how a rank starts, and the outcome of each order."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

MAX_TEXT = 4000  # characters of an error


class RankStart(Struct, frozen=True, kw_only=True):
    """The first line a rank reads, as JSON. `factory` is an import path: package.module:function."""

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
    """What a rank did with one order. Ranks must agree on `digest` (e.g. the replayed graph keys) and error type."""

    digest: str = ""
    error: str = ""  # "ErrorType: text"; empty on success

    @property
    def error_type(self) -> str:
        return self.error.partition(":")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExecutor:
    """What a rank's factory returns. `order_types` must equal rank 0's. Arrays of an order are valid only until
    `execute` returns; `take_digest` then says what was done, even after an error. `facts` (JSON) are sent to rank 0."""

    order_types: tuple[type, ...]
    execute: Callable[[Any], Any]
    take_digest: Callable[[], str] = lambda: ""
    facts: Any = None
    close: Callable[[], None] = lambda: None


class RankReady(Struct, frozen=True, tag=True):
    facts: Any = None


class NotStarted(Struct, frozen=True, tag=True):
    """Sent by a rank whose executor could not be built, before it exits."""

    error: str
    is_config: bool = False


class Heard(Struct, frozen=True, tag=True):
    """Reply to a ping."""


class Done(Struct, frozen=True, tag=True):
    """A message was executed; the rank no longer reads its bytes."""

    sequence: int
    outcome: OrderOutcome


RankReply = RankReady | NotStarted | Heard | Done


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_TEXT]
