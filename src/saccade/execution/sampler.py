"""Sampling as a phase: logits of the last pass to tokens, with every parameter as data.

N rows, V vocabulary, S sequences.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.execution.example_passes import SamplerExamples
from saccade.execution.state import DeviceState, runs
from saccade.graphs import Arena, Capacity, Fill, Frame, Phase, metadata, output
from saccade.scheduling.buckets import head_buckets
from saccade.scheduling.sampler_inputs import FLOATS


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
        ids_N, _ = state.sampling.sample(
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


def _is_penalised(values: Mapping[str, Any]) -> Any:
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    return np.any([np.asarray(values[name]) != FLOATS[name] for name in names], axis=0)
