"""`saccade bench startup`: times a start by stage, and checks whether first requests are as fast as later ones."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.console import Console
from rich.table import Table

from saccade.bench.load.client import Client, run
from saccade.bench.load.client_reply import Outcome
from saccade.bench.load.load_settings import TargetSettings, WorkloadSettings
from saccade.bench.load.startup_server import READY, LaunchedServer
from saccade.bench.load.workload import Wording, make_prompts
from saccade.bench.serving.serving_run import Shown
from saccade.bench.serving.serving_settings import StartupBenchSettings
from saccade.bench.serving.serving_target import count_words, describe
from saccade.terminal import print_table

STAGE_LINE = re.compile(r"^(.+): \d+(?:\.\d+)? s$")
BEGINNING, WEIGHTS, END = "process and imports", "loading weights", "open for requests"


@dataclass(frozen=True, slots=True)
class TimedStart:
    """One start. Stages follow each other without a gap, so their sum is the time until ready."""

    stages: dict[str, float]
    ready_s: float
    requests_ms: list[float]
    failures: list[str]


def run_startup_bench(model: str, settings: StartupBenchSettings, shown: Shown) -> list[TimedStart]:
    return [_start(model, settings, number, shown) for number in range(settings.starts)]


def stages_of(lines: Sequence[tuple[float, str]]) -> dict[str, float]:
    """Computes the seconds of each stage from a server's output lines and their times. A stage ends with its line. The
    first is the start of the process; the last ends with the line that says ready."""
    stages: dict[str, float] = {}
    last_s = 0.0
    for since_s, line in lines:
        if READY.search(line):
            name = END
        elif line.startswith("listening on ") and not stages:
            name = BEGINNING
        elif (match := STAGE_LINE.match(line)) is not None:
            name = match[1] if stages else BEGINNING
        else:
            continue
        stages[name] = stages.get(name, 0.0) + since_s - last_s
        last_s = since_s
        if name == END:
            break
    return stages


def print_startup(starts: Sequence[TimedStart], console: Console) -> None:
    table = Table("stage", *(f"start {number + 1}, s" for number in range(len(starts))), title="until ready")
    names = dict.fromkeys(name for start in starts for name in start.stages)
    for name in names:
        table.add_row(name, *(f"{start.stages.get(name, 0.0):.2f}" for start in starts))
    table.add_row("time to ready", *(f"{start.ready_s:.2f}" for start in starts), style="bold")
    print_table(console, table)
    answers = Table("request", *(f"start {number + 1}, ms" for number in range(len(starts))), title="one at a time")
    for index in range(max((len(start.requests_ms) for start in starts), default=0)):
        times = (start.requests_ms[index : index + 1] for start in starts)
        answers.add_row(str(index + 1), *(f"{own[0]:.1f}" if own else "nan" for own in times))
    print_table(console, answers)
    for number, start in enumerate(starts):
        console.print(verdict(number, start), highlight=False)
        for failure in start.failures:
            console.print(f"failed: {failure}", style="bold red", markup=False, highlight=False)


def verdict(number: int, start: TimedStart) -> str:
    """Shows whether the first request had to wait for work that the start left undone."""
    beyond_s = start.ready_s - start.stages.get(WEIGHTS, 0.0)
    ready = f"start {number + 1}: ready after {start.ready_s:.2f} s, {beyond_s:.2f} of them beyond {WEIGHTS}"
    if len(start.requests_ms) < 2:
        return ready
    first, usual = start.requests_ms[0], median(start.requests_ms[1:])
    last = start.requests_ms[-1]
    return (
        f"{ready}; first request {first:.1f} ms, median of the others {usual:.1f} ms ({first / usual:.2f}x), "
        f"last {last:.1f} ms"
    )


def _start(model: str, settings: StartupBenchSettings, number: int, shown: Shown) -> TimedStart:
    shown.say(f"start {number + 1} of {settings.starts}")
    server = LaunchedServer(model, settings.serve_args, timeout_s=settings.start_timeout_s, say=shown.say)
    with server:
        outcomes = run(_ask(server.url, settings, number))
    good = [outcome.e2el_s * 1e3 for outcome in outcomes if outcome.is_ok]
    failures = [f"request {each.index + 1}: {each.error}: {each.message}" for each in outcomes if not each.is_ok]
    return TimedStart(stages_of(list(server.lines)), server.ready_s, good, failures)


async def _ask(url: str, settings: StartupBenchSettings, number: int) -> list[Outcome]:
    """Sends requests one after the other, with images that all differ, also from those of other starts."""
    target = TargetSettings(base_url=url, request_timeout_s=settings.request_timeout_s)
    workload = WorkloadSettings(
        dataset_name="image" if settings.image_resolution else "random",
        image_resolution=settings.image_resolution or "1x1",
        num_prompts=settings.requests,
        random_input_len=settings.random_input_len,
        random_output_len=settings.random_output_len,
        random_range_ratio=1.0,
        seed=number,
    )
    async with Client(target) as client:
        facts = await describe(client, "")
        words = await count_words(client, facts.model)
        wording = Wording(target, facts.model, workload.ignore_eos)
        requests = [client.prepare(wording.body(prompt)) for prompt in make_prompts(workload, words)]
        return [await client.send(request, index) for index, request in enumerate(requests)]
