"""What is done with a step's logits: which requests need a sampler, its inputs, edits and masks of rows. Pure."""

from collections.abc import Sequence

import numpy as np

from saccade.scheduling.arrays import Running
from saccade.scheduling.matcher import MaskedRow, allowed_bits
from saccade.scheduling.orders import Arrays, Begin, Edit
from saccade.scheduling.plan import Chunk
from saccade.wire.sampling_params import SamplingParams

FLOATS = {
    "temperature": 0.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # with what leaves a padded row alone


def needs_sampler(params: SamplingParams) -> bool:
    """Whether argmax of the raw logits is not enough to pick this request's token."""
    return params.temperature != 0 or has_edits(params) or has_penalties(params) or params.grammar is not None


def has_penalties(params: SamplingParams) -> bool:
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)


def has_edits(params: SamplingParams) -> bool:
    return bool(params.logit_bias or params.allowed_token_ids or params.min_tokens)


def begin(owner: Running) -> Begin | None:
    """Prepare a sequence for its next request: what penalties count is that request's prompt and outputs."""
    if not has_penalties(owner.request.params):
        return None
    output_ids = np.asarray(owner.request.output_ids, dtype=np.int64)
    return Begin(owner.sequence, owner.prompt.token_ids.astype(np.int64), output_ids)


def sample_values(chunks: Sequence[Chunk], owners: Sequence[Running]) -> Arrays:
    """The parameters of these rows. A row's noise depends on its request's seed and on how many tokens came before."""
    counters = [chunk.end - len(owner.prompt.token_ids) for chunk, owner in zip(chunks, owners, strict=True)]
    params = [owner.request.params for owner in owners]
    return {
        "sequences": np.asarray([owner.sequence for owner in owners], dtype=np.int32),
        "seeds": np.asarray([owner.seed for owner in owners], dtype=np.int64),
        "counters": np.asarray(counters, dtype=np.int64),
        "top_k": np.asarray([p.top_k for p in params], dtype=np.int32),
        **{name: np.asarray([getattr(p, name) for p in params], dtype=np.float32) for name in FLOATS},
    }


def edits(chunks: Sequence[Chunk], owners: Sequence[Running], vocab_size: int) -> tuple[Edit, ...]:
    """Bias, minimum lengths and allowed tokens, for the few requests that ask for them."""
    found = []
    for row, (chunk, owner) in enumerate(zip(chunks, owners, strict=True)):
        params = owner.request.params
        if not has_edits(params):
            continue
        stops: list[int] = []
        if chunk.end - len(owner.prompt.token_ids) < params.min_tokens and params.grammar is None:
            # A checkpoint may name end tokens that it has no row for.
            stops = sorted(t for t in {*owner.request.eos_token_ids, *params.stop_token_ids} if t < vocab_size)
        bias, allowed = params.logit_bias or {}, params.allowed_token_ids
        found.append(
            Edit(
                row,
                bias_ids=np.asarray(list(bias), dtype=np.int64),
                biases=np.asarray(list(bias.values()), dtype=np.float32),
                suppressed_ids=np.asarray(stops, dtype=np.int64),
                allowed=allowed_bits(allowed, vocab_size, -(-vocab_size // 32)) if allowed else None,
            )
        )
    return tuple(found)


def masked_rows(chunks: Sequence[Chunk], owners: Sequence[Running]) -> list[MaskedRow]:
    """The rows whose tokens a grammar chooses. It alone may take an end token early, so ends are left to it."""
    rows = []
    for row, (chunk, owner) in enumerate(zip(chunks, owners, strict=True)):
        if owner.matcher is not None:
            params, eos = owner.request.params, owner.request.eos_token_ids
            is_early = chunk.end - len(owner.prompt.token_ids) < params.min_tokens
            ends = {*eos, *params.stop_token_ids} if is_early else eos if params.ignore_eos else ()
            rows.append(MaskedRow(row, owner.matcher, tuple(ends), params.allowed_token_ids))
    return rows
