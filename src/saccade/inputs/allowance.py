"""Limits on the cost of one prompt, checked on image headers and text lengths before the work is done: a few
kilobytes can decode to gigabytes of pixels, and a long text takes seconds to encode only to turn out too long."""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from saccade.errors import RequestError, too_long


class StopWorkError(Exception):
    """Nobody is waiting for the prompt any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What one prompt may cost. The callbacks run in the thread that makes the prompt."""

    max_tokens: int | None = None
    is_count: bool = False  # tokens are only counted, so only text that is certain to be too long is refused
    has_answer: bool = True  # `max_tokens` leaves room for the first token of an answer
    hold: Callable[[int], None] = lambda num_bytes: None  # before memory is used; raises a client error if it is short
    check_cancelled: Callable[[], None] = lambda: (
        None
    )  # between pieces of work; raises StopWorkError if nobody is waiting
    waiting: Callable[[], AbstractContextManager[object]] = nullcontext  # while another process does the work
    submit: Callable[[Callable[[], Any]], Future[Any]] | None = None  # runs work in another thread
    caller: str = ""  # where prompts queue, callers take turns

    def check_tokens(self, num_tokens: int, what: str, param: str) -> None:
        if not self.is_count:
            self.check_length(num_tokens, f"{what} {num_tokens} tokens", param)

    def check_length(self, num_tokens: int, problem: str, param: str) -> None:
        """`num_tokens` is a lower bound."""
        if self.max_tokens is not None and num_tokens > self.max_tokens:
            raise self.too_long(problem, param)

    def too_long(self, problem: str, param: str) -> RequestError:
        assert self.max_tokens is not None, "without a limit nothing is too long"
        return too_long(problem, self.max_tokens + self.has_answer, has_answer=self.has_answer, param=param)


ANYTHING = Allowance()
