"""Arrays for a plan's passes and sampler: host numpy, no device. T token rows, R requests, M blocks of a table.

They have the dtypes of their buffers. With any other dtype the arena would check whether every number fits."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from saccade.inputs.placeholders import Prompt
from saccade.scheduling.executing import Lap
from saccade.scheduling.matcher import MaskedRow, Matcher, allowed_bits
from saccade.scheduling.orders import Arrays, Begin, Edit, TokenRules
from saccade.scheduling.request import Request
from saccade.scheduling.step_plan import Chunk
from saccade.wire.sampling_params import SamplingParams

AnyInts = NDArray[np.integer[Any]]

FLOATS = {
    "temperature": 0.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # neutral values, for padded rows


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that has not ended. `sequence` is its row in every per-sequence tensor while it runs, and otherwise 0,
    the row for padding. `matcher` tracks where its output is in its grammar."""

    request: Request
    prompt: Prompt
    sequence: int = 0
    seed: int = 0
    matcher: Matcher | None = None
    compiled: LLMatcher | None = None  # its grammar, to be copied into `matcher`
    started: float | None = None  # when it first ran
    first_token: float | None = None  # when it got its first token
    laps: list[Lap] = field(default_factory=list)  # of vision passes that had its images
    pooled: NDArray[np.float32] | None = None  # sum of the rows pooled so far, or the picked logits
    _allowed: NDArray[np.int32] | None = None

    def allowed_words(self, vocab_size: int) -> NDArray[np.int32] | None:
        """A mask with bit t % 32 of word t // 32 set for each allowed token t; None if all are allowed."""
        token_ids = self.request.params.allowed_token_ids
        if token_ids and self._allowed is None:
            self._allowed = allowed_bits(token_ids, vocab_size)
        return self._allowed

    def timings(self, now: float) -> dict[str, float]:
        found = {"queue": (now if self.started is None else self.started) - self.request.arrival}
        if self.started is not None:
            found["prefill"] = (now if self.first_token is None else self.first_token) - self.started
        if self.first_token is not None:
            found["decode"] = now - self.first_token
        vision = [seconds for lap in self.laps if (seconds := lap.seconds()) is not None]
        return found | ({"vision": sum(vision)} if vision else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    block_size: int
    max_blocks: int
    page_rows: int
    has_vision: bool
    has_limits: bool


def is_decode(chunks: Sequence[Chunk], live: Mapping[str, LiveRequest]) -> bool:
    """Whether every request has one row, that of its newest output."""
    return all(
        chunk.count == 1 and chunk.wants_logits and chunk.start >= len(live[chunk.request_id].prompt.token_ids)
        for chunk in chunks
    )


def mixed_values(chunks: Sequence[Chunk], live: Mapping[str, LiveRequest], layout: CacheLayout) -> dict[str, AnyInts]:
    """Inputs of a prefill pass: packed rows of prompts and outputs."""
    parts = [_rows(chunk, live[chunk.request_id], layout) for chunk in chunks]
    values = parts[0]
    if len(parts) > 1:
        values = {name: np.concatenate([part[name] for part in parts], axis=-1) for name in values}
    return {
        **values,
        "query_start": np.asarray([*accumulate((chunk.count for chunk in chunks), initial=0)], np.int32),
        "key_lengths": np.fromiter((chunk.end for chunk in chunks), np.int32, len(chunks)),
        "block_tables": _block_tables(chunks, layout),
    }


def decode_values(chunks: Sequence[Chunk], live: Mapping[str, LiveRequest], layout: CacheLayout) -> dict[str, AnyInts]:
    """Inputs of a decode pass. Faster than `mixed_values`: it reads only a few numbers per request."""
    owners = [live[chunk.request_id] for chunk in chunks]
    starts = np.fromiter((chunk.start for chunk in chunks), np.int64, len(chunks))
    pending = [owner.sequence if c.is_pending_input else -1 for c, owner in zip(chunks, owners, strict=True)]
    ids = [0 if c.is_pending_input else _token(owner, c.start) for c, owner in zip(chunks, owners, strict=True)]
    positions = np.empty((3, len(chunks)), np.int32)
    positions[:] = starts + [owner.prompt.rope_delta for owner in owners]
    tables = _block_tables(chunks, layout)
    blocks = tables[np.arange(len(chunks)), starts // layout.block_size].astype(np.int64)
    return {
        "ids": np.asarray(ids, np.int32),
        "pending": np.asarray(pending, np.int32),
        "positions": positions,
        "slots": blocks * layout.block_size + starts % layout.block_size,
        "sequences": np.fromiter((owner.sequence for owner in owners), np.int32, len(chunks)),
        "query_start": np.arange(len(chunks) + 1, dtype=np.int32),
        "key_lengths": np.fromiter((chunk.end for chunk in chunks), np.int32, len(chunks)),
        "block_tables": tables,
    }


def _rows(chunk: Chunk, owner: LiveRequest, layout: CacheLayout) -> dict[str, AnyInts]:
    num_prompt = len(owner.prompt.token_ids)
    in_prompt = slice(chunk.start, min(chunk.end, num_prompt))
    ids, positions = owner.prompt.token_ids[in_prompt], owner.prompt.positions_3T[:, in_prompt]
    if chunk.end > num_prompt:
        outputs = np.arange(max(chunk.start, num_prompt), chunk.end, dtype=np.int32)
        known = [0] * len(outputs) if chunk.is_pending_input else [_token(owner, int(i)) for i in outputs]
        ids = np.concatenate([ids, np.asarray(known, dtype=np.int32)])
        positions = np.concatenate([positions, np.tile(outputs + owner.prompt.rope_delta, (3, 1))], axis=1)
    rows = {
        "ids": ids,
        "pending": np.full(chunk.count, owner.sequence if chunk.is_pending_input else -1, np.int32),
        "positions": positions,
        "slots": places(chunk.start, chunk.count, chunk.blocks, layout.block_size),
    }
    if layout.has_vision:
        rows["sources"] = _sources(chunk, layout.page_rows)
    if layout.has_limits:
        rows["limits"] = _limits(chunk, owner, in_prompt)
    return rows


def _token(owner: LiveRequest, index: int) -> int:
    num_prompt = len(owner.prompt.token_ids)
    return int(owner.prompt.token_ids[index]) if index < num_prompt else owner.request.output_ids[index - num_prompt]


def places(first: int, count: int, pages: Sequence[int], page_size: int) -> AnyInts:
    """Where rows `first` to `first + count` of an item are in paged storage."""
    assert first + count <= len(pages) * page_size, f"rows {first} to {first + count} in {len(pages)} pages"
    first_page, skipped = divmod(first, page_size)
    used = np.asarray(pages[first_page : -(-(first + count) // page_size)], dtype=np.int64)
    return (used[:, None] * page_size + np.arange(page_size)).reshape(-1)[skipped : skipped + count]


def _sources(chunk: Chunk, page_rows: int) -> AnyInts:
    sources = np.full(chunk.count, -1, np.int32)
    for media in chunk.media:
        rows = places(media.first_row, media.count, media.pages, page_rows)
        sources[media.start - chunk.start :][: media.count] = rows
    return sources


def _limits(chunk: Chunk, owner: LiveRequest, in_prompt: slice) -> AnyInts:
    limits = np.zeros(chunk.count, dtype=np.int32)
    if owner.prompt.limits_T is not None:
        taken = owner.prompt.limits_T[in_prompt]
        limits[: len(taken)] = taken
    return limits


def _block_tables(chunks: Sequence[Chunk], layout: CacheLayout) -> AnyInts:
    longest = max((len(chunk.blocks) for chunk in chunks), default=0)
    assert longest <= layout.max_blocks, f"a request has {longest} blocks; a table has room for {layout.max_blocks}"
    tables = np.zeros((len(chunks), layout.max_blocks), dtype=np.int32)
    for i, chunk in enumerate(chunks):  # takes less than half the time of assigning to a row
        struct.pack_into(f"={len(chunk.blocks)}i", tables.data, i * tables.strides[0], *chunk.blocks)
    return tables


def needs_sampler(params: SamplingParams) -> bool:
    """Whether argmax of the raw logits is not enough to pick this request's token."""
    return params.temperature != 0 or has_edits(params) or has_penalties(params) or params.grammar is not None


def has_penalties(params: SamplingParams) -> bool:
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)


def has_edits(params: SamplingParams) -> bool:
    return bool(params.logit_bias or params.allowed_token_ids or params.min_tokens)


def begin(owner: LiveRequest, vocab_size: int) -> Begin | None:
    """The order that prepares a sequence for a request with penalties or rules; None if it has neither."""
    params = owner.request.params
    prompt_ids = output_ids = np.zeros(0, dtype=np.int64)
    if has_penalties(params):
        prompt_ids = owner.prompt.token_ids.astype(np.int64)
        output_ids = np.asarray(owner.request.output_ids, dtype=np.int64)
    elif not has_edits(params):
        return None
    return Begin(owner.sequence, prompt_ids, output_ids, _rules(owner, vocab_size) if has_edits(params) else None)


def _rules(owner: LiveRequest, vocab_size: int) -> TokenRules:
    """Made once per request: turning a list of allowed tokens into bits takes milliseconds."""
    params = owner.request.params
    bias = params.logit_bias or {}
    # A checkpoint may name end tokens outside its vocabulary.
    ends = sorted(t for t in {*owner.request.eos_token_ids, *params.stop_token_ids} if t < vocab_size)
    return TokenRules(
        bias_ids=np.asarray(list(bias), dtype=np.int64),
        biases=np.asarray(list(bias.values()), dtype=np.float32),
        end_ids=np.asarray(ends, dtype=np.int64),
        allowed=owner.allowed_words(vocab_size),
    )


def sample_values(chunks: Sequence[Chunk], owners: Sequence[LiveRequest]) -> Arrays:
    """Sampling parameters by row. A row's noise depends on its request's seed and number of outputs so far."""
    counters = [chunk.end - len(owner.prompt.token_ids) for chunk, owner in zip(chunks, owners, strict=True)]
    params = [owner.request.params for owner in owners]
    return {
        "sequences": np.asarray([owner.sequence for owner in owners], dtype=np.int32),
        "seeds": np.asarray([owner.seed for owner in owners], dtype=np.int64),
        "counters": np.asarray(counters, dtype=np.int64),
        "top_k": np.asarray([p.top_k for p in params], dtype=np.int32),
        **{name: np.asarray([getattr(p, name) for p in params], dtype=np.float32) for name in FLOATS},
    }


def edits(chunks: Sequence[Chunk], owners: Sequence[LiveRequest]) -> tuple[Edit, ...]:
    """Edits for requests that have rules. With a grammar, the grammar handles end tokens."""
    return tuple(
        Edit(row, owner.sequence, params.grammar is None and _is_early(chunk, owner))
        for row, (chunk, owner) in enumerate(zip(chunks, owners, strict=True))
        if has_edits(params := owner.request.params)
    )


def _is_early(chunk: Chunk, owner: LiveRequest) -> bool:
    """Whether a request has fewer outputs than `min_tokens`."""
    return chunk.end - len(owner.prompt.token_ids) < owner.request.params.min_tokens


def masked_rows(chunks: Sequence[Chunk], owners: Sequence[LiveRequest], vocab_size: int) -> list[MaskedRow]:
    """Rows that must follow a grammar. End tokens that come too early are allowed only if the grammar has no other."""
    rows = []
    for row, (chunk, owner) in enumerate(zip(chunks, owners, strict=True)):
        if owner.matcher is not None:
            params, eos = owner.request.params, owner.request.eos_token_ids
            ends = {*eos, *params.stop_token_ids} if _is_early(chunk, owner) else eos if params.ignore_eos else ()
            rows.append(MaskedRow(row, owner.matcher, tuple(ends), owner.allowed_words(vocab_size)))
    return rows
