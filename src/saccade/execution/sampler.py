"""The sampling phase: from the last pass's logits to tokens, with all parameters as data. N rows, V vocabulary."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.execution.example_passes import chance_from
from saccade.execution.state import DeviceState, runs
from saccade.graphs import Arena, Capacity, Fill, Frame, Phase, metadata, output
from saccade.scheduling.arrays import FLOATS
from saccade.scheduling.buckets import head_buckets

# Ranges of example parameters.
RANGES = {
    "temperature": (0.5, 2.0),
    "top_p": (0.2, 0.9),
    "min_p": (0.1, 0.9),
    "repetition_penalty": (1.0, 1.5),
    "presence_penalty": (0.0, 1.0),
    "frequency_penalty": (0.0, 1.0),
}
FILTERS = ("top_p", "min_p", "top_k")


def sample_phase(state: DeviceState) -> Phase:
    """Turns edited logits into tokens: penalties, then temperature, min-p, top-k and top-p. Temperature 0 is greedy."""
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
        names = ("temperature", "top_k", "top_p", "min_p", "seeds", "counters")
        ids_N, _ = state.sampling.sample(logits_NV, *(frame[name] for name in names))
        state.sampling.count_tokens(state.seen, sequences_N, ids_N, sequences_N > 0)
        state.newest_ids[sequences_N] = ids_N
        return {"next_ids": ids_N}

    def set_up(values: Mapping[str, Any]) -> None:
        """Sets logits and seen tokens, always to the same values for the same example."""
        count = len(values["seeds"])
        same = torch.Generator(state.edited.device).manual_seed(int(values["seeds"].sum() % 2**62) if count else 0)
        state.edited[:count].normal_(0, 2, generator=same)
        counts = torch.empty_like(state.edited[:count]).uniform_(0, 3, generator=same)
        state.seen[state.sequences_of(values)] = counts.int()
        state.newest_ids[state.sequences_of(values)] = 0

    def written(values: Mapping[str, Any]) -> dict[str, Tensor]:
        sequences = state.sequences_of(values)
        state.seen[sequences] = 0
        return {"newest ids": state.newest_ids[sequences], "edited logits": state.edited[: len(sequences)].clone()}

    return Phase(
        name="sample",
        body=body,
        arena=Arena(buffers, {"tokens": state.max_sequences}, state.logits.device),
        rows="tokens",
        buckets=tuple(Capacity.of(tokens=count) for count in head_buckets(state.max_sequences)),
        example=partial(_example, state),
        state=state.watched(),
        set_up=set_up,
        written=written,
        writes=frozenset({"newest ids", "edited logits", "seen tokens"}),
        volatile_in=partial(_touched, state),
        volatile_out=partial(_touched, state),
    )


def _example(state: DeviceState, lengths: tuple[int, ...], rng: torch.Generator) -> dict[str, Any]:
    count, chance = sum(lengths), chance_from(rng)
    floats = {name: chance.uniform(low, high, count) for name, (low, high) in RANGES.items()}
    chosen = chance.choice(FILTERS, count)  # one filter per row, because several would hide each other's effect
    for name in floats.keys() & FILTERS:
        floats[name] = np.where(chosen == name, floats[name], FLOATS[name])
    return {
        "sequences": state.example_sequences(count, rng),
        "seeds": chance.integers(0, 2**62, count),
        "counters": chance.integers(0, 2**20, count),
        "top_k": np.where(chosen == "top_k", chance.integers(1, 5, count), 0),
        **{name: values.astype(np.float32) for name, values in floats.items()},
    }


def _touched(state: DeviceState, values: Mapping[str, Any]) -> dict[str, Tensor]:
    """State that a pass reads and writes. Token counts matter only in rows with penalties."""
    sequences = np.unique(np.asarray(values["sequences"])[_is_penalised(values)])
    return {
        "newest ids": state.newest_ids[1:],
        "edited logits": state.edited[: len(values["sequences"])],
        **runs(state.seen, sequences, "seen tokens"),
    }


def _is_penalised(values: Mapping[str, Any]) -> Any:
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    return np.any([np.asarray(values[name]) != FLOATS[name] for name in names], axis=0)
