"""Tokens and times to first token of the last minutes, second by second, for the page's charts."""

from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any

KEPT_S = 300


@dataclass(slots=True)
class LoadSecond:
    """`second` is on the monotonic clock; seconds without tokens are left out."""

    second: int
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_tokens: int = 0
    first_token_s: float = 0.0  # their sum


class RecentLoad:
    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._seconds: deque[LoadSecond] = deque(maxlen=KEPT_S)

    def note_tokens(self, *, prompt: int = 0, output: int = 0) -> None:
        now = self._now()
        now.prompt_tokens += prompt
        now.output_tokens += output

    def note_first(self, seconds: float) -> None:
        now = self._now()
        now.first_tokens += 1
        now.first_token_s += seconds

    def seconds(self) -> list[dict[str, Any]]:
        oldest = self._clock() - KEPT_S
        return [asdict(one) for one in self._seconds if one.second >= oldest]

    def _now(self) -> LoadSecond:
        second = int(self._clock())
        if not self._seconds or self._seconds[-1].second != second:
            self._seconds.append(LoadSecond(second))
        return self._seconds[-1]
