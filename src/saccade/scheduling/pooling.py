"""Requests that ask for one vector instead of tokens: what a step computes for them, and what becomes of it. Pure
bookkeeping, on the host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from saccade.scheduling.arrays import LiveRequest
from saccade.scheduling.executing import StepResult
from saccade.scheduling.orders import PickLogits, PoolRows
from saccade.scheduling.step_plan import Chunk, RowError
from saccade.wire.update import NO_HIDDEN_NUMBERS, NO_NUMBERS


def pool_rows(chunks: Sequence[Chunk]) -> PoolRows | None:
    """The packed rows of a step that are summed. Those of a chunk follow the chunk before; padding is behind all."""
    parts, lengths, end = [], [], 0
    for chunk in chunks:
        end += chunk.count
        if chunk.num_summed:
            parts.append(np.arange(end - chunk.num_summed, end, dtype=np.int64))
            lengths.append(chunk.num_summed)
    return PoolRows(np.concatenate(parts), tuple(lengths)) if parts else None


def pick_logits(picked: Sequence[Chunk], live: Mapping[str, LiveRequest], first_row: int) -> tuple[PickLogits, ...]:
    """These chunks' rows of the head pass begin at `first_row`."""
    wanted = [live[chunk.request_id].request.params.pooled_token_ids for chunk in picked]
    return tuple(PickLogits(row, tuple(ids)) for row, ids in enumerate(wanted, start=first_row))


@dataclass(frozen=True, slots=True)
class Pooled:
    """The requests that a step computes something for, in the order of its results."""

    summed: tuple[LiveRequest, ...] = ()
    picked: tuple[LiveRequest, ...] = ()

    @classmethod
    def of(cls, chunks: Sequence[Chunk], live: Mapping[str, LiveRequest]) -> "Pooled":
        return cls(
            tuple(live[chunk.request_id] for chunk in chunks if chunk.num_summed),
            tuple(live[chunk.request_id] for chunk in chunks if chunk.picks_logits),
        )

    def add(self, result: StepResult) -> dict[str, RowError]:
        """Adds a step's vectors to those of its requests. Returns errors where numbers are broken. A request that was
        preempted meanwhile begins again without a vector."""
        errors = {}
        for owners, vectors, problem in (
            (self.summed, result.sums, NO_HIDDEN_NUMBERS),
            (self.picked, result.picked, NO_NUMBERS),
        ):
            for owner, vector in zip(owners, vectors, strict=True):
                owner.pooled = vector if owner.pooled is None else owner.pooled + vector
                if not np.isfinite(vector).all():
                    errors[owner.request.id] = RowError(problem)
        return errors


def finished_vector(owner: LiveRequest) -> NDArray[np.float32] | None:
    """What a request that ended well asked for."""
    if owner.pooled is None or owner.request.params.pooling != "mean":
        return owner.pooled
    return owner.pooled / np.float32(len(owner.request.prompt_ids))
