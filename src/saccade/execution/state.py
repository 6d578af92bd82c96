"""Tensors that live as long as the engine and never move or grow: caches, vision rows, newest tokens, logits. N rows
of logits, V vocabulary, L levels of vision rows, E rows of the encoder cache, D width."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.graphs import Watched
from saccade.kernels.dispatch import SamplingKernels
from saccade.layers.layer import EXCHANGE_MEMORY, Layer
from saccade.layers.step import Cache
from saccade.models.vlm import Model

TOKEN_STATE = frozenset({"newest ids", "logits"})  # written by every pass that produces tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """Tensors that graphs use besides their arenas. Padding writes to sequence 0, block 0 and vision page 0."""

    model: Model
    caches: Sequence[Cache]
    vision_rows: Tensor | None  # (L, E, D)
    newest_ids: Tensor  # by sequence: the token sampled last
    logits: Tensor  # (N, V) float32, from the last head or decode pass
    edited: Tensor  # (N, V) float32, a copy that the sampler changes
    seen: Tensor  # (sequences, V) int32, counts of prompt and output tokens for penalties
    sampling: SamplingKernels
    max_blocks: int  # per request

    @property
    def num_blocks(self) -> int:
        return self.caches[0][0].shape[0]

    @property
    def block_size(self) -> int:
        return self.caches[0][0].shape[1]

    @property
    def max_keys(self) -> int:
        return self.max_blocks * self.block_size

    @property
    def max_sequences(self) -> int:
        return self.logits.shape[0]

    @property
    def vision_row_bytes(self) -> int:
        """Bytes of one row of the encoder cache, over all levels."""
        return 0 if self.vision_rows is None else self.vision_rows[:, 0].nbytes

    def example_sequences(self, count: int, rng: torch.Generator) -> Tensor:
        """Distinct random sequences, for examples."""
        return (torch.randperm(self.max_sequences, generator=rng)[:count] + 1).int()

    def sequences_of(self, values: Mapping[str, Any]) -> Tensor:
        return torch.as_tensor(values["sequences"], device=self.newest_ids.device).long()

    def scores(self, values: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tokens a pass wrote, and the logits they come from: a token alone would hide a small error."""
        newest, logits = self.newest_ids[self.sequences_of(values)], self.logits[: len(values["sequences"])]
        return {"newest ids": newest, "logits": logits.clone()}

    def forget_keys(self, values: Mapping[str, Any]) -> None:
        """Clears the keys and values that a pass writes, so that an earlier run's cannot be mistaken for its own."""
        slots = torch.as_tensor(values["slots"], device=self.newest_ids.device).long()
        for cache in (part for pair in self.caches for part in pair):
            cache.flatten(0, 1).index_fill_(0, slots, 0)

    def forget_scores(self, values: Mapping[str, Any]) -> None:
        self.newest_ids[self.sequences_of(values)] = 0
        self.logits[: len(values["sequences"])] = 0

    def cache_names(self) -> frozenset[str]:
        """Names, as in `watched`, of the KV caches and of the memory through which ranks exchange data."""
        return frozenset(self._named_caches()) | self.exchange_names()

    def exchange_names(self) -> frozenset[str]:
        return frozenset() if self.model.decoder.exchange is None else frozenset({EXCHANGE_MEMORY})

    def _named_caches(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for i, (keys, values) in enumerate(self.caches):
            found |= {f"keys of layer {i}": keys, f"values of layer {i}": values}
        return found

    def reads_newest(self, values: Mapping[str, Any]) -> dict[str, Tensor]:
        """What a language pass reads, besides its inputs, that the next one overwrites."""
        return {"newest ids": self.newest_ids}

    def writes_scores(self, values: Mapping[str, Any]) -> dict[str, Tensor]:
        """What a pass that produces tokens writes besides its outputs, without padding's sequence 0."""
        return {"newest ids": self.newest_ids[1:], "logits": self.logits[: len(values["sequences"])]}

    def watched(self, decoder: Layer | None = None) -> Watched:
        """What a language pass (a sampler, without `decoder`) touches. Graphs refuse to replay if any of it moved."""
        named = {
            "newest ids": self.newest_ids,
            "logits": self.logits,
            "edited logits": self.edited,
            "seen tokens": self.seen,
        }
        if decoder is None:
            return Watched.of(named)
        named |= self._named_caches()
        if self.vision_rows is not None:
            named["vision rows"] = self.vision_rows
        return Watched(dict(decoder.parameter_locations()), dict(decoder.reference_locations())) | named


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSizes:
    """Sizes of the state's tensors. `num_blocks` and `num_vision_rows` include padding; `max_sequences` does not."""

    num_blocks: int
    block_size: int
    max_blocks: int
    max_sequences: int
    num_vision_rows: int


def runs(tensor: Tensor, rows: NDArray[np.integer[Any]], name: str) -> dict[str, Tensor]:
    """Views of these rows of a tensor, one per run of consecutive rows."""
    if not len(rows):
        return {}
    ends = np.flatnonzero(np.diff(rows) != 1) + 1
    bounds = [0, *ends.tolist(), len(rows)]
    firsts = [int(rows[start]) for start in bounds[:-1]]
    lengths = np.diff(bounds).tolist()
    return {f"{name} {first}": tensor.narrow(0, first, n) for first, n in zip(firsts, lengths, strict=True)}


def new_state(model: Model, sampling: SamplingKernels, sizes: StateSizes) -> DeviceState:
    place, spec = model.place, model.spec
    logits = (sizes.max_sequences, spec.decoder.vocab_size)
    vision_rows = None
    if spec.vision is not None:
        vision_rows = place.parameter(spec.vision.levels, sizes.num_vision_rows, spec.decoder.width)
    return DeviceState(
        model=model,
        caches=model.decoder.new_caches(sizes.num_blocks, sizes.block_size),
        vision_rows=vision_rows,
        newest_ids=torch.zeros(sizes.max_sequences + 1, dtype=torch.int64, device=place.device),
        logits=torch.zeros(logits, dtype=torch.float32, device=place.device),
        edited=torch.zeros(logits, dtype=torch.float32, device=place.device),
        seen=torch.zeros(sizes.max_sequences + 1, logits[1], dtype=torch.int32, device=place.device),
        sampling=sampling,
        max_blocks=sizes.max_blocks,
    )
