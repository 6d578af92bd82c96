"""What a soak found: pure functions from answers and samples to verdicts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from saccade.bench.soak.soak_client import SoakAnswer
from saccade.bench.soak.soak_requests import SoakRequest
from saccade.bench.soak.soak_samples import (
    BUSY,
    ENGINE,
    FILES,
    GPU,
    GPU_PROCESSES,
    GPU_RESERVED,
    JOBS,
    PROCESSES,
    SERVER,
    SOCKETS,
)

MIB = 2**20
JOB_MIB = 48 + 64  # what a process for media may keep between jobs, and what it has when it is new
MOST_SHOWN = 20
LEAST_SAMPLES = 2


@dataclass(frozen=True, slots=True)
class Unexpected:
    index: int
    kind: str
    status: int
    message: str


@dataclass(frozen=True, slots=True)
class ResourceVerdict:
    """`start` is before the first request, if it was told; `first` and `last` are medians of the first and the last
    third of the idle moments after warm-up; `peak` is the largest figure that was seen, under load too. `is_flat` is
    None where it does not count, or there were too few idle moments."""

    name: str
    start: float | None
    first: float
    last: float
    peak: float
    allowance: float
    is_flat: bool | None


@dataclass(slots=True)
class Tally:
    """Answers by kind and outcome. Only the first unexpected ones are kept."""

    answers: dict[str, dict[str, int]] = field(default_factory=dict)
    num_unexpected: int = 0
    unexpected: list[Unexpected] = field(default_factory=list)

    def note(self, request: SoakRequest, answer: SoakAnswer) -> None:
        kinds = self.answers.setdefault(request.kind, {})
        kinds[answer.outcome] = kinds.get(answer.outcome, 0) + 1
        if (why := judge(request, answer)) is not None:
            self.note_unexpected(Unexpected(request.index, request.kind, answer.status, why))

    def note_unexpected(self, one: Unexpected) -> None:
        self.num_unexpected += 1
        if len(self.unexpected) < MOST_SHOWN:
            self.unexpected.append(one)

    @property
    def num_requests(self) -> int:
        return sum(sum(kinds.values()) for kinds in self.answers.values())


def judge(request: SoakRequest, answer: SoakAnswer) -> str | None:
    """Why an answer is not as expected; None if it is. A client that leaves may see nothing, or a reply that begins."""
    if answer.has_left and answer.status == 0:
        return answer.problem or None
    if answer.status not in request.expected:
        allowed = " or ".join(map(str, sorted(request.expected)))
        return f"answered with {answer.status or 'nothing'}, expected {allowed}: {answer.problem}"
    if answer.status == 200 and answer.problem and not answer.has_left:
        return answer.problem
    return None


def allowances(rss_mib: float) -> dict[str, float]:
    """By resource: how much more it may be in the end. What requests hold, and the GPU's memory, may not grow,
    not by a byte."""
    return {
        SERVER: rss_mib * MIB,
        ENGINE: rss_mib * MIB,
        JOBS: 0.0,  # see `judge_resources`
        PROCESSES: 8.0,
        FILES: 8.0,
        SOCKETS: 4.0,
        **dict.fromkeys((*BUSY, GPU_RESERVED, GPU_PROCESSES, GPU), 0.0),
    }


def judge_resources(
    start: Mapping[str, float],
    idle: Sequence[Mapping[str, float]],
    peaks: Mapping[str, float],
    rss_mib: float,
    *,
    is_gpu_shared: bool = False,
) -> list[ResourceVerdict]:
    """`start` are the figures before the first request, `idle` those of the idle moments after warm-up. Resources that
    the server does not tell are left out; those that requests hold must be 0 in every idle moment. What is in use on a
    device that others use does not count."""
    found = []
    for name, allowance in allowances(rss_mib).items():
        values = [figures[name] for figures in idle if name in figures]
        if not values:
            continue
        if name == JOBS:  # each may keep some memory, and there may be more of them than at first
            allowance = JOB_MIB * MIB * max(figures.get(PROCESSES, 0.0) for figures in idle)
        peak = max(peaks.get(name, 0.0), *values)
        counts = len(values) >= LEAST_SAMPLES and not (name == GPU and is_gpu_shared)
        first, last = _ends(values)
        is_flat = last - first <= allowance and not (name in BUSY and any(values))
        verdict = ResourceVerdict(name, start.get(name), first, last, peak, allowance, is_flat if counts else None)
        found.append(verdict)
    return found


def _ends(values: Sequence[float]) -> tuple[float, float]:
    third = max(1, len(values) // 3)
    return median(values[:third]), median(values[-third:])


def shown(name: str, value: float) -> str:
    if name in (GPU, GPU_RESERVED, GPU_PROCESSES):
        return f"{value:,.0f} bytes"
    return f"{value / MIB:.1f} MiB" if name.startswith("RSS") else f"{value:g}"
