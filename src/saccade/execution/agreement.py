"""Checks that every rank did the same with each message. Ranks that diverge must stop, or a collective would hang."""

from dataclasses import dataclass, field

from saccade.execution.rank_messages import OrderOutcome

MAX_LATE = 512  # how many messages a rank may lag behind the others
MAX_SHOWN = 300  # characters of a digest


@dataclass(slots=True)
class _Step:
    """A message that some ranks have not finished."""

    ended_at: float  # on the first rank to finish
    outcomes: dict[int, OrderOutcome] = field(default_factory=dict)
    failed_at: float | None = None  # on the first rank to fail


class Agreement:
    """Outcomes by message and rank, kept until every rank has finished the message."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._open: dict[int, _Step] = {}  # oldest first: every rank finishes messages in order

    def note(self, rank: int, sequence: int, outcome: OrderOutcome, now: float) -> str | None:
        """Returns how this rank differs from rank 0, as soon as both have reported."""
        step = self._open.setdefault(sequence, _Step(now))
        assert rank not in step.outcomes, f"rank {rank} reported step {sequence} twice"
        step.outcomes[rank] = outcome
        if outcome.error and step.failed_at is None:
            step.failed_at = now
        oldest, late = next(iter(self._open.items()))
        assert sequence - oldest < MAX_LATE, f"rank {self._missing(late)} has not reported step {oldest}"
        if len(step.outcomes) == self._num_ranks:
            del self._open[sequence]
        if 0 not in step.outcomes:
            return None
        others = (other for other in step.outcomes if other and rank in (0, other))
        return next((why for other in others if (why := _difference(sequence, step.outcomes, other))), None)

    def stuck(self, now: float, limit_s: float) -> str | None:
        """Describes a message in which one rank failed and another still waits in a collective `limit_s` later."""
        for sequence, step in self._open.items():
            if step.failed_at is not None and now - step.failed_at > limit_s:
                failed = next(rank for rank, outcome in step.outcomes.items() if outcome.error)
                return (
                    f"rank {failed} failed in step {sequence}, and rank {self._missing(step)} has not finished it "
                    f"{limit_s:g} s later: {step.outcomes[failed].error}"
                )
        return None

    def is_left_by(self, rank: int) -> bool:
        """Whether a rank failed in a message that others have not finished: they may wait for it in a collective."""
        return any(rank in step.outcomes and step.outcomes[rank].error for step in self._open.values())

    def waiting(self, now: float, limit_s: float) -> str | None:
        """Describes a message that rank 0 has not finished `limit_s` after another rank did; never if `limit_s` is
        0."""
        for sequence, step in self._open.items() if limit_s else ():
            if 0 not in step.outcomes and now - step.ended_at > limit_s:
                rank, outcome = next(iter(step.outcomes.items()))
                return (
                    f"rank 0 has not finished step {sequence}, {limit_s:g} s after rank {rank}, which did "
                    f"{outcome.digest[:MAX_SHOWN]!r}"
                )
        return None

    def _missing(self, step: _Step) -> int:
        return min(set(range(self._num_ranks)) - set(step.outcomes))


def _difference(sequence: int, known: dict[int, OrderOutcome], rank: int) -> str | None:
    first, other = known[0], known[rank]
    if bool(first.error) != bool(other.error):
        failed, well = (rank, 0) if other.error else (0, rank)
        return f"rank {failed} failed in step {sequence} where rank {well} did not: {known[failed].error}"
    if first.error_type != other.error_type:
        return f"rank {rank} failed differently from rank 0 in step {sequence}: {other.error}; rank 0: {first.error}"
    if first.digest != other.digest:
        ours, theirs = first.digest[:MAX_SHOWN], other.digest[:MAX_SHOWN]
        return f"rank {rank} diverged from rank 0 in step {sequence}: it did {theirs!r}; rank 0: {ours!r}"
    return None
