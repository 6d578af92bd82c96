"""`saccade bench serve`: the same requests to any OpenAI server, or to its own servers with different flags."""

import asyncio
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from os import cpu_count
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from saccade import __version__
from saccade.bench.client import Client, drive, run
from saccade.bench.client_reply import Outcome
from saccade.bench.serving_settings import DATASETS, ServingPlan, VariantSettings
from saccade.bench.serving_stats import Figures, figures_of, stage_figures
from saccade.bench.serving_target import (
    TargetFacts,
    count_words,
    describe,
    graphs_between,
    metrics_between,
    read_counters,
    retokenize,
)
from saccade.bench.startup_server import LaunchedServer
from saccade.bench.workload import Wording, WorkloadRequest, make_workload
from saccade.bench.workload_text import WordList
from saccade.errors import ConfigError

REFRESH_PER_S = 2  # drawing costs the client time


class Shown:
    """Progress for the user: a bar on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, highlight=False)

    @contextmanager
    def counting(self, total: int) -> Iterator[Callable[[Outcome], None]]:
        """Yields a callback to call with every outcome."""
        if not self._console.is_terminal:
            self.say(f"sending {total} requests")
            yield lambda outcome: None
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        failed = 0
        with Progress(*columns, console=self._console, refresh_per_second=REFRESH_PER_S) as progress:
            task = progress.add_task("requests", total=total)

            def tick(outcome: Outcome) -> None:
                nonlocal failed
                failed += not outcome.is_ok
                progress.update(task, advance=1, description=f"requests, {failed} failed" if failed else "requests")

            yield tick


@dataclass(frozen=True, slots=True)
class ServingRun:
    name: str
    figures: Figures
    outcomes: list[Outcome]
    samples: list[WorkloadRequest]
    stages: dict[str, Any]
    graphs: list[dict[str, Any]]
    metrics: dict[str, float]
    gauges: dict[str, float]
    environment: dict[str, Any]
    settings: dict[str, Any]

    @property
    def failed(self) -> int:
        return int(self.figures["failed"])


def run_variants(plan: ServingPlan, variants: VariantSettings, shown: Shown) -> list[ServingRun]:
    """Starts one server after the other, each alone on the machine, for the same requests."""
    runs = []
    for name, flags in variants.flags_by_name().items():
        shown.say(f"starting {name or 'a server'} {flags}".rstrip())
        with LaunchedServer(variants.serve_model, flags, timeout_s=variants.start_timeout_s, say=shown.say) as server:
            made = run_serving(replace(plan, target=replace(plan.target, base_url=server.url)), shown, name=name)
        made.environment.update(serve_model=variants.serve_model, serve_flags=flags, time_to_ready_s=server.ready_s)
        runs.append(made)
    return runs


def run_serving(plan: ServingPlan, shown: Shown, *, name: str = "") -> ServingRun:
    """Measures a server that is already running."""
    return run(_measure(plan, shown, name or plan.output.label))


async def _measure(plan: ServingPlan, shown: Shown, name: str) -> ServingRun:
    target, output = plan.target, plan.output
    async with Client(target) as client:
        shown.say(f"asking {target.url} what it is")
        facts = await describe(client, target.model)
        is_file = DATASETS[plan.workload.dataset_name] == "file"
        words = WordList() if is_file else await count_words(client, facts.model)
        shown.say(f"making {plan.workload.num_prompts} requests")
        is_timed = target.request_timings and facts.is_saccade
        wording = Wording(target, facts.model, plan.workload.ignore_eos, is_timed)
        samples = await asyncio.to_thread(make_workload, plan.workload, wording, words)
        await _warm_up(client, plan, wording, words, shown)
        if plan.load.flush_cache:
            await _flush_cache(client)
        requests = [client.prepare(sample.body) for sample in samples]
        samples = [replace(sample, body=b"") for sample in samples]  # their bytes are in `requests`
        before = await read_counters(client)
        with shown.counting(len(requests)) as tick:
            outcomes, duration_s = await drive(client, requests, plan.load, seed=plan.workload.seed, progress=tick)
        after = await read_counters(client)
        texts = [outcome.text for outcome in outcomes if outcome.is_ok]
        retokenized = await retokenize(client, facts.model, texts) if words.is_counted or is_file else None
    limits = output.limits_ms()
    figures = figures_of(
        outcomes, samples, duration_s, percentiles=output.percentiles(), limits_ms=limits, retokenized=retokenized
    )
    return ServingRun(
        name=name,
        figures=figures,
        outcomes=outcomes,
        samples=samples,
        stages=stage_figures([outcome for outcome in outcomes if outcome.is_ok]),
        graphs=graphs_between(before, after),
        metrics=metrics_between(before, after),
        gauges=after.gauges,
        environment=_environment(facts, words),
        settings=plan.as_data(),
    )


async def _warm_up(client: Client, plan: ServingPlan, wording: Wording, words: WordList, shown: Shown) -> None:
    """Sends requests of the same kind that are not among those measured, so that no cache knows them."""
    count = plan.load.warmup_requests
    if not count:
        return
    shown.say(f"warming up with {count} requests")
    settings = replace(plan.workload, num_prompts=count, seed=plan.workload.seed + 2**31)
    samples = await asyncio.to_thread(make_workload, settings, wording, words)
    outcomes, _ = await drive(client, [client.prepare(sample.body) for sample in samples], plan.load)
    failed = [outcome for outcome in outcomes if not outcome.is_ok]
    if len(failed) == len(outcomes):
        raise ConfigError(f"all {count} warm-up requests failed: {failed[0].error}: {failed[0].message}")


async def _flush_cache(client: Client) -> None:
    status, _ = await client.ask("POST", "/flush_cache")
    if status != 200:
        raise ConfigError(f"the server did not empty its caches (HTTP {status} from /flush_cache; --flush-cache)")


def _environment(facts: TargetFacts, words: WordList) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "client": f"saccade {__version__}, Python {platform.python_version()}",
        "machine": f"{platform.system()} {platform.machine()}, {cpu_count()} cores",
        "model": facts.model,
        "max_model_len": facts.max_model_len,
        "server": facts.version,
        "server_info": facts.info,
        "text": "counted by the server's tokenizer" if words.is_counted else "one word for each token",
    }
