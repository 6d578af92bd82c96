"""A device that takes as long as an H200 did, in virtual time."""

from dataclasses import dataclass

from saccade.choice.costs import Curve
from saccade.scheduling.step_plan import StepPlan

IMAGE_ROWS = 324  # of a 560x560 image


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds by rows. A step's passes are added up: side by side they share one device."""

    vision: Curve
    prefill: Curve
    decode: Curve
    head_s: float  # last MLP and logits behind a prefill; a decode's times include them

    def of_step(self, plan: StepPlan) -> float:
        seconds = self.vision.at(sum(item.num_rows for item in plan.encode)) if plan.encode else 0.0
        num_rows = sum(chunk.count for chunk in plan.chunks)
        if num_rows == len(plan.chunks):  # a row each, as in a decode graph
            return seconds + self.decode.at(num_rows)
        return seconds + self.prefill.at(num_rows) + self.head_s


# One H200, Qwen3-VL-8B, bfloat16, graphs on; docs/log.md has the commands. Vision: 1, 8 and 32 images of 560x560
# (`saccade bench vision`). Prefill by rows, decode by requests with 1,000 keys each (`saccade bench offline`): those of
# 406 rows and more of 2026-11-16, 64 rows of 2026-11-15.
H200_QWEN3_VL_8B = StepTimes(
    vision=Curve(((IMAGE_ROWS, 4.37e-3), (8 * IMAGE_ROWS, 24.0e-3), (32 * IMAGE_ROWS, 92.1e-3))),
    prefill=Curve(((64, 5.02e-3), (406, 9.52e-3), (1024, 22.18e-3), (8192, 201.5e-3))),
    decode=Curve(((1, 4.19e-3), (64, 7.95e-3))),
    head_s=0.42e-3,
)
