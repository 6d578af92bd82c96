"""Work for an engine without requests: capturing graphs of frequent image layouts, and checking replays."""

from collections.abc import Callable

from saccade.choice.exact import ExactLayout
from saccade.scheduling.compose import Composer
from saccade.scheduling.executing import Executor, ShadowChecks, WrongReplay
from saccade.scheduling.orders import Capture, Drop
from saccade.scheduling.scheduler import Scheduler


class IdleWork:
    def __init__(
        self, executor: Executor, composer: Composer, scheduler: Scheduler, is_idle: Callable[[], bool]
    ) -> None:
        self._executor, self._vision = executor, composer.vision
        self._scheduler, self._is_idle = scheduler, is_idle
        self.shadow: ShadowChecks | None = None

    @property
    def can_capture(self) -> bool:
        return self._vision is not None and self._vision.catalogue.exact.has_pending

    def capture_next(self) -> Exception | None:
        """Captures one frequent image layout. Returns the error if that fails; requests run without the graph."""
        try:
            if self._vision is not None and (layout := self._vision.catalogue.exact.next_pending()) is not None:
                self.capture(layout)
        except Exception as error:
            self._executor.require_device()
            return error
        return None

    def capture_usual(self) -> None:
        if self._vision is not None:
            for layout in self._vision.usual_layouts():
                self.capture(layout)

    def capture(self, layout: ExactLayout) -> None:
        """Captures a vision graph of one layout, and drops graphs that no longer fit."""
        assert self._vision is not None, "only images have layouts"
        nbytes = self._executor.execute(Capture(layout))
        if dropped := self._vision.catalogue.exact.add(layout.key, nbytes):
            self._executor.execute(Drop(dropped))

    @property
    def can_check(self) -> bool:
        """Whether there is a replay to check, and time for it."""
        return self.shadow is not None and self.shadow.has_records and self._is_idle()

    def check(self, should_stop: Callable[[], bool] = lambda: False) -> WrongReplay | Exception | None:
        """Checks one replay. Returns a wrong replay, or the error that prevented the check. After a wrong replay the
        caches are emptied, because the graph may have written to them."""
        assert self.shadow is not None and self.can_check, "requests run; a check writes where they read"
        found = self.shadow.check(should_stop)
        if isinstance(found, Exception):
            self._executor.require_device()
        elif found is not None:
            self._scheduler.forget_cached()
        return found

    def shadow_counts(self, phase: str) -> dict[str, int]:
        return {} if self.shadow is None else self.shadow.counts(phase)
