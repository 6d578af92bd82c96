"""A launched step, and its results: tokens, errors, and the vectors that some requests want instead of tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from saccade.scheduling.arrays import LiveRequest
from saccade.scheduling.executing import StepResult, Ticket
from saccade.scheduling.matcher import Matcher
from saccade.scheduling.pass_log import PassEntry
from saccade.scheduling.step_plan import Chunk, RowError, StepPlan
from saccade.wire.update import NO_HIDDEN_NUMBERS, NO_NUMBERS


@dataclass(slots=True, kw_only=True)
class Flight:
    """A step in flight. Of `summed` and `picked` requests it sums hidden states and picks logits. A request that is
    preempted meanwhile starts again without a vector. `problem` says why the step was not launched completely."""

    plan: StepPlan
    ticket: Ticket | None = None
    sampled: Sequence[Chunk] = ()
    matchers: Mapping[str, Matcher] = field(default_factory=dict)  # of sampled requests that have a grammar
    failed: Mapping[str, str] = field(default_factory=dict)  # image errors by request
    summed: Sequence[LiveRequest] = ()
    picked: Sequence[LiveRequest] = ()
    problem: str = ""
    passes: PassEntry | None = None

    @property
    def is_running(self) -> bool:
        try:
            return self.ticket is not None and not self.ticket.is_done
        except Exception:  # the device failed: waiting for the step will say so again
            return False

    def results(self, result: StepResult) -> dict[str, Sequence[int] | RowError]:
        """Returns a token or an error for each request, but no token for requests that want a vector. Advances matchers
        by the sampled tokens and adds to the vectors."""
        tokens = {chunk.request_id: token for chunk, token in zip(self.sampled, result.token_ids, strict=True)}
        for name, matcher in self.matchers.items():
            matcher.take(tokens[name])
        errors = {name: matcher.error for name, matcher in self.matchers.items() if matcher.error is not None}
        errors |= {c.request_id: NO_NUMBERS for c, bad in zip(self.sampled, result.is_bad, strict=True) if bad}
        errors |= self.failed
        for owners, vectors, problem in (
            (self.summed, result.sums, NO_HIDDEN_NUMBERS),
            (self.picked, result.picked, NO_NUMBERS),
        ):
            for owner, vector in zip(owners, vectors, strict=True):
                owner.pooled = vector if owner.pooled is None else owner.pooled + vector
                if not np.isfinite(vector).all():
                    errors[owner.request.id] = problem
        return {
            **{name: (token,) for name, token in tokens.items() if name not in errors},
            **{name: RowError(message) for name, message in errors.items()},
        }


def finished_vector(owner: LiveRequest) -> NDArray[np.float32] | None:
    """The vector of a request that ended well; None if it did not ask for one."""
    if owner.pooled is None or owner.request.params.pooling != "mean":
        return owner.pooled
    return owner.pooled / np.float32(len(owner.request.prompt_ids))
