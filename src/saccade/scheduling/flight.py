"""A step between its launch and its results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from saccade.scheduling.executing import StepResult, Ticket
from saccade.scheduling.matcher import Matcher
from saccade.scheduling.pass_log import PassEntry
from saccade.scheduling.pooling import Pooled
from saccade.scheduling.step_plan import Chunk, RowError, StepPlan
from saccade.wire.update import NO_NUMBERS


@dataclass(slots=True, kw_only=True)
class Flight:
    """`problem` says why not all of it was launched."""

    plan: StepPlan
    ticket: Ticket | None = None
    sampled: Sequence[Chunk] = ()
    matchers: Mapping[str, Matcher] = field(default_factory=dict)  # of sampled requests with a grammar
    failed: Mapping[str, str] = field(default_factory=dict)  # image errors by request
    pooled: Pooled = field(default_factory=Pooled)
    problem: str = ""
    passes: PassEntry | None = None

    @property
    def is_running(self) -> bool:
        try:
            return self.ticket is not None and not self.ticket.is_done
        except Exception:  # the device failed: waiting for the step will say so again
            return False

    def results(self, result: StepResult) -> dict[str, Sequence[int] | RowError]:
        """A token or an error for each request, nothing where a vector was asked for. Advances matchers by the sampled
        tokens and vectors by their sums."""
        tokens = {chunk.request_id: token for chunk, token in zip(self.sampled, result.token_ids, strict=True)}
        for name, matcher in self.matchers.items():
            matcher.take(tokens[name])
        errors = {name: matcher.error for name, matcher in self.matchers.items() if matcher.error is not None}
        errors |= {c.request_id: NO_NUMBERS for c, bad in zip(self.sampled, result.is_bad, strict=True) if bad}
        errors |= self.failed
        return {
            **{name: (token,) for name, token in tokens.items() if name not in errors},
            **{name: RowError(message) for name, message in errors.items()},
            **self.pooled.add(result),
        }
