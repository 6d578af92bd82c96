"""One server of `saccade bench serve`: sends it requests, and combines what it did into a run."""

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

from saccade import __version__
from saccade.bench.load.client import Client, drive
from saccade.bench.load.client_reply import Outcome
from saccade.bench.load.load_settings import CHAT
from saccade.bench.load.workload import Wording, WorkloadPrompt
from saccade.bench.load.workload_text import WordList
from saccade.bench.serving.serving_caches import CacheUse, cache_use
from saccade.bench.serving.serving_settings import ServingPlan
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
from saccade.terminal import progress_bar

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
        failed = 0
        with progress_bar(self._console, REFRESH_PER_S) as progress:
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
    samples: list[WorkloadPrompt]
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
    """One pass of a workload through a server. Samples are prompts without their content, which is large."""

    samples: list[WorkloadPrompt]
    outcomes: list[Outcome]
    duration_s: float
    figures: Figures
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

    def _prepare(self, prompts: Sequence[WorkloadPrompt]) -> list[bytes]:
        settings = self.plan.target
        is_timed = settings.request_timings and self.facts.is_saccade
        wording = Wording(settings, self.facts.model, self.plan.workload.ignore_eos, is_timed)
        return [self.client.prepare(wording.body(prompt)) for prompt in prompts]

    async def words(self) -> WordList:
        """Words counted by the server's tokenizer, if it has an endpoint for that. A file needs none."""
        return WordList() if self.plan.is_file else await count_words(self.client, self.facts.model)

    async def warm_up(self, prompts: Sequence[WorkloadPrompt]) -> None:
        outcomes, _ = await drive(self.client, self._prepare(prompts), self.plan.load)
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
        requests = self._prepare(prompts)
        before = await read_counters(self.client)
        with shown.counting(len(requests)) as tick:
            outcomes, duration_s = await drive(self.client, requests, self.plan.load, seed=seed, progress=tick)
        after = await read_counters(self.client)
        caches = cache_use(before, after, outcomes, prompts, self.template_tokens)
        samples = [replace(prompt, content="", messages=None) for prompt in prompts]
        figures = self._figures(outcomes, samples, duration_s)
        return Passage(samples, outcomes, duration_s, figures, before, after, caches)

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
        samples, outcomes, duration_s = joined(passages)
        caches = reduce(add, (passage.caches for passage in passages))
        changes: Counter[str] = Counter()
        for passage in passages:
            changes.update(metrics_between(passage.before, passage.after))
        return ServingRun(
            name=name,
            figures=self._figures(outcomes, samples, duration_s, retokenized),
            outcomes=outcomes,
            samples=samples,
            stages=stage_figures([outcome for outcome in outcomes if outcome.is_ok]),
            graphs=graphs_between(passages[0].before, passages[-1].after),
            metrics=dict(changes),
            gauges=passages[-1].after.gauges,
            environment=_environment(self.facts, words) | {"content": content},
            settings=self.plan.as_data(),
            caches=caches,
            warnings=caches.warnings(FILE_CONTENT if self.plan.is_file else FRESH_CONTENT),
        )

    def _figures(
        self,
        outcomes: Sequence[Outcome],
        samples: Sequence[WorkloadPrompt],
        duration_s: float,
        retokenized: int | None = None,
    ) -> Figures:
        output = self.plan.output
        return figures_of(
            outcomes,
            samples,
            duration_s,
            percentiles=output.percentiles(),
            limits_ms=output.limits_ms(),
            retokenized=retokenized,
        )


def joined(passages: Sequence[Passage]) -> tuple[list[WorkloadPrompt], list[Outcome], float]:
    """Joins passages as if they had run back to back, with continuous indices and times."""
    samples: list[WorkloadPrompt] = []
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
