"""What the engine needs from an executor: a single one, or the first of several ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from saccade.errors import SaccadeError
from saccade.scheduling.orders import Begin, Calibrate, Capture, Drop, Encode, Run, SampleTokens, WarmUp
from saccade.wire.trace_records import TracedPass
from saccade.wire.update import Scores

ENCODE_FAILED = "an image or video could not be encoded"
STEP_FAILED = "the step failed"


@dataclass(frozen=True, slots=True)
class StepResult:
    """By sampled row: tokens, whether logits were NaN or all -inf, scores. In order of the orders: prompt scores, sums
    of hidden states, single logits."""

    token_ids: Sequence[int] = ()
    is_bad: Sequence[bool] = ()
    scores: Mapping[int, Scores] = field(default_factory=dict)
    prompt_scores: Sequence[Scores] = ()
    sums: Sequence[NDArray[np.float32]] = ()
    picked: Sequence[NDArray[np.float32]] = ()


class Ticket(Protocol):
    """A step in flight. `wait` is the only place where the host waits for the device."""

    @property
    def is_done(self) -> bool:
        """Whether the device has finished it; does not wait."""
        ...

    def wait(self) -> StepResult: ...


class Lap(Protocol):
    """Timing of a vision pass."""

    def seconds(self) -> float | None:
        """None while it runs."""
        ...


@dataclass(frozen=True, slots=True)
class Encoded:
    """Why a vision pass was not launched, or its timing."""

    problem: str | None = None
    lap: Lap | None = None


class WrongReplay(Protocol):
    """A replay whose results differ from an eager run of the same inputs."""

    @property
    def reason(self) -> str:
        """A sentence that clients may see."""
        ...


class ShadowChecks(Protocol):
    """Replays of live requests that are checked when there is time."""

    @property
    def has_records(self) -> bool: ...

    def check(self, should_stop: Callable[[], bool]) -> WrongReplay | Exception | None:
        """Check one. Returns what was wrong, or the error that prevented the check."""
        ...

    def counts(self, phase: str) -> dict[str, int]: ...

    def close(self) -> None:
        """Stop watching and release the executor."""
        ...


def problem(error: Exception, what: str) -> str:
    """The error text for the request that it ends."""
    return str(error) if isinstance(error, SaccadeError) else f"{what}: {type(error).__name__}"


class Executor(Protocol):
    """Executes orders in the order of the calls."""

    @overload
    def execute(self, orders: Run) -> Ticket: ...

    @overload
    def execute(self, orders: Encode) -> Encoded: ...

    @overload
    def execute(self, orders: Capture) -> int:
        """Returns the bytes that the graph added."""

    @overload
    def execute(self, orders: Begin | SampleTokens | Drop | Calibrate | WarmUp) -> None:
        """`SampleTokens` belongs to the newest run, whose ticket has the results."""

    def snapshots(self) -> dict[str, dict[str, Any]]:
        """Counters and graphs by phase."""
        ...

    def time_passes(self) -> None:
        """Time every pass until `take_passes`, beginning anew if they are timed already."""
        ...

    def take_passes(self) -> tuple[list[TracedPass], int]:
        """Passes that have ended since `time_passes`, and how many more did not fit."""
        ...

    def require_device(self) -> None:
        """After an error: raises an EngineDeadError if the device cannot continue."""
        ...
