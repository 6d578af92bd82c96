"""Runs the vision passes of a step and attributes errors to single requests."""

from collections.abc import Callable, Mapping

from saccade.scheduling import executing
from saccade.scheduling.arrays import LiveRequest
from saccade.scheduling.compose import Composer
from saccade.scheduling.executing import Encoded, Executor
from saccade.scheduling.pass_log import PassLog
from saccade.scheduling.step_plan import StepPlan


class MediaEncoder:
    def __init__(self, executor: Executor, composer: Composer, passes: PassLog, clock: Callable[[], float]) -> None:
        self._executor, self._vision = executor, composer.vision
        self._passes, self._clock = passes, clock

    def encode(self, plan: StepPlan, live: Mapping[str, LiveRequest]) -> dict[str, str]:
        """Encodes a plan's images. If a pass fails, its parts are run one by one to find the culprit. Returns errors by
        the request that an item was encoded for; other requests are not affected."""
        assert self._vision is not None, "this model sees no images"
        media = [live[item.request_id].prompt.media[item.media_idx] for item in plan.encode]
        failed: dict[str, str] = {}
        waiting = self._vision.shares(media)
        while waiting:
            shares = waiting.pop(0)
            parts = [part for share in shares for part in share]
            try:
                orders = self._vision.encode(plan.step, shares, plan.encode, media)
            except Exception as error:
                encoded = Encoded(executing.problem(error, executing.ENCODE_FAILED))
            else:
                start = self._clock()
                encoded = self._executor.execute(orders)
            if encoded.lap is not None:  # requests that share a pass share its time
                names = {plan.encode[part.item].request_id for part in parts}
                self._passes.add("vision", [orders.vision], names, start, encoded.lap)
                for request_id in names:
                    live[request_id].laps.append(encoded.lap)
            if encoded.problem is not None and len(parts) > 1:
                waiting[:0] = [[[part], *([] for _ in shares[1:])] for part in parts]
            elif encoded.problem is not None:
                failed[plan.encode[parts[0].item].request_id] = encoded.problem
        return failed
