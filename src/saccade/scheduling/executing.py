"""What the engine needs from an executor, be it the only one or the first of several ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from saccade.errors import SaccadeError
from saccade.scheduling.orders import (
    Begin,
    Calibrate,
    Capture,
    Drop,
    Encode,
    EncodeMore,
    GraphCheck,
    Run,
    SampleTokens,
    WarmUp,
)
from saccade.wire.trace_records import TracedPass
from saccade.wire.update import Scores

ENCODE_FAILED = "an image or video could not be encoded"
STEP_FAILED = "the step failed"


@dataclass(frozen=True, slots=True)
class StepResult:
    """By sampled row: tokens, whether the logits were NaN or all -inf, scores. In the sequence of the orders: prompt
    scores, sums of hidden states, picked logits."""

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
        """Whether the device has finished it. Does not wait."""
        ...

    def wait(self) -> StepResult: ...


class Lap(Protocol):
    """Timing of a vision pass."""

    def seconds(self) -> float | None:
        """None while it runs."""
        ...


@dataclass(frozen=True, slots=True)
class Encoded:
    """The timing of a vision pass, or the reason why it was not launched."""

    problem: str | None = None
    lap: Lap | None = None


class WrongReplay(Protocol):
    """A replay whose results differ from those of an eager run on the same inputs."""

    @property
    def reason(self) -> str:
        """A sentence that clients may see."""
        ...


class ShadowChecks(Protocol):
    """Replays of real requests, recorded to be checked when the engine is idle."""

    @property
    def has_records(self) -> bool: ...

    def check(self, should_stop: Callable[[], bool]) -> WrongReplay | Exception | None:
        """Checks one replay. Returns it if it was wrong, or the error that prevented the check."""
        ...

    def counts(self, phase: str) -> dict[str, int]: ...

    def close(self) -> None:
        """Stops recording and releases the executor."""
        ...


def problem(error: Exception, what: str) -> str:
    """The error text for a request that ends because of `error`."""
    return str(error) if isinstance(error, SaccadeError) else f"{what}: {type(error).__name__}"


class Executor(Protocol):
    """Executes orders in the sequence of the calls."""

    @overload
    def execute(self, orders: Run) -> Ticket: ...

    @overload
    def execute(self, orders: Encode | EncodeMore) -> Encoded: ...

    @overload
    def execute(self, orders: Capture) -> int:
        """Returns the bytes that the graph added."""

    @overload
    def execute(self, orders: Begin | SampleTokens | Drop | Calibrate | WarmUp) -> None:
        """`SampleTokens` belongs to the newest `Run`, whose ticket has the results."""

    @overload
    def execute(self, orders: GraphCheck) -> Any:
        """Returns what `execution.check_orders` found, on all ranks."""

    def snapshots(self) -> dict[str, dict[str, Any]]:
        """Counters and graphs by phase."""
        ...

    def time_passes(self) -> None:
        """Times every pass until `take_passes`. If passes are being timed already, starts over."""
        ...

    def take_passes(self) -> tuple[list[TracedPass], int]:
        """Returns the passes that have ended since `time_passes`, and how many more did not fit."""
        ...

    def require_device(self) -> None:
        """Called after an error. Raises an EngineDeadError if the device cannot continue."""
        ...
