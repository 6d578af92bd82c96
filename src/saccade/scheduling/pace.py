"""How much fits into a step while answers are being written, from the times that passes took at the start.

A pass of few rows is bound by reading weights, so that prompts beside outputs cost less than in steps of their own, and
many short steps serve more than few long ones. Only prompts that pile up are worth longer steps. These are then few and
as long as steps may be, rather than many of a middle length: so most tokens come after a short one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from saccade.choice.costs import Curve

FEWEST_ROWS = 64  # of prompts: they must go on, however short steps shall be
SHORT_FACTOR = 2.0  # so many times as long as with its outputs alone is a short step: the rest is for prompts
PATIENCE_S = 0.6  # from the arrival of a prompt to the first tokens of all that wait with it; beyond it,
LONGEST_S = 0.04  # steps are so long
FEW_PROMPTS = 8  # of a step: it needs a bucket with room for them


class Backlog(NamedTuple):
    """Prompts that wait: their rows, those of images yet to be encoded, and how long the first has waited."""

    num_rows: int = 0
    num_image_rows: int = 0
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of prefill passes and, if they were timed, of vision passes, by rows. `max_step_s` 0: each step has its
    own limit. `buckets` are the sizes of prefill graphs: rows, and requests with one for padding."""

    prefill: Curve
    vision: Curve | None = None
    max_step_s: float = 0.0
    buckets: Sequence[tuple[int, int]] = ()
    fewest_rows: int = FEWEST_ROWS

    def begin(self, num_outputs: int, backlog: Backlog) -> "PacedStep":
        """A step that so many outputs wait for."""
        return PacedStep(self, self.max_step_s or self.limit_s(num_outputs, backlog), num_outputs)

    def limit_s(self, num_outputs: int, backlog: Backlog) -> float:
        short_s = SHORT_FACTOR * self.prefill.at(num_outputs)
        work_s = self.prefill.at(backlog.num_rows) + self.vision_s(backlog.num_image_rows) if backlog.num_rows else 0.0
        in_short_steps_s = work_s * SHORT_FACTOR / (SHORT_FACTOR - 1)
        return short_s if backlog.waited_s + in_short_steps_s <= PATIENCE_S else max(short_s, LONGEST_S)

    def prompt_rows(self, seconds: float, num_outputs: int) -> int:
        """The most rows of prompts beside so many outputs. Together they fill a bucket."""
        most = self.prefill.within(seconds)
        fitting = (rows for rows, room in self.buckets if rows <= most and room > num_outputs + FEW_PROMPTS)
        return max(self.fewest_rows, max(fitting, default=most) - num_outputs)

    def vision_s(self, num_rows: int) -> float:
        return self.vision.at(num_rows) if self.vision is not None and num_rows else 0.0


@dataclass(slots=True)
class PacedStep:
    """A step that outputs wait for, and what is left of it for prompts and images."""

    pace: Pace
    limit_s: float
    num_outputs: int
    prompt_rows_left: int = field(init=False)
    _num_prompt_rows: int = field(default=0, init=False)
    _num_image_rows: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.prompt_rows_left = self.pace.prompt_rows(self.limit_s, self.num_outputs)

    def can_encode(self, num_rows: int) -> bool:
        """Whether there is time for one more image. One that takes longer than a step is the first in a step."""
        if not (self._num_prompt_rows or self._num_image_rows):
            return True
        language_s = self.pace.prefill.at(self.num_outputs + self._num_prompt_rows)
        return language_s + self.pace.vision_s(self._num_image_rows + num_rows) <= self.limit_s

    def add_image(self, num_rows: int) -> None:
        self._num_image_rows += num_rows
        seconds = self.limit_s - self.pace.vision_s(self._num_image_rows)
        self.prompt_rows_left = max(0, self.pace.prompt_rows(seconds, self.num_outputs) - self._num_prompt_rows)

    def add_rows(self, num_rows: int) -> None:
        """Below 0: rows that were added are given back."""
        self._num_prompt_rows += num_rows
        self.prompt_rows_left = max(0, self.prompt_rows_left - num_rows)
