"""`saccade bench serve`: sends requests to an OpenAI-compatible server, or to servers that it starts itself."""

import asyncio
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import reduce
from operator import add
from os import cpu_count
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from saccade import __version__
from saccade.bench.load.client import Client, drive, run
from saccade.bench.load.client_reply import Outcome
from saccade.bench.load.load_settings import CHAT
from saccade.bench.load.startup_server import LaunchedServer
from saccade.bench.load.workload import Wording, WorkloadPrompt, WorkloadRequest, digest_of, make_prompts
from saccade.bench.load.workload_text import WordList
from saccade.bench.serving.serving_caches import CacheUse, cache_use
from saccade.bench.serving.serving_settings import ServingPlan, VariantSettings, draw_seed
from saccade.bench.serving.serving_stats import Figures, figures_of, stage_figures
from saccade.bench.serving.serving_target import (
    Reading,
    TargetFacts,
    count_template,
    count_words,
    describe,
    graphs_between,
    metrics_between,
    read_counters,
    retokenize,
)
from saccade.errors import ConfigError

REFRESH_PER_S = 2  # drawing takes time from the client
FRESH_CONTENT = "Leave out --seed for content that no server has seen, or empty the caches (--flush-cache)."
FILE_CONTENT = "The file repeats itself, or the server has seen it before; --flush-cache empties its caches."


class Shown:
    """Progress for the user: a bar on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, highlight=False)

    def tell(self, text: str) -> None:
        """Shows figures in one line, as soon as they are known."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def counting(self, total: int) -> Iterator[Callable[[Outcome], None]]:
        """Yields a callback that takes each outcome."""
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
    """All figures of one server. `warnings` say why they may mislead."""

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
    caches: CacheUse = field(default_factory=CacheUse)
    warnings: list[str] = field(default_factory=list)

    @property
    def failed(self) -> int:
        return int(self.figures["failed"])


@dataclass(frozen=True, slots=True)
class Passage:
    """One pass of a workload through a server. Samples have no bodies, because those are large."""

    samples: list[WorkloadRequest]
    outcomes: list[Outcome]
    duration_s: float
    before: Reading
    after: Reading
    caches: CacheUse


@dataclass(frozen=True, slots=True)
class Target:
    """A server that is being measured."""

    plan: ServingPlan
    client: Client
    facts: TargetFacts
    template_tokens: int | None = None

    @classmethod
    async def meet(cls, plan: ServingPlan, client: Client, **how: str) -> "Target":
        """`how` goes to `describe`."""
        facts = await describe(client, plan.target.model, **how)
        is_chat = plan.target.kind == CHAT
        return cls(plan, client, facts, await count_template(client, facts.model) if is_chat else 0)

    @property
    def wording(self) -> Wording:
        settings = self.plan.target
        is_timed = settings.request_timings and self.facts.is_saccade
        return Wording(settings, self.facts.model, self.plan.workload.ignore_eos, is_timed)

    async def words(self) -> WordList:
        """Words counted by the server's tokenizer, if it has an endpoint for that. A file needs none."""
        return WordList() if self.plan.is_file else await count_words(self.client, self.facts.model)

    async def warm_up(self, prompts: Sequence[WorkloadPrompt]) -> None:
        requests = [self.client.prepare(self.wording.body(prompt)) for prompt in prompts]
        outcomes, _ = await drive(self.client, requests, self.plan.load)
        failed = [outcome for outcome in outcomes if not outcome.is_ok]
        if failed and len(failed) == len(outcomes):
            raise ConfigError(
                f"all {len(failed)} warm-up requests to {self.plan.target.url} failed: "
                f"{failed[0].error}: {failed[0].message}"
            )

    async def flush_cache(self) -> None:
        status, _ = await self.client.ask("POST", "/flush_cache")
        if status != 200:
            raise ConfigError(
                f"{self.plan.target.url} did not empty its caches (HTTP {status} from /flush_cache; --flush-cache)"
            )

    async def take(self, prompts: Sequence[WorkloadPrompt], seed: int, shown: Shown) -> Passage:
        """Sends the requests; `seed` determines when they arrive."""
        if self.plan.load.flush_cache:
            await self.flush_cache()
        samples = [self.wording.request(prompt) for prompt in prompts]
        requests = [self.client.prepare(sample.body) for sample in samples]
        samples = [replace(sample, body=b"") for sample in samples]  # their bytes are in `requests`
        before = await read_counters(self.client)
        with shown.counting(len(requests)) as tick:
            outcomes, duration_s = await drive(self.client, requests, self.plan.load, seed=seed, progress=tick)
        after = await read_counters(self.client)
        caches = cache_use(before, after, outcomes, prompts, self.template_tokens)
        return Passage(samples, outcomes, duration_s, before, after, caches)

    async def retokenized(self, passages: Sequence[Passage], words: WordList) -> int | None:
        """The tokens of all answers, counted by the server's tokenizer if it has an endpoint for that."""
        if not words.is_counted and not self.plan.is_file:
            return None
        texts = [outcome.text for passage in passages for outcome in passage.outcomes if outcome.is_ok]
        return await retokenize(self.client, self.facts.model, texts)

    def finish(
        self, name: str, passages: Sequence[Passage], words: WordList, content: str, retokenized: int | None
    ) -> ServingRun:
        """Combines all passages into one run."""
        plan, output = self.plan, self.plan.output
        samples, outcomes, duration_s = joined(passages)
        good = [outcome for outcome in outcomes if outcome.is_ok]
        figures = figures_of(
            outcomes,
            samples,
            duration_s,
            percentiles=output.percentiles(),
            limits_ms=output.limits_ms(),
            retokenized=retokenized,
        )
        caches = reduce(add, (passage.caches for passage in passages))
        changes: Counter[str] = Counter()
        for passage in passages:
            changes.update(metrics_between(passage.before, passage.after))
        return ServingRun(
            name=name,
            figures=figures,
            outcomes=outcomes,
            samples=samples,
            stages=stage_figures(good),
            graphs=graphs_between(passages[0].before, passages[-1].after),
            metrics=dict(changes),
            gauges=passages[-1].after.gauges,
            environment=_environment(self.facts, words) | {"content": content},
            settings=plan.as_data(),
            caches=caches,
            warnings=caches.warnings(FILE_CONTENT if plan.is_file else FRESH_CONTENT),
        )


def joined(passages: Sequence[Passage]) -> tuple[list[WorkloadRequest], list[Outcome], float]:
    """Joins passages as if they had run back to back, with continuous indices and times."""
    samples: list[WorkloadRequest] = []
    outcomes: list[Outcome] = []
    clock_s = 0.0
    for passage in passages:
        outcomes += [
            replace(outcome, index=outcome.index + len(samples), sent_s=outcome.sent_s + clock_s)
            for outcome in passage.outcomes
        ]
        samples += passage.samples
        clock_s += passage.duration_s
    return samples, outcomes, clock_s


@contextmanager
def started(variants: VariantSettings, name: str, shown: Shown) -> Iterator[Callable[[ServingPlan], ServingRun]]:
    """Starts the server of a variant, alone on the machine, and yields what measures it."""
    flags = variants.flags_by_name()[name]
    shown.say(f"starting {name or 'a server'} {flags}".rstrip())
    with LaunchedServer(variants.serve_model, flags, timeout_s=variants.start_timeout_s, say=shown.say) as server:

        def measure(plan: ServingPlan) -> ServingRun:
            made = run_serving(replace(plan, target=replace(plan.target, base_url=server.url)), shown, name=name)
            made.environment.update(serve_model=variants.serve_model, serve_flags=flags, time_to_ready_s=server.ready_s)
            return made

        yield measure


def run_serving(plan: ServingPlan, shown: Shown, *, name: str = "") -> ServingRun:
    """Measures a server that is already running."""
    return run(_measure(plan, shown, name or plan.output.label))


async def _measure(plan: ServingPlan, shown: Shown, name: str) -> ServingRun:
    workload = plan.workload
    async with Client(plan.target) as client:
        shown.say(f"asking {plan.target.url} what it is")
        target = await Target.meet(plan, client)
        words = await target.words()
        shown.say(f"making {workload.num_prompts} requests, seed {workload.seed}")
        prompts = await asyncio.to_thread(make_prompts, workload, words)
        if count := plan.load.warmup_requests:
            shown.say(f"warming up with {count} requests")
            await target.warm_up(await warm_up_prompts(plan, words, count, skip=workload.num_prompts))
        passage = await target.take(prompts, workload.seed, shown)
        retokenized = await target.retokenized([passage], words)
        return target.finish(name, [passage], words, digest_of(prompts), retokenized)


async def warm_up_prompts(plan: ServingPlan, words: WordList, count: int, *, skip: int) -> list[WorkloadPrompt]:
    """Makes prompts of the same kind that no run measures, so that warm-up fills no cache with measured content. From a
    file, it takes the entries after the first `skip`."""
    settings = replace(plan.workload, num_prompts=count, seed=2**31 + draw_seed())
    return await asyncio.to_thread(make_prompts, settings, words, skip=skip)


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
