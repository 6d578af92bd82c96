"""Runs the vision passes of a step and attributes errors to single requests."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from saccade.scheduling import executing
from saccade.scheduling.arrays import LiveRequest
from saccade.scheduling.compose import Composer
from saccade.scheduling.executing import Encoded, Executor
from saccade.scheduling.orders import Encode, EncodeMore
from saccade.scheduling.pass_log import PassLog
from saccade.scheduling.step_plan import EncodeItem, StepPlan

Live = Mapping[str, LiveRequest]


@dataclass(slots=True)
class DividedMedia:
    """The passes of a request's item, for a video perhaps several, and how many parts of all of them have run."""

    request_id: str = ""
    passes: list[tuple[Encode, int]] = field(default_factory=list)  # with the number of their parts
    num_done: int = 0
    problem: str | None = None

    def take(self, step: int, item: EncodeItem) -> list[tuple[Encode, Encode | EncodeMore]]:
        """The passes and orders for the parts that an item of a plan asks for."""
        end = sum(count for _, count in self.passes) * item.end_part // item.num_parts
        found: list[tuple[Encode, Encode | EncodeMore]] = []
        start = 0
        for one, count in self.passes:
            done, until = (min(max(n - start, 0), count) for n in (self.num_done, end))
            if done < until:
                more = EncodeMore(step, one.vision.decision, until, count)
                found.append((one, more if done else Encode(step, one.vision, one.others, until, count)))
            start += count
        self.num_done = end
        return found


class MediaEncoder:
    def __init__(self, executor: Executor, composer: Composer, passes: PassLog, clock: Callable[[], float]) -> None:
        self._executor, self._vision = executor, composer.vision
        self._passes, self._clock = passes, clock
        self._divided = DividedMedia()

    def encode(self, plan: StepPlan, live: Live) -> dict[str, str]:
        """Encodes a plan's images. Returns errors by the request that an item was encoded for; other requests are not
        affected."""
        failed: dict[str, str] = {}
        for item in plan.encode:  # what was begun goes first: another pass would overwrite its buffers
            if item.first_part > 0:
                failed |= self._encode_parts(plan.step, item, live)
        whole = [item for item in plan.encode if item.num_parts == 1]
        failed |= self._encode_whole(plan.step, whole, live) if whole else {}
        for item in plan.encode:
            if item.num_parts > 1 and item.first_part == 0:
                failed |= self._encode_parts(plan.step, item, live)
        return failed

    def _encode_whole(self, step: int, items: list[EncodeItem], live: Live) -> dict[str, str]:
        """If a pass fails, its parts are run one by one to find the culprit."""
        assert self._vision is not None, "this model sees no images"
        media = [live[item.request_id].prompt.media[item.media_idx] for item in items]
        failed: dict[str, str] = {}
        waiting = self._vision.shares(media)
        while waiting:
            shares = waiting.pop(0)
            parts = [part for share in shares for part in share]
            try:
                orders = self._vision.encode(step, shares, items, media)
            except Exception as error:
                problem: str | None = executing.problem(error, executing.ENCODE_FAILED)
            else:
                problem = self._execute(orders, orders, {items[part.item].request_id for part in parts}, live)
            if problem is not None and len(parts) > 1:
                waiting[:0] = [[[part], *([] for _ in shares[1:])] for part in parts]
            elif problem is not None:
                failed[items[parts[0].item].request_id] = problem
        return failed

    def _encode_parts(self, step: int, item: EncodeItem, live: Live) -> dict[str, str]:
        """An error is reported with the last part, because only then the plan has rows of the request. If the step with
        the first parts failed before it got to them, they run now."""
        if item.first_part == 0 or self._divided.request_id != item.request_id:
            self._divided = self._divide(step, item, live)
        divided = self._divided
        for one, orders in divided.take(step, item) if divided.problem is None else ():
            divided.problem = self._execute(orders, one, {item.request_id}, live)
            if divided.problem is not None:
                break
        if not item.is_last:
            return {}
        self._divided = DividedMedia()
        return {} if divided.problem is None else {item.request_id: divided.problem}

    def forget(self, request_id: str) -> None:
        """Drops what is left to encode for a request that ended or was preempted."""
        if self._divided.request_id == request_id:
            self._divided = DividedMedia()

    def _divide(self, step: int, item: EncodeItem, live: Live) -> DividedMedia:
        assert self._vision is not None, "this model sees no images"
        media = [live[item.request_id].prompt.media[item.media_idx]]
        try:
            passes = [self._vision.encode(step, shares, [item], media) for shares in self._vision.shares(media)]
            return DividedMedia(item.request_id, [(one, self._vision.num_parts(one.vision.decision)) for one in passes])
        except Exception as error:
            return DividedMedia(item.request_id, problem=executing.problem(error, executing.ENCODE_FAILED))

    def _execute(self, orders: Encode | EncodeMore, one: Encode, names: Collection[str], live: Live) -> str | None:
        """Returns the reason if the pass failed. Requests that share a pass share its time."""
        start = self._clock()
        encoded: Encoded = self._executor.execute(orders)
        if encoded.lap is not None:
            self._passes.add("vision", [one.vision], names, start, encoded.lap, is_counted=isinstance(orders, Encode))
            for request_id in names:
                live[request_id].laps.append(encoded.lap)
        return encoded.problem
