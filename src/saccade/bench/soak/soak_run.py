"""`saccade bench soak`: puts mixed and hostile load on a server, and checks at idle moments that nothing leaks."""

import asyncio
import signal
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from statistics import median
from threading import current_thread, main_thread
from time import monotonic, perf_counter

import orjson

from saccade.bench.load.client import ASK_S, Client
from saccade.bench.load.load_settings import TargetSettings
from saccade.bench.soak.soak_client import send
from saccade.bench.soak.soak_files import image_sizes
from saccade.bench.soak.soak_requests import SoakTarget, make_request
from saccade.bench.soak.soak_samples import BUSY, FILES, is_idle, metric_figures, process_figures
from saccade.bench.soak.soak_settings import WARM_UP, SoakSettings
from saccade.bench.soak.soak_verdict import SoakReport, Unexpected, judge_resources
from saccade.errors import ConfigError

HEALTH_S = 0.2  # between two probes
IDLE_S = 120.0  # a server without load must be idle within this time
SETTLE_S = 0.3  # for sockets to close, and processes to be replaced
POLL_S = 0.05
MAX_UNEXPECTED = 100  # more end the soak
LATENCIES = 10_000  # kept for the median
DEFAULT_LEN = 1024


class Soak:
    """One run against one server. `pid` is the server's process, if it is on this machine."""

    def __init__(self, url: str, settings: SoakSettings, pid: int | None, say: Callable[[str], None]) -> None:
        self._settings, self._pid, self._say = settings, pid, say
        key, timeout_s = settings.api_key, settings.request_timeout_s
        self._target = TargetSettings(base_url=url, api_key=key, request_timeout_s=timeout_s)
        self._report = SoakReport(seed=settings.seed, model="")
        self._indices = count()
        self._sizes: set[tuple[int, int]] = set()
        self._start: dict[str, float] = {}
        self._idle: list[dict[str, float]] = []
        self._idle_at: list[float] = []
        self._peaks: dict[str, float] = {}
        self._latencies: deque[float] = deque(maxlen=LATENCIES)
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Ends the run with the report so far, as Ctrl-C does."""
        self._stop.set()

    async def run(self) -> SoakReport:
        """Runs until the time is up, a problem is found, or Ctrl-C."""
        async with Client(self._target) as watcher:
            return await self._run(watcher)

    async def _run(self, watcher: Client) -> SoakReport:
        target = await self._describe(watcher)
        self._report.model = target.model
        loop = asyncio.get_running_loop()
        hears_signals = current_thread() is main_thread()
        if hears_signals:
            loop.add_signal_handler(signal.SIGINT, self.stop)
        self._start = await self._figures(watcher)
        self._begun = monotonic()
        watching = [asyncio.create_task(self._probe(watcher)), asyncio.create_task(self._look())]
        try:
            while self._left_s() > 0 and not self._is_over():
                await self._load(target)
                await self._rest(watcher)
        finally:
            if hears_signals:
                loop.remove_signal_handler(signal.SIGINT)
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
        self._finish()
        return self._report

    def _left_s(self) -> float:
        return self._begun + self._settings.seconds - monotonic()

    def _is_over(self) -> bool:
        return self._stop.is_set() or bool(self._report.problems) or self._report.num_unexpected > MAX_UNEXPECTED

    async def _describe(self, watcher: Client) -> SoakTarget:
        try:
            status, body = await watcher.ask("GET", "/v1/models")
            [card, *_] = orjson.loads(body)["data"]
            told = card.get("capabilities")
        except (OSError, TimeoutError, ValueError, LookupError, TypeError, AttributeError):
            raise ConfigError(
                f"{self._target.url} does not answer /v1/models like an OpenAI server (--url, --api-key)"
            ) from None
        if status != 200:
            raise ConfigError(f"/v1/models was answered with {status} (--api-key)")
        has_images = told is None or "multimodal" in told
        sizes = image_sizes(self._settings.image_sizes, self._settings.seed)
        return SoakTarget(str(card["id"]), has_images, card.get("max_model_len") or DEFAULT_LEN, sizes)

    async def _load(self, target: SoakTarget) -> None:
        """Sends requests until the end of the cycle, and waits for their answers."""
        end = monotonic() + min(self._settings.cycle_s, self._left_s())
        workers = [asyncio.create_task(self._work(target, end)) for _ in range(self._settings.concurrency)]
        stop = asyncio.create_task(self._stop.wait())
        try:
            pending: set[asyncio.Task[None]] = set(workers)
            while pending and not self._is_over():
                _, rest = await asyncio.wait({*pending, stop}, return_when=asyncio.FIRST_COMPLETED)
                pending &= rest
        finally:
            for task in (*workers, stop):
                task.cancel()
            results = await asyncio.gather(*workers, stop, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _work(self, target: SoakTarget, end: float) -> None:
        async with Client(self._target) as client:
            while monotonic() < end and not self._is_over():
                index = next(self._indices)
                request = await asyncio.to_thread(make_request, self._settings.seed, index, target)
                self._sizes.update(request.sizes)
                self._report.note(request, await send(client, request))

    async def _rest(self, watcher: Client) -> None:
        """Waits until the server is idle, and records its resources."""
        deadline = monotonic() + IDLE_S
        figures = await self._figures(watcher)
        while not self._is_idle(figures) and not self._stop.is_set():
            if monotonic() > deadline:
                held = ", ".join(f"{name} {figures.get(name, 'unknown')}" for name in BUSY if figures.get(name) != 0)
                self._report.problems.append(f"the server is not idle {IDLE_S:g} s after the last request: {held}")
                return
            await asyncio.sleep(POLL_S)
            figures = await self._figures(watcher)
        if self._stop.is_set():
            return
        await asyncio.sleep(SETTLE_S)
        self._idle.append(await self._figures(watcher))
        self._idle_at.append(monotonic() - self._begun)
        self._say(self._progress())

    def _is_idle(self, figures: dict[str, float]) -> bool:
        """A server that is too busy to report its load is not idle."""
        return is_idle(figures) and all(name in figures for name in BUSY if name in self._peaks)

    async def _figures(self, client: Client) -> dict[str, float]:
        """Reads the current figures, without those that are unavailable."""
        found = {} if self._pid is None else await asyncio.to_thread(process_figures, self._pid)
        with suppress(OSError, TimeoutError, ValueError):
            status, body = await client.ask("GET", "/metrics")
            if status == 200:
                found |= await asyncio.to_thread(metric_figures, body.decode())
        for name, value in found.items():
            self._peaks[name] = max(value, self._peaks.get(name, value))
        return found

    async def _look(self) -> None:
        """Reads figures under load, for the peaks. Closes its connection, which would count at idle moments."""
        while True:
            await asyncio.sleep(self._settings.look_s)
            async with Client(self._target) as looker:
                await self._figures(looker)

    async def _probe(self, watcher: Client) -> None:
        """Asks for /health all the time. It must answer, whatever the load."""
        while True:
            begun = perf_counter()
            try:
                status, body = await watcher.ask("GET", "/health")
                problem = "" if status == 200 else body.decode("utf-8", "replace")[:200]
            except OSError as error:
                status, problem = 0, f"{type(error).__name__}: {str(error) or f'no answer within {ASK_S:g} s'}"
            seconds = perf_counter() - begun
            if problem:
                self._report.note_unexpected(Unexpected(-1, "GET /health", status, problem))
            else:
                self._latencies.append(seconds)
                self._report.health_largest_ms = max(self._report.health_largest_ms, 1e3 * seconds)
            await asyncio.sleep(HEALTH_S)

    def _progress(self) -> str:
        figures, report = self._idle[-1], self._report
        memory = sum(value for name, value in figures.items() if name.startswith("RSS")) / 2**20
        held = f"{memory:.0f} MiB, " if memory else ""
        files = f"{figures[FILES]:g} files, " if FILES in figures else ""
        return (
            f"{max(0.0, self._left_s()) / 60:.1f} minutes left: {report.requests} requests, "
            f"{report.num_unexpected} unexpected, {held}{files}/health {report.health_largest_ms:.0f} ms at most"
        )

    def _finish(self) -> None:
        report, settings = self._report, self._settings
        report.seconds = monotonic() - self._begun
        report.is_interrupted = self._stop.is_set()
        report.image_sizes = len(self._sizes)
        warm_s = WARM_UP * min(report.seconds, settings.seconds)
        warm = [figures for figures, at_s in zip(self._idle, self._idle_at, strict=True) if at_s >= warm_s]
        report.idle_moments = len(warm)
        report.resources = judge_resources(
            self._start, warm, self._peaks, settings.rss_allowance_mib, is_gpu_shared=settings.gpu_is_shared
        )
        report.health_median_ms = 1e3 * median(self._latencies) if self._latencies else 0.0
