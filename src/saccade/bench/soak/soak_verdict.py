"""The report of a soak, and its verdicts: pure functions of answers and samples."""

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
JOB_MIB = 48 + 64  # what a media process may keep between jobs, and its size when new
MAX_SHOWN = 20
MIN_SAMPLES = 2


@dataclass(frozen=True, slots=True)
class Unexpected:
    index: int
    kind: str
    status: int
    message: str


@dataclass(frozen=True, slots=True)
class ResourceVerdict:
    """`start` is the figure before the first request, if known. `first` and `last` are medians of the first and last
    third of the idle moments after warm-up. `peak` is the largest figure seen, also under load. `is_flat` is None if
    the resource does not count, or if there were too few idle moments."""

    name: str
    start: float | None
    first: float
    last: float
    peak: float
    allowance: float
    is_flat: bool | None


@dataclass(slots=True, kw_only=True)
class SoakReport:
    """What was found so far. `answers` counts them by kind and outcome; `unexpected` has the first few."""

    seed: int
    model: str
    seconds: float = 0.0
    is_interrupted: bool = False
    requests: int = 0
    answers: dict[str, dict[str, int]] = field(default_factory=dict)
    image_sizes: int = 0
    num_unexpected: int = 0
    unexpected: list[Unexpected] = field(default_factory=list)
    resources: list[ResourceVerdict] = field(default_factory=list)
    idle_moments: int = 0
    health_median_ms: float = 0.0
    health_largest_ms: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        are_flat = all(resource.is_flat is not False for resource in self.resources)
        return are_flat and not self.num_unexpected and not self.problems

    def note(self, request: SoakRequest, answer: SoakAnswer) -> None:
        self.requests += 1
        kinds = self.answers.setdefault(request.kind, {})
        kinds[answer.outcome] = kinds.get(answer.outcome, 0) + 1
        if (why := judge(request, answer)) is not None:
            self.note_unexpected(Unexpected(request.index, request.kind, answer.status, why))

    def note_unexpected(self, one: Unexpected) -> None:
        self.num_unexpected += 1
        if len(self.unexpected) < MAX_SHOWN:
            self.unexpected.append(one)


def judge(request: SoakRequest, answer: SoakAnswer) -> str | None:
    """Says why an answer is unexpected; None if it is not. A client that leaves may see no reply, or part of one."""
    if answer.has_left and answer.status == 0:
        return answer.problem or None
    if answer.status not in request.expected:
        allowed = " or ".join(map(str, sorted(request.expected)))
        return f"answered with {answer.status or 'nothing'}, expected {allowed}: {answer.problem}"
    if answer.status == 200 and answer.problem and not answer.has_left:
        return answer.problem
    return None


def allowances(rss_mib: float) -> dict[str, float]:
    """How much each resource may grow. What requests hold, and GPU memory, may not grow by a single byte."""
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
    """Judges each resource from the figures before the first request (`start`) and at the idle moments after warm-up
    (`idle`). Unknown resources are left out. Resources that requests hold must be 0 at every idle moment. On a shared
    GPU, the memory of the whole device does not count."""
    found = []
    for name, allowance in allowances(rss_mib).items():
        values = [figures[name] for figures in idle if name in figures]
        if not values:
            continue
        if name == JOBS:  # each may keep some memory, and their number may have grown
            allowance = JOB_MIB * MIB * max(figures.get(PROCESSES, 0.0) for figures in idle)
        peak = max(peaks.get(name, 0.0), *values)
        counts = len(values) >= MIN_SAMPLES and not (name == GPU and is_gpu_shared)
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
