"""Loads in virtual time: the real scheduler and pace, with a simulated H200 and front end.

`python -m tests.scheduling.paced_loads [name ...]` prints requests/s, time to first token and time between tokens,
first without a limit on steps and then paced, next to the figures that docs/log.md has for the same load without a
limit. Each name selects the loads whose names contain it.
"""

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np

from saccade.cache.blocks import BlockPool
from saccade.cache.encoder import EncoderIndex
from saccade.cache.prefix import Span
from saccade.scheduling.request import Request
from saccade.scheduling.scheduler import Scheduler
from saccade.scheduling.step_plan import StepPlan
from saccade.wire.sampling_params import SamplingParams
from tests.scheduling.simulated_h200 import LIMITS, REST_MS, FrontEnd, measured_pace, step_ms

HEAD_TOKENS, TEMPLATE_TOKENS = 4, 12  # of the chat template: before an image, and in total
PATCH_PIXELS = 32  # side of the square that becomes a row
HOST_MS = 0.3  # from the end of a step to the next plan
SEEDS = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests of one kind: range of text tokens, number of outputs, and image sizes to choose from."""

    text: tuple[int, int]
    outputs: int
    sizes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """Either `concurrency` requests at a time, each sent when another one ends, or `rate` requests per second at random
    times. With two kinds, `share` of the requests are of the second."""

    name: str
    kinds: tuple[Kind, ...]
    num_requests: int
    concurrency: int = 0
    rate: float = 0.0
    share: float = 0.0


FIVE_SIZES = ((224, 224), (448, 336), (640, 480), (720, 1280), (1024, 1024))
ONE_IMAGE, LONG_ANSWER = Kind((12, 128), 1, ((560, 560),)), Kind((128, 128), 128, ((560, 560),))
TEXT, LARGE_IMAGE = Kind((512, 512), 128), Kind((128, 128), 32, ((1080, 1920),))
USUAL = (  # `saccade bench serve --loads usual`
    Load("560x560, 1 out, 32", (ONE_IMAGE,), 256, 32),
    Load("five sizes, 1 out, 32", (Kind((12, 128), 1, FIVE_SIZES),), 256, 32),
    Load("560x560, 1 out, 1", (ONE_IMAGE,), 40, 1),
    Load("560x560, 128 out, 32", (LONG_ANSWER,), 128, 32),
    Load("text 512, 128 out, 64", (TEXT,), 256, 64),
    Load("1920x1080, 32 out, 16", (LARGE_IMAGE,), 96, 16),
)
MEASURED = {  # without a limit on steps: requests/s, time to first token, its p99, time per token, its p99
    "560x560, 1 out, 32": (81.7, 378, 436, 0, 0),
    "five sizes, 1 out, 32": (58.5, 529, 855, 0, 0),
    "560x560, 1 out, 1": (41.7, 23.7, 26.1, 0, 0),
    "560x560, 128 out, 32": (27.2, 323, 491, 6.70, 24.3),
    "text 512, 128 out, 64": (38.7, 436, 786, 9.55, 172),
    "1920x1080, 32 out, 16": (10.3, 886, 1404, 21.4, 307),
}
CHAT, PICTURE = Kind((50, 800), 150), Kind((12, 128), 100, FIVE_SIZES)
CAPACITIES = (  # requests/s, about
    ("chats", (CHAT,), 43, 0.0),
    ("pictures", (PICTURE,), 27, 0.0),
    ("560x560, 128 out", (LONG_ANSWER,), 31, 0.0),
    ("1920x1080, 32 out", (LARGE_IMAGE,), 10.2, 0.0),
    ("text 4000, 32 out", (Kind((4000, 4000), 32),), 9.5, 0.0),
    ("chats, 5 % of 32k", (CHAT, Kind((32_000, 32_000), 100)), 10, 0.05),
    ("chats, 10 % of 3840x2160", (CHAT, Kind((64, 64), 100, ((2160, 3840),))), 13, 0.1),
)
AT_RANDOM = tuple(
    Load(f"{name}, at random {busy:.0%}", kinds, 300, rate=busy * most, share=share)
    for name, kinds, most, share in CAPACITIES
    for busy in (0.7, 0.9)
)


@dataclass(frozen=True, slots=True)
class Figures:
    requests_per_s: float
    ttft_ms: float
    ttft_p99_ms: float
    tpot_ms: float
    p99_ms: float
    longest_ms: float = 0.0

    def __str__(self) -> str:
        first = f"TTFT {self.ttft_ms:6.1f} ms, p99 {self.ttft_p99_ms:6.1f}"
        between = f"{self.tpot_ms:6.2f} ms a token, p99 {self.p99_ms:6.1f}, longest {self.longest_ms:6.1f}"
        return f"{self.requests_per_s:5.1f} requests/s, {first}, {between}"


class Simulation:
    """Like `Engine.step`, it plans one step ahead and then waits for the oldest step."""

    def __init__(self, load: Load, max_step_ms: float, seed: int = 0) -> None:
        self._load, self._device_free_at = load, 0.0
        pool, encoder = BlockPool(6000, 128), EncoderIndex(16_384, 16, keeps_idle=False)
        self._scheduler = Scheduler(LIMITS, pool=pool, encoder=encoder)
        self._scheduler.pace = measured_pace(max_step_ms) if max_step_ms < inf else None
        self._random, self._front_end = np.random.default_rng(seed), FrontEnd()
        self.requests: list[Request] = []
        self._sent: list[float] = []
        self._tokens: list[list[float]] = []
        at = 0.0
        for _ in range(load.concurrency or load.num_requests):
            at += float(self._random.exponential(1e3 / load.rate)) if load.rate else 0.0
            self._send(at)

    def run(self) -> "Simulation":
        flights: deque[tuple[StepPlan, float]] = deque()  # with their ends
        now = 0.0
        while now < inf:
            for number in self._front_end.arrived(now):
                self.requests[number].arrival = now / 1e3
                self._scheduler.add(self.requests[number])
            plan = self._scheduler.plan(now / 1e3)
            if plan.chunks:
                self._device_free_at = max(self._device_free_at, now) + step_ms(plan)
                flights.append((plan, self._device_free_at))
            elif len(flights) == 1 and self._front_end.next_at() < flights[0][1]:
                now = self._front_end.next_at()  # launched behind the step that runs
                continue
            if flights and (not plan.chunks or len(flights) > 1):
                now = self._collect(*flights.popleft())
            elif not flights:
                now = self._front_end.next_at()
        return self

    @property
    def waits(self) -> list[float]:
        """Time to first token of each request."""
        return [times[0] - at for at, times in zip(self._sent, self._tokens, strict=True)]

    @property
    def gaps(self) -> list[float]:
        return [after - before for times in self._tokens for before, after in pairwise(times)]

    @property
    def seconds(self) -> float:
        return max(times[-1] for times in self._tokens) / 1e3

    def _send(self, at: float) -> None:
        number = len(self.requests)
        if number == self._load.num_requests:
            return
        kind = self._load.kinds[int(self._random.random() < self._load.share)]
        height, width = kind.sizes[self._random.integers(len(kind.sizes))] if kind.sizes else (0, 0)
        num_text = TEMPLATE_TOKENS + int(self._random.integers(kind.text[0], kind.text[1] + 1))
        num_rows = round(height / PATCH_PIXELS) * round(width / PATCH_PIXELS)
        request = Request(
            id=str(number),
            prompt_ids=(1,) * (num_text + num_rows),
            params=SamplingParams(temperature=0, max_tokens=kind.outputs, ignore_eos=True),
            spans=(Span(HEAD_TOKENS, num_rows, number.to_bytes(16, "little")),) if num_rows else (),
        )
        self.requests.append(request)
        self._sent.append(at)
        self._tokens.append([])
        self._front_end.send(at, number, height * width)

    def _collect(self, plan: StepPlan, now: float) -> float:
        """Commits a step and returns the time of the next plan."""
        results = {chunk.request_id: (1,) for chunk in plan.chunks if chunk.wants_logits}
        self._front_end.stream(now, len(results))
        for update in self._scheduler.commit(plan, results):
            self._tokens[int(update.request_id)].append(now + REST_MS)
            if update.finish is not None and self._load.concurrency:
                self._send(now + REST_MS)
        return now + HOST_MS


def simulate(load: Load, max_step_ms: float, seeds: Sequence[int] = SEEDS) -> Figures:
    """Figures of several runs. Percentiles are over the requests and tokens of all of them."""
    runs = [Simulation(load, max_step_ms, seed).run() for seed in seeds]
    waits, gaps = (np.concatenate([getattr(run, name) for run in runs]) for name in ("waits", "gaps"))
    gaps = gaps if gaps.size else np.zeros(1)
    return Figures(
        requests_per_s=len(waits) / sum(run.seconds for run in runs),
        ttft_ms=float(waits.mean()),
        ttft_p99_ms=float(np.percentile(waits, 99)),
        tpot_ms=float(gaps.mean()),
        p99_ms=float(np.percentile(gaps, 99)),
        longest_ms=float(gaps.max()),
    )


def main(names: Sequence[str]) -> None:
    for load in (*USUAL, *AT_RANDOM):
        if any(name in load.name for name in names or ("",)):
            print(load.name)
            if load.name in MEASURED:
                print(f"{'measured':>10}: {Figures(*MEASURED[load.name])}")
            for limit_ms, name in ((inf, "no limit"), (0, "paced")):
                print(f"{name:>10}: {simulate(load, limit_ms)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
