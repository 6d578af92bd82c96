"""Sends requests to one server once, or to several in turn (`--against`), and compares their figures.

Every round has new content, the same for all servers, so no server sees a prompt twice. The order of the servers
changes from round to round, so that drift of the machine favors none of them.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from saccade.bench.load.client import Client, run
from saccade.bench.load.startup_server import LaunchedServer
from saccade.bench.load.workload import digest_of, make_prompts
from saccade.bench.load.workload_text import WordList
from saccade.bench.serving.serving_comparison import Comparison, ratios
from saccade.bench.serving.serving_differences import unequal_work
from saccade.bench.serving.serving_results import as_data
from saccade.bench.serving.serving_run import Passage, ServingRun, Shown, Target
from saccade.bench.serving.serving_settings import AgainstSettings, ServingPlan, VariantSettings, draw_seed
from saccade.bench.serving.serving_stats import main_figures
from saccade.errors import ConfigError

MIN_ROUNDS = 2  # for an interval


@dataclass(slots=True)
class Turns:
    """One server or several, the seeds of the rounds, and what has been measured so far. `rounds` has those that all
    servers have finished, with a passage for each."""

    plans: list[ServingPlan]
    names: list[str]
    seeds: list[int]
    num_warm_up: int
    settle_s: float = 0.0
    targets: list[Target] = field(default_factory=list)
    words: WordList = field(default_factory=WordList)
    contents: list[str] = field(default_factory=list)
    rounds: list[list[Passage]] = field(default_factory=list)
    retokenized: list[int | None] = field(default_factory=list)

    async def take(self, shown: Shown) -> None:
        async with AsyncExitStack() as stack:
            for plan in self.plans:  # finds an unreachable server before any work is done
                client = await stack.enter_async_context(Client(plan.target))
                shown.say(f"asking {plan.target.url} what it is")
                how = {} if plan is self.plans[0] else {"prefer": self.plans[0].target.model, "flags": "--against"}
                self.targets.append(await Target.meet(plan, client, **how))
            if len(self.plans) > 1:
                self.names = _names(self.names, self.targets)
            self.words = await _shared_words(self.targets)
            if self.num_warm_up:
                await self._warm_up(shown)
            for number in range(len(self.seeds)):
                await self._round(number, shown)
            by_target = zip(self.targets, self.by_server(), strict=True)
            self.retokenized = [await target.retokenized(own, self.words) for target, own in by_target]

    async def _warm_up(self, shown: Shown) -> None:
        """Sends prompts of the same kind that no run measures, so that no cache gets measured content. From a file, it
        takes the entries after those that are measured."""
        measured = self.plans[0].workload
        settings = replace(measured, num_prompts=self.num_warm_up, seed=2**31 + draw_seed())
        skip = len(self.seeds) * measured.num_prompts
        prompts = await asyncio.to_thread(make_prompts, settings, self.words, skip=skip)
        for name, target in zip(self.names, self.targets, strict=True):
            shown.say(f"warming up {name or 'the server'} with {self.num_warm_up} requests")
            await target.warm_up(prompts)

    async def _round(self, number: int, shown: Shown) -> None:
        settings = replace(self.plans[0].workload, seed=self.seeds[number])
        place = f"round {number + 1} of {len(self.seeds)}"
        more = f", {place}" if len(self.seeds) > 1 else ""
        shown.say(f"making {settings.num_prompts} requests, seed {self.plans[0].workload.seed}{more}")
        skip = number * settings.num_prompts
        prompts = await asyncio.to_thread(make_prompts, settings, self.words, skip=skip)
        taken: dict[int, Passage] = {}
        for index in turn_order(number, len(self.targets)):
            target, turn = self.targets[index], f"{place}: {self.names[index]}"
            await asyncio.sleep(self.settle_s)
            if len(self.targets) > 1:
                shown.say(turn)
            taken[index] = passage = await target.take(prompts, settings.seed, shown)
            if len(self.targets) > 1:
                _check_answers(passage, target)
                shown.tell(f"{turn}: {main_figures(passage.figures)}")
        self.contents.append(digest_of(prompts))
        self.rounds.append([taken[index] for index in range(len(self.targets))])

    def by_server(self) -> list[list[Passage]]:
        return [list(passages) for passages in zip(*self.rounds, strict=True)]

    def runs(self) -> list[ServingRun]:
        """Each server's finished rounds as one run."""
        content = " ".join(self.contents)
        counts = self.retokenized or [None] * len(self.targets)
        each = zip(self.targets, self.names, self.by_server(), counts, strict=True)
        return [target.finish(name, own, self.words, content, count) for target, name, own, count in each]

    def comparison(self) -> Comparison:
        runs = self.runs()
        first, *others = runs
        orders = [[self.names[index] for index in turn_order(number, len(runs))] for number in range(len(self.rounds))]
        figures = [[passage.figures for passage in own] for own in self.by_server()]
        found = {
            other.name: ratios(first.figures, other.figures, list(zip(figures[0], own, strict=True)))
            for other, own in zip(others, figures[1:], strict=True)
            if len(self.rounds) >= MIN_ROUNDS
        }
        return Comparison(runs, orders, found, _cautions(self.plans, runs), len(self.seeds))


def run_serving(plan: ServingPlan, shown: Shown, *, name: str = "") -> ServingRun:
    """Measures a server that is already running."""
    turns = Turns([plan], [name or plan.output.label], [plan.workload.seed], plan.load.warmup_requests)
    run(turns.take(shown))
    return turns.runs()[0]


def run_against(plan: ServingPlan, against: AgainstSettings, shown: Shown, keep: Callable[[Comparison], None]) -> None:
    """`keep` gets the comparison of all rounds. If an error or Ctrl-C ends them, it gets that of the finished ones. A
    whole round of other content warms up each server."""
    turns = Turns(
        [plan, *(replace(plan, target=target) for target in against.targets(plan.target))],
        [plan.output.label, *against.names()],
        [round_seed(plan.workload.seed, number) for number in range(against.rounds)],
        plan.workload.num_prompts if plan.load.warmup_requests else 0,
        against.settle_s,
    )
    try:
        run(turns.take(shown))
    finally:
        if turns.rounds:
            keep(turns.comparison())


@contextmanager
def started(variants: VariantSettings, name: str, shown: Shown) -> Iterator[Callable[[ServingPlan], ServingRun]]:
    """Starts the server of a variant, alone on the machine, and yields what measures it. Without variants, a running
    server is measured."""
    if not variants.is_used:
        yield partial(run_serving, shown=shown)
        return
    flags = variants.flags_by_name()[name]
    shown.say(f"starting {name or 'a server'} {flags}".rstrip())
    with LaunchedServer(variants.serve_model, flags, timeout_s=variants.start_timeout_s, say=shown.say) as server:

        def measure(plan: ServingPlan) -> ServingRun:
            made = run_serving(replace(plan, target=replace(plan.target, base_url=server.url)), shown, name=name)
            made.environment.update(serve_model=variants.serve_model, serve_flags=flags, time_to_ready_s=server.ready_s)
            return made

        yield measure


def turn_order(number: int, count: int) -> list[int]:
    """The order of servers in a round. Every second round reverses the one before; then another server starts."""
    start = number // 2 % count
    forth = [(start + index) % count for index in range(count)]
    return forth[::-1] if number % 2 else forth


def round_seed(seed: int, number: int) -> int:
    """A seed that differs for every round of every seed."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0])


def _check_answers(passage: Passage, target: Target) -> None:
    if not any(outcome.is_ok for outcome in passage.outcomes):
        first = passage.outcomes[0]
        raise ConfigError(
            f"{target.plan.target.url} answered none of {len(passage.outcomes)} requests, so there is nothing to "
            f"compare; the first: {first.error}: {first.message}"
        )


async def _shared_words(targets: Sequence[Target]) -> WordList:
    """Words counted by the first server that can count tokens; all servers get the same text."""
    for target in targets:
        if (words := await target.words()).is_counted:
            return words
    return WordList()


def _names(given: Sequence[str], targets: Sequence[Target]) -> list[str]:
    """Names a server as the user did, else by its engine, else by its address. All names differ."""
    addresses = _short([target.plan.target.url.partition("://")[2] for target in targets])
    owners = [target.facts.owner for target in targets]
    counts = Counter(owners)
    own = [owner if owner and counts[owner] == 1 else "" for owner in owners]
    names = [name or engine or address for name, engine, address in zip(given, own, addresses, strict=True)]
    counts = Counter(names)
    return [name if counts[name] == 1 else address for name, address in zip(names, addresses, strict=True)]


def _short(addresses: list[str]) -> list[str]:
    """Shortens addresses to ports if all hosts are the same."""
    is_one_host = len({address.rpartition(":")[0] for address in addresses}) == 1
    return [f":{address.rpartition(':')[2]}" for address in addresses] if is_one_host else addresses


def _cautions(plans: Sequence[ServingPlan], runs: Sequence[ServingRun]) -> list[str]:
    """Reasons why the ratios may mislead."""
    names = [run.name for run in runs]
    lines = unequal_work(names, [as_data(run) for run in runs])
    if len({plan.target.kind for plan in plans}) > 1:
        told = ", ".join(f"{name} {plan.target.kind}" for name, plan in zip(names, plans, strict=True))
        lines.append(f"NOT THE SAME WORK: requests have different formats: {told}")
    lines += [
        f"WARM CACHE: {run.name} already had part of the content in its caches, see above"
        for run in runs
        if run.warnings
    ]
    lines += [
        f"FAILED: {run.failed} requests to {run.name}, so its figures cover fewer requests than the others'"
        for run in runs
        if run.failed
    ]
    return lines
