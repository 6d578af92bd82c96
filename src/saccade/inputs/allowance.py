"""What making one prompt may cost, asked before the cost arises.

A few kilobytes can stand for gigabytes of pixels, and a long text takes seconds to encode only to be found too long.
So lengths, sizes and memory are judged by what is known beforehand: headers of images, characters of a text.
"""

from collections.abc import Callable
from dataclasses import dataclass

from saccade.errors import RequestError


class StopWorkError(Exception):
    """Nobody waits for the prompt any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """A prompt may have `max_tokens`; where tokens are only counted (`is_count`), only a text that is sure to have more
    is refused. `hold` hears of memory before it is used, and raises an error for the client where there is none;
    `go_on` is called between two pieces of work, and raises a StopWorkError where nobody waits. Both are called in the
    thread that works."""

    max_tokens: int | None = None
    is_count: bool = False
    hold: Callable[[int], None] = lambda num_bytes: None
    go_on: Callable[[], None] = lambda: None

    def check_tokens(self, num_tokens: int, what: str, param: str) -> None:
        if not self.is_count:
            self.check_length(num_tokens, f"{what} {num_tokens} tokens", param)

    def check_length(self, num_tokens: int, met: str, param: str) -> None:
        """`num_tokens`: as many as there are at the least."""
        if self.max_tokens is not None and num_tokens > self.max_tokens:
            raise self.too_long(met, param)

    def too_long(self, met: str, param: str) -> RequestError:
        limit = f"with room for an answer the limit is {self.max_tokens} tokens (--max-model-len)"
        return RequestError(f"{met}; {limit}", param=param, code="context_length_exceeded")


ANYTHING = Allowance()
