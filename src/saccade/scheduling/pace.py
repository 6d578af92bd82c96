"""The pace: how long a step with outputs may take, and so how many prompt rows and images fit into it.

Pass times are measured at start-up. A pass of few rows is bound by reading weights, so prompt rows cost less next to
outputs than in a step of their own, and many short steps serve more requests than few long ones. Short steps also keep
answers apart: those that begin in one long step end together, and then the next prompts come together. Outputs wait
for the whole pass of an image anyway, so while a large one is to be encoded, short steps are a little longer than that.

Steps are longer only if so many prompts pile up that their first tokens would come too late. Then steps are as long as
allowed: a few long steps, rather than many of medium length, mean that most tokens still follow a short one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from saccade.choice.costs import Curve

MIN_PROMPT_ROWS = 64  # prompts make progress even in the shortest step
SHORT_FACTOR = 2.0  # a short step takes up to twice the time of its outputs alone; prompts get the rest
IMAGE_FACTOR = 1.5  # or up to so many times that of the next image, or of a part of it
FIRST_TOKEN_S = 1.0  # first tokens should come at most this long after their prompts
LONG_STEP_S = 0.04  # a step may take this long if short steps would miss that
MIN_PROMPT_ROOM = 8  # a bucket must have room for this many prompts besides the outputs


class Backlog(NamedTuple):
    """Rows of the prompts to compute, rows of their images to encode, how long the first prompt has waited, and rows of
    the next image to encode."""

    num_rows: int = 0
    num_image_rows: int = 0
    waited_s: float = 0.0
    next_image_rows: int = 0


@dataclass(frozen=True, slots=True)
class Pace:
    """Measured seconds of prefill passes and, if they were timed, of vision passes, by rows. With `max_step_s=0` each
    step gets a limit that suits it. `buckets` are the rows and requests (one is for padding) of prefill graphs.
    `num_parts` says over how many steps the pass of an image of so many rows can be divided."""

    prefill: Curve
    vision: Curve | None = None
    max_step_s: float = 0.0
    buckets: Sequence[tuple[int, int]] = ()
    min_prompt_rows: int = MIN_PROMPT_ROWS
    num_parts: Callable[[int], int] = lambda num_rows: 1

    def begin(self, num_outputs: int, backlog: Backlog) -> "PacedStep":
        """Starts a step that `num_outputs` running requests are waiting for."""
        return PacedStep(self, self.max_step_s or self.limit_s(num_outputs, backlog), num_outputs)

    def limit_s(self, num_outputs: int, backlog: Backlog) -> float:
        image_rows = backlog.next_image_rows
        image_s = self.vision_s(image_rows) / self.num_parts(image_rows) if image_rows else 0.0
        short_s = max(SHORT_FACTOR * self.prefill.at(num_outputs), min(IMAGE_FACTOR * image_s, LONG_STEP_S))
        work_s = self.prefill.at(backlog.num_rows) + self.vision_s(backlog.num_image_rows) if backlog.num_rows else 0.0
        in_short_steps_s = work_s * SHORT_FACTOR / (SHORT_FACTOR - 1)
        return short_s if backlog.waited_s + in_short_steps_s <= FIRST_TOKEN_S else max(short_s, LONG_STEP_S)

    def prompt_rows(self, seconds: float, num_outputs: int) -> int:
        """How many prompt rows fit next to `num_outputs` outputs. Together they fill a bucket."""
        max_rows = self.prefill.within(seconds)
        fitting = (rows for rows, room in self.buckets if rows <= max_rows and room > num_outputs + MIN_PROMPT_ROOM)
        return max(self.min_prompt_rows, max(fitting, default=max_rows) - num_outputs)

    def vision_s(self, num_rows: int) -> float:
        return self.vision.at(num_rows) if self.vision is not None and num_rows else 0.0


@dataclass(slots=True)
class PacedStep:
    """The time limit of a step with outputs, and how much of it is left for prompts and images."""

    pace: Pace
    limit_s: float
    num_outputs: int
    prompt_rows_left: int = field(init=False)
    _num_prompt_rows: int = field(default=0, init=False)
    _num_image_rows: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.prompt_rows_left = self.pace.prompt_rows(self.limit_s, self.num_outputs)

    def parts_in_time(self, num_rows: int, num_parts: int) -> int:
        """How many of the equal parts of another image there is time for. The first image of a step gets one anyway."""
        language_s = self.pace.prefill.at(self.num_outputs + self._num_prompt_rows)
        before_s = self.pace.vision_s(self._num_image_rows)
        left_s = self.limit_s - language_s - before_s
        whole_s = self.pace.vision_s(self._num_image_rows + num_rows) - before_s
        if whole_s <= left_s:
            return num_parts
        is_first = not (self._num_prompt_rows or self._num_image_rows)
        return max(int(is_first), int(left_s / whole_s * num_parts) if left_s > 0 else 0)

    def add_image(self, num_rows: int) -> None:
        self._num_image_rows += num_rows
        seconds = self.limit_s - self.pace.vision_s(self._num_image_rows)
        self.prompt_rows_left = max(0, self.pace.prompt_rows(seconds, self.num_outputs) - self._num_prompt_rows)

    def add_rows(self, num_rows: int) -> None:
        """A negative `num_rows` gives rows back."""
        self._num_prompt_rows += num_rows
        self.prompt_rows_left = max(0, self.prompt_rows_left - num_rows)
