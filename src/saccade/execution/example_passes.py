"""Made-up inputs of language passes and of the sampler, for warm-ups, captures, the gate and verification.

Every input has content that matters, so that one which a graph had frozen shows in what the pass puts out or writes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.execution.state import DeviceState
from saccade.models.vlm import Model

SHARE_PENDING, SHARE_SEEN = 0.5, 0.25  # of the rows: tokens of earlier steps, rows of images
MOST_BLOCKS = 3  # of a context
SAMPLING = {
    "temperature": (0.5, 2.0),
    "top_p": (0.2, 0.9),
    "min_p": (0.1, 0.9),
    "repetition_penalty": (1.0, 1.5),
    "presence_penalty": (0.0, 1.0),
    "frequency_penalty": (0.0, 1.0),
}
FILTERS = ("top_p", "min_p", "top_k")


def chance_from(rng: torch.Generator) -> np.random.Generator:
    return np.random.default_rng(int(torch.randint(2**31, (), generator=rng)))


def example_prompts(model: Model, state: DeviceState, lengths: tuple[int, ...], rng: torch.Generator) -> dict[str, Any]:
    """Whole prompts of these lengths, each in blocks of its own: tokens of earlier steps and rows of images among their
    ids, positions with gaps."""
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
    """One row for each request, behind contexts of random lengths, some of several blocks."""
    count, chance = sum(lengths), chance_from(rng)
    blocks = max(1, min(MOST_BLOCKS, state.max_blocks, (state.num_blocks - 1) // max(count, 1)))
    contexts = chance.integers(1, blocks * state.block_size + 1, count)
    return {
        **_tokens(model, state, count, chance),
        "positions": np.tile(contexts - 1, (3, 1)),
        "query_start": np.arange(count + 1),
        "sequences": state.some_sequences(count, rng),
        **_places(state, (1,) * count, contexts.tolist(), chance),
    }


def _tokens(model: Model, state: DeviceState, count: int, chance: np.random.Generator) -> dict[str, Any]:
    return {
        "ids": chance.integers(0, model.spec.decoder.vocab_size, count),
        "pending": _some(chance, SHARE_PENDING, chance.integers(1, state.max_sequences + 1, count)),
    }


def _some(chance: np.random.Generator, share: float, values: Any) -> Any:
    """These values in some of the rows, -1 in the others."""
    return np.where(chance.random(len(values)) < share, values, -1)


def _limits(length: int, chance: np.random.Generator) -> Any:
    """An image somewhere in a prompt, whose rows see to its end."""
    first, end = sorted(chance.integers(0, length + 1, 2))
    limits = np.zeros(length, dtype=np.int32)
    limits[first:end] = end
    return limits


def _places(
    state: DeviceState, lengths: Sequence[int], contexts: Sequence[int], chance: np.random.Generator
) -> dict[str, Any]:
    """Any blocks for each request; one that finds too few left, or is longer than a request may be, writes to the
    padding block alone and has no keys."""
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


class SamplerExamples:
    """Parameters of rows, and the logits and seen tokens that they are applied to. `off` says which value of a
    parameter leaves a row alone."""

    def __init__(self, state: DeviceState, off: Mapping[str, float]) -> None:
        self._state, self._off = state, off

    def make(self, lengths: tuple[int, ...], rng: torch.Generator) -> dict[str, Any]:
        count, chance = sum(lengths), chance_from(rng)
        floats = {name: chance.uniform(low, high, count) for name, (low, high) in SAMPLING.items()}
        chosen = chance.choice(FILTERS, count)  # one a row: of several, one hides what the others do
        for name in floats.keys() & FILTERS:
            floats[name] = np.where(chosen == name, floats[name], self._off[name])
        return {
            "sequences": self._state.some_sequences(count, rng),
            "seeds": chance.integers(0, 2**62, count),
            "counters": chance.integers(0, 2**20, count),
            "top_k": np.where(chosen == "top_k", chance.integers(1, 5, count), 0),
            **{name: values.astype(np.float32) for name, values in floats.items()},
        }

    def set_up(self, values: Mapping[str, Any]) -> None:
        """The same for the same example."""
        state, count = self._state, len(values["seeds"])
        same = torch.Generator(state.edited.device).manual_seed(int(values["seeds"].sum() % 2**62) if count else 0)
        state.edited[:count].normal_(0, 2, generator=same)
        counts = torch.empty_like(state.edited[:count]).uniform_(0, 3, generator=same)
        state.seen[state.sequences_of(values)] = counts.int()
        state.forget_newest(values)

    def written(self, values: Mapping[str, Any]) -> dict[str, Tensor]:
        state = self._state
        state.seen[state.sequences_of(values)] = 0
        return {**state.newest(values), "edited logits": state.edited[: len(values["seeds"])].clone()}
