"""A simulated device: its steps take as long as they took on an H200."""

from dataclasses import dataclass

from saccade.choice.costs import Curve
from saccade.scheduling.step_plan import StepPlan

IMAGE_ROWS = 324  # a 560x560 image


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds by number of rows. The passes of a step are added up, because they share one device."""

    vision: Curve
    prefill: Curve
    decode: Curve
    head_s: float  # last MLP and logits after a prefill; decode times include them

    def of_step(self, plan: StepPlan) -> float:
        seconds = self.vision.at(sum(item.num_rows for item in plan.encode)) if plan.encode else 0.0
        num_rows = sum(chunk.count for chunk in plan.chunks)
        if num_rows == len(plan.chunks):  # one row each, as in a decode graph
            return seconds + self.decode.at(num_rows)
        return seconds + self.prefill.at(num_rows) + self.head_s


# One H200, Qwen3-VL-8B, bfloat16, graphs on; docs/log.md has the commands. Vision: 1, 8 and 32 images of 560x560
# (`saccade bench vision`). Prefill by rows, decode by requests with 1,000 keys each (`saccade bench offline`);
# measured on 2026-11-16, except prefill of 64 rows on 2026-11-15.
H200_QWEN3_VL_8B = StepTimes(
    vision=Curve(((IMAGE_ROWS, 4.37e-3), (8 * IMAGE_ROWS, 24.0e-3), (32 * IMAGE_ROWS, 92.1e-3))),
    prefill=Curve(((64, 5.02e-3), (406, 9.52e-3), (1024, 22.18e-3), (8192, 201.5e-3))),
    decode=Curve(((1, 4.19e-3), (64, 7.95e-3))),
    head_s=0.42e-3,
)
