"""Requests packed into steps the way an engine does it, with poison wherever values must not matter."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from saccade.layers.step import Step
from saccade.models.vlm import Model

NAN = float("nan")


def call_inside(fn: Callable[..., Tensor], /, *args: Any, out: str, **bridged: Tensor) -> Tensor:
    return fn(*args, **bridged)


@dataclass
class Request:
    """A prompt with everything that the decoder needs; `done` tokens are already in the cache."""

    embeds_TD: Tensor
    positions_3T: Tensor
    deepstack_LTD: Tensor | None = None
    limits_T: Tensor | None = None
    blocks: list[int] = field(default_factory=list)
    done: int = 0

    @property
    def length(self) -> int:
        return self.embeds_TD.shape[0]

    def grow(self, embeds_TD: Tensor) -> None:
        """Adds text to a text prompt."""
        self.embeds_TD = torch.cat([self.embeds_TD, embeds_TD])
        self.positions_3T = text_positions(self.length)


def text_positions(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.int32).expand(3, -1)


class Engine:
    """Hands out blocks in a shuffled order and leaves block 0 to padding.

    Padded rows are always NaN. With `poison`, so are caches before they are written, and tables end in nonsense.
    """

    def __init__(
        self, model: Model, *, num_blocks: int = 64, block_size: int = 4, seed: int = 0, poison: bool = True
    ) -> None:
        self.model, self.block_size, self.poison = model, block_size, poison
        self.caches = model.decoder.new_caches(num_blocks, block_size)
        for keys, values in self.caches if poison else ():
            keys.fill_(NAN)
            values.fill_(NAN)
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1
        self.free: list[int] = order.tolist()

    def prefill(self, *requests: Request, padding: int = 3) -> list[Tensor]:
        """Hidden states of every row of the requests, all in one step."""
        return self.run([(request, request.length) for request in requests], padding=padding)

    def run(self, work: list[tuple[Request, int]], padding: int = 3) -> list[Tensor]:
        """Computes rows `done:stop` of each request together, then counts them as done."""
        hidden_TD = self.model.decoder.body(self.pack(work, padding))
        counts = [stop - request.done for request, stop in work]
        for request, stop in work:
            request.done = stop
        return list(hidden_TD[: sum(counts)].split(counts))

    def pack(self, work: list[tuple[Request, int]], padding: int = 3) -> Step:
        for request, stop in work:
            while len(request.blocks) * self.block_size < stop:
                request.blocks.append(self.free.pop())
        spans = [(request, slice(request.done, stop)) for request, stop in work]
        counts = [span.stop - span.start for _, span in spans]
        lengths = [stop for _, stop in work]
        positions = torch.cat([request.positions_3T[:, span] for request, span in spans], dim=1)
        deepstack = [r.deepstack_LTD[:, span] for r, span in spans if r.deepstack_LTD is not None]
        limits = [r.limits_T[span] for r, span in spans if r.limits_T is not None]
        slots = [slot for request, span in spans for slot in self._slots(request, span)]
        return Step(
            embeds_TD=_padded(torch.cat([r.embeds_TD[span] for r, span in spans]), padding, NAN),
            positions_3T=self._on_device(_padded(positions, padding, 7, dim=1)),
            deepstack_LTD=_padded(torch.cat(deepstack, dim=1), padding, NAN, dim=1) if deepstack else None,
            slots_T=self._ints(slots + [i % self.block_size for i in range(padding)]),
            query_start_R1=self._on_device(torch.tensor([0, *counts, padding]).cumsum(0).int()),
            key_lengths_R=self._ints([*lengths, 0]),
            block_tables_RM=self._tables([request.blocks for request, _ in spans]),
            limits_T=self._on_device(_padded(torch.cat(limits), padding, 0)) if limits else None,
            max_query=max(*counts, padding),
            max_keys=max(lengths),
            caches=self.caches,
            outside=call_inside,
        )

    def _slots(self, request: Request, span: slice) -> list[int]:
        size = self.block_size
        return [request.blocks[i // size] * size + i % size for i in range(span.start, span.stop)]

    def _tables(self, tables: list[list[int]]) -> Tensor:
        width = max(len(table) for table in tables) + 1
        filler = [999 if self.poison else 0]
        return self._on_device(torch.tensor([t + filler * (width - len(t)) for t in [*tables, []]]).int())

    def _ints(self, values: list[int]) -> Tensor:
        return self._on_device(torch.tensor(values, dtype=torch.int32))

    def _on_device(self, x: Tensor) -> Tensor:
        return x.to(self.model.place.device)


def _padded(x: Tensor, rows: int, value: float, dim: int = 0) -> Tensor:
    shape = list(x.shape)
    shape[dim] = rows
    return torch.cat([x, torch.full(shape, value, dtype=x.dtype, device=x.device)], dim=dim)
