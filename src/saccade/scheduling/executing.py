"""What an engine needs of whatever executes its orders: one executor, or the first of several ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, overload

from saccade.errors import SaccadeError
from saccade.scheduling.orders import Begin, Calibrate, Capture, Drop, Encode, Run, SampleTokens, WarmUp
from saccade.wire.update import Scores

ENCODE_FAILED = "an image or video could not be encoded"
STEP_FAILED = "the step failed"


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave. Tokens, and whether their logits were no numbers, by sampled row; scores by row; scores of
    prompts in the order of the orders."""

    token_ids: Sequence[int] = ()
    is_bad: Sequence[bool] = ()
    scores: Mapping[int, Scores] = field(default_factory=dict)
    prompt_scores: Sequence[Scores] = ()


class Ticket(Protocol):
    """A step on its way. `wait` is the one place where the host waits for the device."""

    def wait(self) -> StepResult: ...


class Lap(Protocol):
    """A vision pass on its way."""

    def seconds(self) -> float | None:
        """How long it took; None while it runs."""
        ...


@dataclass(frozen=True, slots=True)
class Encoded:
    """What became of a vision pass: why it was not launched, or how long it takes."""

    problem: str | None = None
    lap: Lap | None = None


class WrongReplay(Protocol):
    """A replay that gave something else than an eager run of the same inputs."""

    @property
    def reason(self) -> str:
        """A sentence that anybody may see."""
        ...


class ShadowChecks(Protocol):
    """Replays of live requests that are run again when there is time."""

    @property
    def has_records(self) -> bool: ...

    def check(self, should_stop: Callable[[], bool]) -> WrongReplay | Exception | None:
        """Check one. Returns what was found wrong, or what kept it from being found out."""
        ...

    def counts(self, phase: str) -> dict[str, int]: ...

    def close(self) -> None:
        """Watch no longer, and let go of the executor."""
        ...


def problem(error: Exception, what: str) -> str:
    """What an error means to the request that it ends."""
    return str(error) if isinstance(error, SaccadeError) else f"{what}: {type(error).__name__}"


class Executor(Protocol):
    """Obeys, in the order of the calls."""

    @overload
    def execute(self, orders: Run) -> Ticket: ...

    @overload
    def execute(self, orders: Encode) -> Encoded: ...

    @overload
    def execute(self, orders: Capture) -> int:
        """The bytes that the graph added."""

    @overload
    def execute(self, orders: Begin | SampleTokens | Drop | Calibrate | WarmUp) -> None:
        """`SampleTokens` is of the newest run, whose ticket has the results."""

    def snapshots(self) -> dict[str, dict[str, Any]]:
        """Counters and graphs of each phase, by its name."""
        ...

    def require_device(self) -> None:
        """After an error: raises an EngineDeadError if the device does not go on."""
        ...
