"""Sampling as a phase: logits of the last pass to tokens, with every parameter as data.

N rows, V vocabulary, S sequences.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.execution.examples import SamplerExamples
from saccade.execution.language import head_buckets
from saccade.execution.state import DeviceState, runs
from saccade.graphs import Arena, Capacity, Fill, Frame, Phase, metadata, output
from saccade.scheduling.arrays import Running
from saccade.scheduling.matcher import MaskedRow
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


def sample_phase(state: DeviceState) -> Phase:
    """Edited logits to tokens: penalties, then temperature, min-p, top-k and top-p; temperature 0 is greedy."""
    buffers = [
        metadata("sequences", ("tokens",)),
        metadata("seeds", ("tokens",), torch.int64),
        metadata("counters", ("tokens",), torch.int64),
        metadata("top_k", ("tokens",)),
        *(metadata(name, ("tokens",), torch.float32, padding=Fill(value)) for name, value in FLOATS.items()),
        output("next_ids", ("tokens",), torch.int64),
    ]

    def body(frame: Frame) -> dict[str, Tensor]:
        logits_NV = state.edited[: frame.capacity["tokens"]]
        sequences_N = frame["sequences"]
        penalties = (frame[f"{name}_penalty"] for name in ("repetition", "presence", "frequency"))
        state.sampling.penalise(logits_NV, state.seen, sequences_N, *penalties)
        ids_N = state.sampling.sample(
            logits_NV,
            frame["temperature"],
            frame["top_k"],
            frame["top_p"],
            frame["min_p"],
            frame["seeds"],
            frame["counters"],
        )
        state.sampling.count_tokens(state.seen, sequences_N, ids_N, sequences_N > 0)
        state.newest_ids[sequences_N] = ids_N
        return {"next_ids": ids_N}

    def touched(values: Mapping[str, Any]) -> dict[str, Tensor]:
        """Counts of tokens matter only where there are penalties."""
        sequences = np.unique(np.asarray(values["sequences"])[_is_penalised(values)])
        return {
            "newest ids": state.newest_ids[1:],
            "edited logits": state.edited[: len(values["sequences"])],
            **runs(state.seen, sequences, "seen tokens"),
        }

    examples = SamplerExamples(state, FLOATS)
    return Phase(
        name="sample",
        body=body,
        arena=Arena(buffers, {"tokens": state.max_sequences}, state.logits.device),
        rows="tokens",
        buckets=tuple(Capacity.of(tokens=count) for count in head_buckets(state.max_sequences)),
        example=examples.make,
        state=state.watched(),
        set_up=examples.set_up,
        written=examples.written,
        writes=frozenset({"newest ids", "edited logits", "seen tokens"}),
        volatile_in=touched,
        volatile_out=touched,
    )


def needs_sampler(params: SamplingParams) -> bool:
    """Whether the likeliest token of the raw logits may be another one than is to be taken."""
    return not params.is_greedy or has_edits(params) or has_penalties(params) or params.grammar is not None


def has_penalties(params: SamplingParams) -> bool:
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)


def _is_penalised(values: Mapping[str, Any]) -> Any:
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    return np.any([np.asarray(values[name]) != FLOATS[name] for name in names], axis=0)


def has_edits(params: SamplingParams) -> bool:
    return bool(params.logit_bias or params.allowed_token_ids or params.min_tokens)


def sample_values(chunks: Sequence[Chunk], running: Mapping[str, Running]) -> dict[str, Any]:
    """The parameters of these rows. A row's noise depends on its request's seed and on how many tokens came before."""
    owners = [running[chunk.request_id] for chunk in chunks]
    counters = [chunk.end - len(owner.prompt) for chunk, owner in zip(chunks, owners, strict=True)]
    params = [owner.request.params for owner in owners]
    return {
        "sequences": np.asarray([owner.sequence for owner in owners], dtype=np.int32),
        "seeds": np.asarray([owner.seed for owner in owners], dtype=np.int64),
        "counters": np.asarray(counters, dtype=np.int64),
        "top_k": np.asarray([p.top_k for p in params], dtype=np.int32),
        **{name: np.asarray([getattr(p, name) for p in params], dtype=np.float32) for name in FLOATS},
    }


def edit_logits(state: DeviceState, chunks: Sequence[Chunk], running: Mapping[str, Running]) -> None:
    """Bias, minimum lengths and allowed tokens, for the few requests that ask for them; row by row, not in a graph."""
    for row, chunk in enumerate(chunks):
        owner = running[chunk.request_id]
        params, logits_1V = owner.request.params, state.edited[row : row + 1]
        if params.logit_bias:
            ids = _row(list(params.logit_bias), torch.int64, state)
            values = _row(list(params.logit_bias.values()), torch.float32, state)
            state.sampling.apply_bias(logits_1V, ids, values)
        if chunk.end - len(owner.prompt) < params.min_tokens and params.grammar is None:
            vocab_size = state.logits.shape[1]  # a checkpoint may name end tokens that it has no row for
            stops = sorted(t for t in {*owner.request.eos_token_ids, *params.stop_token_ids} if t < vocab_size)
            active = torch.ones(1, dtype=torch.bool, device=state.logits.device)
            state.sampling.suppress(logits_1V, _row(stops, torch.int64, state), active)
        if params.allowed_token_ids:
            allowed = allowed_bits(params.allowed_token_ids, state.logits.shape[1])
            state.sampling.allow_only(logits_1V, _to_device(allowed[None], state))


def masked_rows(chunks: Sequence[Chunk], running: Mapping[str, Running]) -> list[MaskedRow]:
    """The rows whose tokens a grammar chooses. It alone may take an end token early, so ends are left to it."""
    rows = []
    for row, chunk in enumerate(chunks):
        owner = running[chunk.request_id]
        if owner.matcher is not None:
            params, eos = owner.request.params, owner.request.eos_token_ids
            is_early = chunk.end - len(owner.prompt) < params.min_tokens
            ends = {*eos, *params.stop_token_ids} if is_early else eos if params.ignore_eos else ()
            rows.append(MaskedRow(row, owner.matcher, tuple(ends), params.allowed_token_ids))
    return rows


def allowed_bits(token_ids: Sequence[int], vocab_size: int) -> Tensor:
    """Bit t % 32 of word t // 32 is set for each allowed token t."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[[token for token in token_ids if token < vocab_size]] = 1
    words = np.packbits(bits.reshape(-1, 32), axis=1, bitorder="little").view("<i4").reshape(-1)
    return torch.from_numpy(words.copy())


def _row(values: Sequence[float], dtype: torch.dtype, state: DeviceState) -> Tensor:
    return _to_device(torch.tensor([list(values)], dtype=dtype), state)


def _to_device(tensor: Tensor, state: DeviceState) -> Tensor:
    if state.logits.is_cuda:
        return tensor.pin_memory().to(state.logits.device, non_blocking=True)
    return tensor
