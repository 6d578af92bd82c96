"""How much fits into a step while answers are being written, from the times that passes took at the start."""

from dataclasses import dataclass

from saccade.choice.costs import Curve

VISION_SHARE = 0.5  # of a step's time: its rows wait for its images


@dataclass(frozen=True, slots=True)
class Pace:
    """`prefill` and `vision` are seconds by rows; None where no pass of that kind was timed."""

    max_step_s: float
    prefill: Curve | None
    vision: Curve | None = None
    fewest_rows: int = 64  # of prompts: they must go on, however short steps shall be

    def prompt_rows(self, num_outputs: int) -> int | None:
        """The most rows of prompts beside so many outputs; None: any number."""
        if self.prefill is None:
            return None
        return max(self.fewest_rows, self.prefill.within(self.max_step_s) - num_outputs)

    def image_rows(self) -> int | None:
        """The most rows of images; a single longer image is encoded all the same. None: any number."""
        return None if self.vision is None else self.vision.within(VISION_SHARE * self.max_step_s)
