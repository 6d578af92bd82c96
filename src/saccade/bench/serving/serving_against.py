"""`saccade bench serve --against`: sends the same requests to several servers in turn, and compares their figures.

Every round has new content, the same for all servers, so no server sees a prompt twice. The order of the servers
changes from round to round, so that drift of the machine favors none of them.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

import numpy as np

from saccade.bench.load.client import Client, run
from saccade.bench.load.workload import WorkloadPrompt, digest_of, make_prompts
from saccade.bench.load.workload_text import WordList
from saccade.bench.serving.serving_against_settings import AgainstSettings
from saccade.bench.serving.serving_differences import unequal_work
from saccade.bench.serving.serving_interval import Ratio, Round, Statistic, ratios
from saccade.bench.serving.serving_results import COMPARED, as_data
from saccade.bench.serving.serving_run import Passage, ServingRun, Shown, Target, warm_up_prompts
from saccade.bench.serving.serving_settings import ServingPlan
from saccade.bench.serving.serving_stats import figures_of, is_good, main_figures, token_figures
from saccade.errors import ConfigError

MIN_ROUNDS = 2  # for an interval
POINTS = {"mean": None, "median": 50.0, "p99": 99.0}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The first run is that of --base-url. `orders` lists the servers of each round in the order of their turns.
    `ratios` compares the first server with each other one, by name. `cautions` say why it may mislead."""

    runs: list[ServingRun]
    orders: list[list[str]]
    ratios: dict[str, list[Ratio]]
    cautions: list[str]
    num_rounds: int

    @property
    def first(self) -> str:
        return self.runs[0].name

    @property
    def is_complete(self) -> bool:
        return len(self.orders) == self.num_rounds and len(self.ratios) == len(self.runs) - 1

    @property
    def warnings(self) -> list[str]:
        if self.is_complete:
            return self.cautions
        end = "" if self.ratios else ", without ratios"
        return [*self.cautions, f"INCOMPLETE: {len(self.orders)} of {self.num_rounds} rounds{end}"]


@dataclass(slots=True)
class Turns:
    """What has been measured so far. `rounds` has those that all servers have finished, with a passage for each."""

    plans: list[ServingPlan]
    targets: list[Target] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    words: WordList = field(default_factory=WordList)
    contents: list[str] = field(default_factory=list)
    rounds: list[list[Passage]] = field(default_factory=list)
    retokenized: list[int | None] = field(default_factory=list)

    def by_server(self) -> list[list[Passage]]:
        return [list(passages) for passages in zip(*self.rounds, strict=True)]

    def comparison(self, num_rounds: int) -> Comparison:
        """The finished rounds of `num_rounds`, without ratios."""
        passages, content = self.by_server(), " ".join(self.contents)
        counts = self.retokenized or [None] * len(self.targets)
        each = zip(self.targets, self.names, passages, counts, strict=True)
        runs = [target.finish(name, own, self.words, content, count) for target, name, own, count in each]
        numbers = range(len(self.rounds))
        orders = [[self.names[index] for index in turn_order(number, len(runs))] for number in numbers]
        return Comparison(runs, orders, {}, _cautions(self.plans, runs), num_rounds)

    def ratios(self) -> dict[str, list[Ratio]]:
        """Empty after a single round, which gives no intervals."""
        if len(self.rounds) < MIN_ROUNDS:
            return {}
        first, *others = ([_round(passage, self.plans[0]) for passage in own] for own in self.by_server())
        named = zip(self.names[1:], others, strict=True)
        return {name: ratios(first, other, statistics()) for name, other in named}


def run_against(plan: ServingPlan, against: AgainstSettings, shown: Shown, keep: Callable[[Comparison], None]) -> None:
    """`keep` gets the comparison of all rounds. If an error or Ctrl-C ends them, it gets that of the finished ones.
    Ratios are added behind it: they take seconds, and Ctrl-C may end those, too."""
    turns = Turns([plan, *(replace(plan, target=target) for target in against.targets(plan.target))])
    try:
        run(_take_turns(turns, against, shown))
    finally:
        if turns.rounds:
            comparison = turns.comparison(against.rounds)
            keep(comparison)
            comparison.ratios.update(turns.ratios())


def turn_order(number: int, count: int) -> list[int]:
    """The order of servers in a round. Every second round reverses the one before; then another server starts."""
    start = number // 2 % count
    forth = [(start + index) % count for index in range(count)]
    return forth[::-1] if number % 2 else forth


def round_seed(seed: int, number: int) -> int:
    """A seed that differs for every round of every seed."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0])


def statistics() -> list[Statistic]:
    """The compared figures that get a confidence interval: rates and latencies."""
    found = []
    for label, key, direction in COMPARED:
        if key.endswith("_ms"):
            word, metric, _ = key.split("_")
            found.append(Statistic(label, key, direction, metric, POINTS[word]))
        elif key not in ("failed", "duration"):
            found.append(Statistic(label, key, direction))
    return found


async def _take_turns(turns: Turns, against: AgainstSettings, shown: Shown) -> None:
    plan, targets = turns.plans[0], turns.targets
    async with AsyncExitStack() as stack:
        for each in turns.plans:  # finds an unreachable server before any work is done
            client = await stack.enter_async_context(Client(each.target))
            shown.say(f"asking {each.target.url} what it is")
            how = {} if each is plan else {"prefer": plan.target.model, "flags": "--against"}
            targets.append(await Target.meet(each, client, **how))
        turns.names = names = _names([plan.output.label, *against.names()], targets)
        turns.words = words = await _shared_words(targets)
        if plan.load.warmup_requests:
            await _warm_up(targets, names, words, against, shown)
        for number in range(against.rounds):
            seed = round_seed(plan.workload.seed, number)
            settings = replace(plan.workload, seed=seed)
            shown.say(f"making {settings.num_prompts} requests, seed {plan.workload.seed}, round {number + 1}")
            skip = number * settings.num_prompts
            prompts = await asyncio.to_thread(make_prompts, settings, words, skip=skip)
            taken: dict[int, Passage] = {}
            for index in turn_order(number, len(targets)):
                await asyncio.sleep(against.settle_s)
                turn = f"round {number + 1} of {against.rounds}: {names[index]}"
                shown.say(turn)
                taken[index] = passage = await _take(targets[index], prompts, seed, shown)
                figures = figures_of(passage.outcomes, passage.samples, passage.duration_s)
                shown.tell(f"{turn}: {main_figures(figures)}")
            turns.contents.append(digest_of(prompts))
            turns.rounds.append([taken[index] for index in range(len(targets))])
        by_target = zip(targets, turns.by_server(), strict=True)
        turns.retokenized = [await target.retokenized(own, words) for target, own in by_target]


async def _warm_up(
    targets: Sequence[Target], names: Sequence[str], words: WordList, against: AgainstSettings, shown: Shown
) -> None:
    """Sends each server a whole round of content that is not measured."""
    plan = targets[0].plan
    count = plan.workload.num_prompts
    prompts = await warm_up_prompts(plan, words, count, skip=against.rounds * count)
    for name, target in zip(names, targets, strict=True):
        shown.say(f"warming up {name} with {count} requests")
        await target.warm_up(prompts)


async def _take(target: Target, prompts: Sequence[WorkloadPrompt], seed: int, shown: Shown) -> Passage:
    passage = await target.take(prompts, seed, shown)
    if not any(outcome.is_ok for outcome in passage.outcomes):
        first = passage.outcomes[0]
        raise ConfigError(
            f"{target.plan.target.url} answered none of {len(prompts)} requests, so there is nothing to compare; "
            f"the first: {first.error}: {first.message}"
        )
    return passage


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


def _round(passage: Passage, plan: ServingPlan) -> Round:
    good = [outcome for outcome in passage.outcomes if outcome.is_ok]
    limits = plan.output.limits_ms()
    totals = {key: float(value) for key, value in token_figures(good, passage.samples, 1.0).items() if value}
    totals["request_throughput"] = float(len(good))
    if limits:
        totals["request_goodput"] = float(sum(is_good(outcome, limits) for outcome in good))
    return Round(passage.outcomes, passage.duration_s, totals)


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
