"""The phases of language passes: `prefill` for prompts and mixed batches, `decode` with one row per request, and
`head`, which turns rows of a prefill into logits and tokens. T token rows, R requests, M blocks of a table, N rows of
logits, D width, V vocabulary, L levels of vision rows."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.execution.example_passes import example_prompts, example_rows
from saccade.execution.state import TOKEN_STATE, DeviceState, runs
from saccade.graphs import Arena, Buffer, Capacity, Fill, Frame, Phase, boundaries, bridge, metadata, output
from saccade.kernels.reference_sampling import TokenPlaces
from saccade.layers.step import Step
from saccade.models.vlm import Model
from saccade.scheduling.buckets import decode_buckets, head_buckets, prefill_buckets


def prefill_phase(model: Model, state: DeviceState, max_tokens: int) -> Phase:
    """Turns rows of any number of requests, prompts and outputs mixed, into the rows that the head reads."""
    buffers = [
        *_row_buffers(model),
        *_request_buffers(model, state),
        output("trunk", ("tokens", model.spec.decoder.width), model.place.dtype),
    ]

    def body(frame: Frame) -> dict[str, Tensor]:
        return {"trunk": model.decoder.trunk(_step(model, state, frame, max_query=frame.capacity["tokens"]))}

    return Phase(
        name="prefill",
        body=body,
        arena=Arena(buffers, {"tokens": max_tokens, "requests": state.max_sequences + 1}, model.place.device),
        rows="tokens",
        buckets=prefill_buckets(max_tokens, state.max_sequences + 1),
        example=lambda lengths, rng: example_prompts(model, state, lengths, rng),
        typical=state.max_keys,
        state=state.watched(model.decoder),
        is_repeatable=True,
        set_up=state.forget_keys,
        writes=state.cache_names(),
        volatile_in=state.reads_newest,
    )


def decode_phase(model: Model, state: DeviceState) -> Phase:
    """Turns one row of each request into its next token. Padded rows are separate requests without keys."""
    buffers = [
        *(buffer for buffer in _row_buffers(model) if buffer.name not in ("limits", "sources")),
        *_request_buffers(model, state, longest=1),
        *_token_buffers(),
    ]

    def body(frame: Frame) -> dict[str, Tensor]:
        hidden_TD = model.decoder.body(_step(model, state, frame, max_query=1))
        return _tokens(model, state, hidden_TD, frame)

    def set_up(values: Mapping[str, Any]) -> None:
        state.forget_keys(values)
        state.forget_scores(values)

    return Phase(
        name="decode",
        body=body,
        arena=Arena(buffers, {"tokens": state.max_sequences, "requests": state.max_sequences}, model.place.device),
        rows="tokens",
        buckets=tuple(Capacity.of(tokens=n, requests=n) for n in decode_buckets(state.max_sequences)),
        example=lambda lengths, rng: example_rows(model, state, lengths, rng),
        state=state.watched(model.decoder),
        set_up=set_up,
        written=state.scores,
        writes=state.cache_names() | TOKEN_STATE,
        volatile_in=state.reads_newest,
        volatile_out=state.writes_scores,
    )


def head_phase(model: Model, state: DeviceState, trunk_TD: Tensor) -> Phase:
    """Turns selected rows of the prefill's output into their next tokens, through the last MLP."""
    limits = {"tokens": state.max_sequences}

    def body(frame: Frame) -> dict[str, Tensor]:
        return _tokens(model, state, model.decoder.finish(trunk_TD[frame["rows"]]), frame)

    def example(lengths: tuple[int, ...], rng: torch.Generator) -> dict[str, Any]:
        count = sum(lengths)
        rows = torch.randint(0, trunk_TD.shape[0], (count,), generator=rng)
        return {"rows": rows, "sequences": state.example_sequences(count, rng)}

    def set_up(values: Mapping[str, Any]) -> None:
        """Sets all rows, because a prefill leaves arbitrary values in padding."""
        same = torch.Generator(trunk_TD.device).manual_seed(0)
        trunk_TD.normal_(generator=same)
        state.forget_scores(values)

    def volatile(values: Mapping[str, Any]) -> dict[str, Tensor]:
        """Padding reads row 0, which affects how experts batch the other rows."""
        read = np.unique(np.append(values["rows"], 0))
        return {**runs(trunk_TD, read, "trunk"), **state.reads_newest(values)}

    return Phase(
        name="head",
        body=body,
        arena=Arena([metadata("rows", ("tokens",)), *_token_buffers()], limits, model.place.device),
        rows="tokens",
        buckets=tuple(Capacity.of(tokens=n) for n in head_buckets(state.max_sequences)),
        example=example,
        state=state.watched(model.decoder) | {"trunk": trunk_TD},
        is_repeatable=True,
        set_up=set_up,
        written=state.scores,
        writes=TOKEN_STATE | state.exchange_names(),
        volatile_in=volatile,
        volatile_out=state.writes_scores,
    )


def _row_buffers(model: Model) -> list[Buffer]:
    """Inputs of each row. Its token is the newest one of sequence `pending`, or if that is -1 the one in `ids`.
    `sources` is the row of the encoder cache to use instead, or -1."""
    buffers = [
        metadata("ids", ("tokens",)),
        metadata("pending", ("tokens",), padding=Fill(-1)),
        metadata("positions", (3, "tokens")),
        metadata("slots", ("tokens",), torch.int64),
    ]
    if model.spec.vision is not None:
        buffers.append(metadata("sources", ("tokens",), padding=Fill(-1)))
    if model.spec.sees_whole_image:
        buffers.append(metadata("limits", ("tokens",)))
    return buffers


def _request_buffers(model: Model, state: DeviceState, longest: int | None = None) -> list[Buffer]:
    """What attention reads of each request, and the bridges for its queries and results in piecewise graphs."""
    heads = model.decoder.layers[0].attention.qkv
    shape = ("tokens", heads.num_heads, heads.head_dim)
    return [
        boundaries("query_start", of="tokens", count="requests", longest=longest),
        metadata("key_lengths", ("requests",)),
        metadata("block_tables", ("requests", state.max_blocks)),
        bridge("q", shape, model.place.dtype),
        bridge("attn", shape, model.place.dtype),
    ]


def _token_buffers() -> list[Buffer]:
    """For passes that produce tokens: sequences, tokens, and whether logits are unusable (some NaN, or all -inf)."""
    return [
        metadata("sequences", ("tokens",)),
        output("next_ids", ("tokens",), torch.int64),
        output("is_bad", ("tokens",), torch.bool),
    ]


def _step(model: Model, state: DeviceState, frame: Frame, *, max_query: int) -> Step:
    ids_T = model.place.kernels.newest_tokens(frame["ids"], frame["pending"], state.newest_ids)
    if "sources" in frame:
        embeds_TD, deepstack_LTD = model.embed(ids_T, state.vision_rows, frame["sources"])
    else:
        embeds_TD, deepstack_LTD = model.embed(ids_T)
    return Step(
        embeds_TD=embeds_TD,
        positions_3T=frame["positions"],
        deepstack_LTD=deepstack_LTD,
        slots_T=frame["slots"],
        query_start_R1=frame["query_start"],
        key_lengths_R=frame["key_lengths"],
        block_tables_RM=frame["block_tables"],
        limits_T=frame.get("limits"),
        max_query=max_query,
        max_keys=state.max_keys,
        caches=state.caches,
        outside=frame.outside,
        is_warmup=frame.is_warmup,
    )


def _tokens(model: Model, state: DeviceState, hidden_ND: Tensor, frame: Frame) -> dict[str, Tensor]:
    """Stores logits for sampling and scoring, and the likeliest token of each sequence."""
    logits_NV = model.decoder.logits(hidden_ND, state.logits[: hidden_ND.shape[0]])
    places = TokenPlaces(frame["next_ids"], frame["is_bad"], state.newest_ids, frame["sequences"])
    ids_N, is_bad_N = state.sampling.greedy(logits_NV, places)
    return {"next_ids": ids_N, "is_bad": is_bad_N}
