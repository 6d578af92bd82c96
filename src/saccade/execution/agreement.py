"""Whether all ranks did the same with every message. Ranks that did not must not go on: a collective would hang."""

from dataclasses import dataclass, field

from saccade.execution.rank_messages import OrderOutcome

MAX_KEPT = 512  # messages
MAX_SHOWN = 300  # characters of a digest


@dataclass(slots=True)
class _Step:
    """What is known of one message; when the first rank had ended it, and when the first one said that it failed."""

    outcomes: dict[int, OrderOutcome] = field(default_factory=dict)
    ended_at: float | None = None
    failed_at: float | None = None


class Agreement:
    """Outcomes by message and rank. They are kept for a while, for those who ask for answers."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._steps: dict[int, _Step] = {}
        self._open: set[int] = set()  # messages that some rank has answered, and some have not

    def note(self, rank: int, sequence: int, outcome: OrderOutcome, now: float) -> str | None:
        """Returns what differs between this rank and rank 0, as soon as both have said what they did."""
        step = self._steps.get(sequence) or self._begin(sequence)
        assert rank not in step.outcomes, f"rank {rank} has said before what it did in step {sequence}"
        step.outcomes[rank] = outcome
        step.ended_at = now if step.ended_at is None else step.ended_at
        if outcome.error and step.failed_at is None:
            step.failed_at = now
        self._open.add(sequence)
        if len(step.outcomes) == self._num_ranks:
            self._open.remove(sequence)
        if 0 not in step.outcomes:
            return None
        others = (other for other in step.outcomes if other and rank in (0, other))
        return next((why for other in others if (why := _difference(sequence, step.outcomes, other))), None)

    def answers(self, sequence: int) -> tuple[OrderOutcome, ...] | None:
        """Those of ranks 1 and up; None until all are there."""
        known = self._steps[sequence].outcomes if sequence in self._steps else {}
        ranks = range(1, self._num_ranks)
        return tuple(known[rank] for rank in ranks) if all(rank in known for rank in ranks) else None

    def stuck(self, now: float, limit_s: float) -> str | None:
        """Says so if one rank failed at a message and another has not ended it for so long: it waits in a
        collective."""
        for sequence in sorted(self._open):
            step = self._steps[sequence]
            if step.failed_at is not None and now - step.failed_at > limit_s:
                failed = next(rank for rank, outcome in step.outcomes.items() if outcome.error)
                hung = min(set(range(self._num_ranks)) - set(step.outcomes))
                return (
                    f"rank {failed} failed in step {sequence}, which rank {hung} has not ended {limit_s:g} s later: "
                    f"{step.outcomes[failed].error}"
                )
        return None

    def waiting(self, now: float, limit_s: float) -> str | None:
        """A message that another rank has ended and rank 0 has not for so long, if there is a limit: it waits for what
        the other one did not do."""
        for sequence in sorted(self._open) if limit_s else ():
            step = self._steps[sequence]
            if 0 not in step.outcomes and step.ended_at is not None and now - step.ended_at > limit_s:
                rank, outcome = next(iter(step.outcomes.items()))
                return (
                    f"rank 0 has not ended step {sequence} {limit_s:g} s after rank {rank}, which did: "
                    f"{outcome.digest[:MAX_SHOWN]!r}"
                )
        return None

    def _begin(self, sequence: int) -> _Step:
        self._steps[sequence] = step = _Step()
        if len(self._steps) > MAX_KEPT:
            oldest = next(iter(self._steps))
            missing = sorted(set(range(self._num_ranks)) - set(self._steps.pop(oldest).outcomes))
            assert not missing, f"rank {missing[0]} has not said what it did in step {oldest}"
        return step


def _difference(sequence: int, known: dict[int, OrderOutcome], rank: int) -> str | None:
    first, other = known[0], known[rank]
    if bool(first.error) != bool(other.error):
        failed, well = (rank, 0) if other.error else (0, rank)
        return f"rank {failed} failed in step {sequence} where rank {well} did not: {known[failed].error}"
    if first.error_type != other.error_type:
        return f"rank {rank} failed otherwise than rank 0 in step {sequence}: {other.error}; rank 0: {first.error}"
    if first.digest != other.digest:
        ours, theirs = first.digest[:MAX_SHOWN], other.digest[:MAX_SHOWN]
        return f"rank {rank} did something else than rank 0 in step {sequence}: {theirs!r}; rank 0: {ours!r}"
    return None
