"""Example inputs of language passes, for warm-up, capture, timing and verification. Every input affects the results, so
a graph that froze one is found out."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from saccade.execution.state import DeviceState
from saccade.models.vlm import Model

SHARE_PENDING, SHARE_SEEN = 0.5, 0.25  # of rows: those that take an earlier step's token, and those of images
MAX_BLOCKS = 3  # per context


def chance_from(rng: torch.Generator) -> np.random.Generator:
    return np.random.default_rng(int(torch.randint(2**31, (), generator=rng)))


def example_prompts(model: Model, state: DeviceState, lengths: tuple[int, ...], rng: torch.Generator) -> dict[str, Any]:
    """Whole prompts, each in its own blocks; ids include pending tokens and image rows, positions have gaps."""
    count, chance = sum(lengths), chance_from(rng)
    values: dict[str, Any] = {
        **_tokens(model, state, count, chance),
        "positions": np.cumsum(chance.integers(1, 4, (3, count)), axis=1),
        "query_start": np.cumsum([0, *lengths]),
        **_places(state, lengths, lengths, chance),
    }
    if state.vision_rows is not None:  # row 0 takes padding
        values["sources"] = _some(chance, SHARE_SEEN, chance.integers(1, state.vision_rows.shape[1], count))
    if model.spec.sees_whole_image:
        values["limits"] = np.concatenate([_limits(n, chance) for n in lengths])
    return values


def example_rows(model: Model, state: DeviceState, lengths: tuple[int, ...], rng: torch.Generator) -> dict[str, Any]:
    """One row per request, after contexts of random lengths, some of several blocks."""
    count, chance = sum(lengths), chance_from(rng)
    blocks = max(1, min(MAX_BLOCKS, state.max_blocks, (state.num_blocks - 1) // max(count, 1)))
    contexts = chance.integers(1, blocks * state.block_size + 1, count)
    return {
        **_tokens(model, state, count, chance),
        "positions": np.tile(contexts - 1, (3, 1)),
        "query_start": np.arange(count + 1),
        "sequences": state.example_sequences(count, rng),
        **_places(state, (1,) * count, contexts.tolist(), chance),
    }


def _tokens(model: Model, state: DeviceState, count: int, chance: np.random.Generator) -> dict[str, Any]:
    return {
        "ids": chance.integers(0, model.spec.decoder.vocab_size, count),
        "pending": _some(chance, SHARE_PENDING, chance.integers(1, state.max_sequences + 1, count)),
    }


def _some(chance: np.random.Generator, share: float, values: Any) -> Any:
    return np.where(chance.random(len(values)) < share, values, -1)


def _limits(length: int, chance: np.random.Generator) -> Any:
    """An image at a random place in a prompt, whose rows attend up to its end."""
    first, end = sorted(chance.integers(0, length + 1, 2))
    limits = np.zeros(length, dtype=np.int32)
    limits[first:end] = end
    return limits


def _places(
    state: DeviceState, lengths: Sequence[int], contexts: Sequence[int], chance: np.random.Generator
) -> dict[str, Any]:
    """Gives each request random blocks. If too few are left, or the request is too long, it writes only to the padding
    block and has no keys."""
    tables = np.zeros((len(lengths), state.max_blocks), dtype=np.int32)
    blocks = chance.permutation(state.num_blocks - 1) + 1
    key_lengths, slots, taken = [], [np.zeros(0, dtype=np.int64)], 0
    for row, length, context in zip(tables, lengths, contexts, strict=True):
        count = -(-context // state.block_size)
        if taken + count > len(blocks) or count > state.max_blocks:
            slots.append(np.zeros(length, dtype=np.int64))
            key_lengths.append(0)
            continue
        row[:count] = blocks[taken : taken + count]
        taken += count
        place = np.arange(context - length, context)
        slots.append(row[place // state.block_size].astype(np.int64) * state.block_size + place % state.block_size)
        key_lengths.append(context)
    return {
        "block_tables": tables,
        "key_lengths": np.asarray(key_lengths, dtype=np.int32),
        "slots": np.concatenate(slots),
    }
