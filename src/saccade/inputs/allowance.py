"""Limits on the cost of one prompt, checked before it arises: a few kilobytes can decode to gigabytes of pixels, and a
long text takes seconds to encode only to be found too long. Image headers and text lengths decide."""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from saccade.errors import RequestError


class StopWorkError(Exception):
    """Nobody waits for the prompt any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """At most `max_tokens` per prompt; if tokens are only counted (`is_count`), only text that is certain to have more
    is refused. `has_answer`: one token more would fit, which is for an answer. `hold` is called before memory is used
    and raises a client error if there is none; `go_on` is called between pieces of work and raises StopWorkError if
    nobody waits. `waiting` encloses a time in which another process works. All run in the working thread. `beside`, if
    there is one, runs work in another thread. `caller` has sent the prompt: where prompts wait, callers take turns."""

    max_tokens: int | None = None
    is_count: bool = False
    has_answer: bool = True
    hold: Callable[[int], None] = lambda num_bytes: None
    go_on: Callable[[], None] = lambda: None
    waiting: Callable[[], AbstractContextManager[object]] = nullcontext
    beside: Callable[[Callable[[], Any]], Future[Any]] | None = None
    caller: str = ""

    def check_tokens(self, num_tokens: int, what: str, param: str) -> None:
        if not self.is_count:
            self.check_length(num_tokens, f"{what} {num_tokens} tokens", param)

    def check_length(self, num_tokens: int, met: str, param: str) -> None:
        """`num_tokens` is a lower bound."""
        if self.max_tokens is not None and num_tokens > self.max_tokens:
            raise self.too_long(met, param)

    def too_long(self, met: str, param: str) -> RequestError:
        room = "with room for an answer " if self.has_answer else ""
        limit = f"{room}the limit is {self.max_tokens} tokens (--max-model-len)"
        return RequestError(f"{met}; {limit}", param=param, code="context_length_exceeded")


ANYTHING = Allowance()
