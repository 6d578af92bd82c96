"""Compares replays with eager runs, in sequences that expose a graph which froze or leaked something.

A replay and an eager run of the same padded shapes launch the same kernels on the same numbers, so they are compared
bit for bit. An unpadded run shows whether padding is harmless. Its products add up in another order, so the allowed
error is estimated by row and channel (`compare.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import Tensor

from saccade.choice.key import Capacity, Decision, GraphKey, Reason
from saccade.config import Tier
from saccade.errors import GraphError
from saccade.graphs.compare import OutputDifference, bit_differences, error_differences, noisy_runs
from saccade.graphs.example_layouts import Values, compose, equal_totals, num_segments, random_layout
from saccade.graphs.phase import copy_out
from saccade.graphs.runner import GraphRunner

TensorDict = dict[str, Tensor]
Known = dict[tuple[int, Capacity | None, bool], TensorDict]
Consume = Callable[[Mapping[str, Tensor]], TensorDict]
Anywhere = Callable[[bool], bool]

POISON_EVERY = 4  # batches of the shuffled sequence
NUM_REPEATS = 3


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """One sequence on one graph. `difference` is the largest found, relative to eager results; 0 if all bits agree."""

    key: str
    sequence: str
    num_batches: int
    difference: float
    problem: str = ""

    @property
    def is_right(self) -> bool:
        return not self.problem


@dataclass(frozen=True, slots=True)
class VerifyReport:
    rows: tuple[VerifyRow, ...]

    @property
    def is_right(self) -> bool:
        """Whether at least one row was checked, and all of them passed."""
        return bool(self.rows) and all(row.is_right for row in self.rows)

    def __str__(self) -> str:
        lines = []
        for row in self.rows:
            verdict = "ok" if row.is_right else f"WRONG {row.problem}"
            lines.append(f"{row.key:<48} {row.sequence:<20} {row.num_batches:>4} {row.difference:>10.2e}  {verdict}")
        return "\n".join(lines)


def verify(
    runner: GraphRunner,
    *,
    consume: Consume = copy_out,
    seed: int = 0,
    buckets: Sequence[Capacity] | None = None,
    same_shape: bool = False,
    on_graph: Callable[[], None] = lambda: None,
    anywhere: Anywhere = bool,
) -> VerifyReport:
    """Run the adversarial sequences on captured buckets (all, or `buckets`), and on exact graphs if that tier is on. A
    replay costs its bucket's full size whatever is in it, so every batch serves several sequences. `consume` takes
    results out of the buffers: what it returns must survive later replays. `same_shape` skips the comparison of padded
    with unpadded eager runs. `on_graph` is called after each graph. If processes verify together, because their passes
    exchange tensors, `anywhere` says whether something holds in any of them: a sequence that ends early in one must end
    in all. An error is then raised instead of reported, because others may wait inside the pass that failed."""
    verifier = Verifier(runner, consume=consume, same_shape=same_shape, anywhere=anywhere)
    rng = torch.Generator().manual_seed(seed)
    rows: list[VerifyRow] = []
    keys = [graph.key for graph in runner.graphs if not graph.key.digest]
    keys = [key for key in keys if buckets is None or key.capacity in buckets]
    for key in keys:
        known: Known | None = {} if runner.phase.is_repeatable else None
        rows += [verifier.replays(key, *one, known=known) for one in _sequences(runner, key.capacity, rng).items()]
        on_graph()
    if rows:
        rows.append(verifier.across(keys, rng))
    if Tier.EXACT in runner.settings.tiers:
        smallest = min(buckets or runner.phase.buckets, key=lambda bucket: bucket[runner.phase.rows])
        rows.append(verifier.exact(smallest, rng))
    return VerifyReport(tuple(rows))


@dataclass(frozen=True, slots=True)
class Verifier:
    """Compares replays with eager runs, in one row for each sequence of batches. For the first fields see `verify`;
    which passes run must depend only on what `anywhere` says. `known` caches the eager results of batches that recur.
    With `poison`, everything except valid rows is filled with NaN before each replay."""

    runner: GraphRunner
    consume: Consume = copy_out
    same_shape: bool = False
    anywhere: Anywhere = bool
    known: Known | None = None
    poison: bool = False

    def replays(self, key: GraphKey, name: str, batches: Sequence[Values], *, known: Known | None = None) -> VerifyRow:
        """Replay one graph on batches that fit it, in order. Poisons if the name begins with "poisoned"."""
        runner, poison = self.runner, name.startswith("poisoned")

        def replay(values: Values) -> TensorDict:
            if poison:
                _poison(runner, key)
            runner.phase.set_up(values)
            return runner.replay(key, runner.phase.arena.admit(values), self.consume, poison=poison)

        verifier = replace(self, known=known, poison=poison)
        return verifier._row(str(key), name, batches, replay, lambda values: key.capacity)

    def in_parts(self, key: GraphKey, batches: Sequence[Values], between: Callable[[], None]) -> VerifyRow:
        """Replay one graph on batches part by part, and call `between` after each part but the last."""
        runner = self.runner
        num_parts = next(graph.num_parts for graph in runner.graphs if graph.key == key)
        decision = Decision(Tier.CAPACITY, Reason.FITS_BUCKET, key)

        def replay(values: Values) -> TensorDict:
            found: TensorDict = {}
            runner.phase.set_up(values)
            runner.begin(decision, values, lambda outputs: found.update(copy_out(outputs)))
            for end in range(1, num_parts + 1):
                runner.advance(key, end, num_parts)
                if end < num_parts:
                    between()
            return found

        verifier = replace(self, same_shape=True)
        return verifier._row(str(key), "in parts", batches, replay, lambda values: key.capacity)

    def across(self, keys: Sequence[GraphKey], rng: torch.Generator) -> VerifyRow:
        """Random layouts in all buckets, which share one pool: none may see what another left there."""
        phase = self.runner.phase
        layouts = [random_layout(phase, key.capacity, rng) for key in keys]
        order = torch.randperm(len(layouts), generator=rng).tolist()
        batches = [phase.example(layouts[i], rng) for i in order]
        turns = count()

        def poison_some() -> None:
            if next(turns) % POISON_EVERY == 0:
                _poison(self.runner, keys[int(torch.randint(len(keys), (), generator=rng))])

        return self._row_of_choice("all buckets", "shuffled", batches, before=poison_some)

    def exact(self, capacity: Capacity, rng: torch.Generator) -> VerifyRow:
        """Two structures of the same sizes, in the graphs that the runner chooses: neither may get the other's."""
        runner = self.runner
        one, other = equal_totals(runner.phase, capacity, rng)
        with _without_costs(runner):
            runner.capture_exact(runner.phase.example(one, rng))
        replays_before = runner.stats.replays[Tier.EXACT]
        batches = [runner.phase.example(part, rng) for part in (one, other, one, other)]
        row = replace(self, same_shape=True)._row_of_choice("exact", "equal totals", batches)
        if runner.stats.replays[Tier.EXACT] == replays_before:
            return VerifyRow(row.key, row.sequence, 0, row.difference, "no exact graph was replayed")
        return row

    def _row_of_choice(
        self, what: str, sequence: str, batches: Sequence[Values], *, before: Callable[[], None] = lambda: None
    ) -> VerifyRow:
        """A sequence run in the graphs that the runner itself chooses."""
        runner = self.runner

        def run(values: Values) -> TensorDict:
            before()
            runner.phase.set_up(values)
            return runner.run(values, self.consume)

        def capacity_chosen(values: Values) -> Capacity | None:
            """The capacity that the runner will pad a batch to; None if it runs unpadded."""
            key = runner.decide(runner.phase.arena.admit(values)).key
            return None if key is None or key.digest else key.capacity

        with _without_costs(runner):
            name = f"{runner.phase.name}/{runner.settings.mode} {what}"
            return self._row(name, sequence, batches, run, capacity_chosen)

    def _row(
        self,
        key: str,
        name: str,
        batches: Sequence[Values],
        run: Callable[[Values], TensorDict],
        capacity_of: Callable[[Values], Capacity | None],
    ) -> VerifyRow:
        """Run a sequence. Compare each result with an eager run at once, and again after all later replays."""
        kept: list[tuple[TensorDict, TensorDict, Values, Capacity | None]] = []
        worst = 0.0

        def wrong(difference: float, problem: str) -> VerifyRow:
            return VerifyRow(key, name, len(kept), difference, problem)

        def ended(found: Sequence[OutputDifference], problem: str) -> VerifyRow:
            """The sequence ends here, perhaps because of a difference in another process only."""
            return wrong(_size(found), problem.format(found[0])) if found else wrong(worst, "")

        try:
            for values in batches:
                at = capacity_of(values)
                harm = self._padding_errors(values, at)
                if self.anywhere(bool(harm)):
                    return ended(harm, "padding matters: {}")
                expected = self._cached_run(values, at, self.poison)
                actual = {**run(values), **self.runner.phase.written(values)}
                kept.append((actual, expected, values, at))
                found = self._differences(actual, expected, values, at)
                if self.anywhere(bool(found)):
                    repeats = [self._run(values, at, self.poison) for _ in range(NUM_REPEATS)]
                    is_repeated = not any(bit_differences(repeat, expected) for repeat in repeats)
                    return ended(found, "{}" if is_repeated else f"{{}}; {_NOT_REPEATED}")
                worst = max(worst, _size(bit_differences(actual, expected)))
            for actual, expected, values, at in kept:
                found = self._differences(actual, expected, values, at)
                if self.anywhere(bool(found)):
                    return ended(found, "a result changed after it was handed over: {}")
        except GraphError as error:
            return self._failed(wrong(float("inf"), str(error)), error)
        except RuntimeError as error:
            problem = f"the body fails on a batch padded to its bucket: {str(error).splitlines()[0]}"
            return self._failed(wrong(float("inf"), problem), error)
        return VerifyRow(key, name, len(batches), worst)

    def _failed(self, row: VerifyRow, error: Exception) -> VerifyRow:
        if self.anywhere is not bool:
            raise GraphError(f"graph [{row.key}] fails in sequence {row.sequence!r}: {row.problem}") from error
        return row

    def _differences(
        self, actual: TensorDict, expected: TensorDict, values: Values, at: Capacity | None
    ) -> list[OutputDifference]:
        """Bit for bit, unless the phase has nondeterministic kernels."""
        if not self.runner.phase.nondeterministic:
            return bit_differences(actual, expected)
        return self._beyond_error(actual, expected, values, at, self.poison)

    def _padding_errors(self, values: Values, at: Capacity | None) -> list[OutputDifference]:
        """Outputs that change with the content of padding or, without `same_shape`, with its presence."""
        if at is None or (self.same_shape and not self.poison):
            return []
        padded, found = self._cached_run(values, at, False), []
        if self.poison:
            found = self._beyond_error(self._cached_run(values, at, True), padded, values, at, False)
        if not self.same_shape and not self.anywhere(bool(found)):
            found = self._beyond_error(padded, self._run(values, None, False), values, None, False)
        return found

    def _beyond_error(
        self, actual: TensorDict, expected: TensorDict, values: Values, at: Capacity | None, poison: bool
    ) -> list[OutputDifference]:
        if not self.anywhere(bool(bit_differences(actual, expected))):
            return []
        return error_differences(actual, expected, noisy_runs(lambda: self._run(values, at, poison)))

    def _cached_run(self, values: Values, at: Capacity | None, poison: bool) -> TensorDict:
        if self.known is None:
            return self._run(values, at, poison)
        key = id(values), at, poison
        if key not in self.known:
            self.known[key] = self._run(values, at, poison)
        return self.known[key]

    def _run(self, values: Values, at: Capacity | None, poison: bool) -> TensorDict:
        phase = self.runner.phase
        phase.set_up(values)
        return {**self.runner.eager(values, copy_out, at=at, poison=poison), **phase.written(values)}


@contextmanager
def _without_costs(runner: GraphRunner) -> Iterator[None]:
    """Forget measured costs, so that no batch runs eagerly because that is faster."""
    costs, runner.catalogue.costs = runner.catalogue.costs, None
    try:
        yield
    finally:
        runner.catalogue.costs = costs


_NOT_REPEATED = (
    "eager runs of this batch differ from each other as well: a pass leaves something for the next, or a kernel is not "
    "deterministic (name it in Phase.nondeterministic)"
)


def _size(differences: Sequence[OutputDifference]) -> float:
    return max((one.size for one in differences), default=0.0)


def _poison(runner: GraphRunner, key: GraphKey) -> None:
    """Replay without valid rows on NaN, so that the graph's temporaries hold NaN before the next replay."""
    arena = runner.phase.arena
    arena.poison(key.capacity)
    runner.replay(key, arena.empty_batch(), lambda outputs: None, poison=True)


def _sequences(runner: GraphRunner, capacity: Capacity, rng: torch.Generator) -> dict[str, list[Values]]:
    """Batches by sequence, without those that exceed the bucket in some dimension, such as windows."""
    one, other = equal_totals(runner.phase, capacity, rng)
    full = compose(capacity[runner.phase.rows], num_segments(runner.phase, capacity), rng)
    made = {lengths: runner.phase.example(lengths, rng) for lengths in (one, other, (1,), full)}
    arena = runner.phase.arena
    fitting = {part for part, values in made.items() if arena.misfit(arena.admit(values).sizes, capacity) is None}
    sequences = {
        "equal totals": [one, other, one],
        "small-large-small": [(1,), full, (1,)],
        "poisoned": [other],
    }
    return {name: [made[part] for part in parts if part in fitting] for name, parts in sequences.items()}
