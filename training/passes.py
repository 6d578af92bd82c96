"""Forward and backward passes, compiled, and on a GPU captured."""

import time
from collections.abc import Callable

import torch
from torch.nn import functional

from training.marks import Guide
from training.model import Batch, Model

Key = tuple[str, tuple[int, int]]
SPARE_BYTES = 12 << 30
"""With less GPU memory left, torch's cache is emptied before a capture, which cannot do so itself."""


class Passes:
    """Forward and backward passes over batches that are made on the fly.

    With `graphs`, a kind of batch is captured the second time it occurs, including the drawing of its pictures, and
    replayed from then on. Every replay gets new random numbers from torch's generator, and gradients accumulate in
    place. Values that the host drew during the capture stay frozen.
    """

    def __init__(
        self,
        model: Model,
        *,
        guide: Guide | None = None,
        graphs: bool,
        log: Callable[[str], None],
        end_id: int = 0,
        limit_bytes: int = 0,
    ) -> None:
        """`end_id` is the token that ends an answer. `limit_bytes` bounds the memory of the run; 0 sets no limit."""
        self.model, self.guide, self.graphs, self.log, self.end_id = model, guide, graphs, log, end_id
        self.limit_bytes = limit_bytes
        device = next(model.parameters()).device
        self.losses = torch.zeros(2, device=device)
        self.answers = torch.zeros((), dtype=torch.long, device=device)
        self.guidance = torch.ones((), device=device)
        """The weight of the guide's loss, which may change between replays."""
        self.seen: set[Key] = set()
        self.captured: dict[Key, torch.cuda.CUDAGraph] = {}
        self.parameters = [part for part in model.parameters() if part.requires_grad]
        self.parameters += guide.parameters() if guide is not None else ()
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)

    def run(self, key: Key, make: Callable[[], Batch], weight: float, slot: int) -> None:
        if not self.seen:
            self._compile(make(), weight, slot)
        if key[0] not in {kind for kind, _ in self.seen}:
            self._first(key, make, weight, slot)
        elif self._has_graph(key, make, weight, slot):
            self.captured[key].replay()
        else:
            self._eager(make(), weight, slot)
        self.seen.add(key)

    def _has_graph(self, key: Key, make: Callable[[], Batch], weight: float, slot: int) -> bool:
        """Whether there is a graph of this kind. The second batch of a kind is captured here. If that fails, for
        example because other programs use the memory, no further graphs are captured."""
        if self.graphs and key in self.seen and key not in self.captured:
            try:
                self._capture(key, make, weight, slot)
            except Exception as error:  # torch may raise anything, and a slow run is better than none
                self.log(f"no graph of {key} and no further ones: {type(error).__name__}: {str(error)[:500]}")
                self.graphs = False
                torch.cuda.empty_cache()
        return key in self.captured

    def _capture(self, key: Key, make: Callable[[], Batch], weight: float, slot: int) -> None:
        """Like torch.cuda.graph on the current stream, but without emptying the cache each time, because later passes
        would have to allocate it all again."""
        torch.cuda.synchronize()
        if self._spare_bytes() < SPARE_BYTES:
            torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=next(iter(self.captured.values())).pool() if self.captured else None)
        try:
            self._eager(make(), weight, slot)
        finally:
            graph.capture_end()
        self.captured[key] = graph

    def _spare_bytes(self) -> int:
        """The free memory of the device that this run may still take."""
        free, total = torch.cuda.mem_get_info()
        return min(free, (self.limit_bytes or total) - torch.cuda.memory_reserved())

    def _compile(self, batch: Batch, weight: float, slot: int) -> None:
        """Compiles, or continues without if that fails, because a slow run is better than none. Gradients are dropped,
        because a failure leaves those of half a pass."""
        started = time.perf_counter()
        try:
            self._eager(batch, weight, slot)
            self.log(f"the first pass took {time.perf_counter() - started:.1f} s")
        except Exception as error:  # a compiler may raise anything
            self.log(f"without torch.compile: {type(error).__name__}: {str(error)[:2000]}")
            torch.compiler.set_stance("force_eager")
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.grad.zero_()
        self.answers.zero_()

    def _first(self, key: Key, make: Callable[[], Batch], weight: float, slot: int) -> None:
        """Runs the first batch of a kind and logs its time. More than a second or two means that it was recompiled."""
        started = time.perf_counter()
        self._eager(make(), weight, slot)
        self.log(f"the first {key[0]} {key[1]} took {time.perf_counter() - started:.1f} s")

    def _eager(self, batch: Batch, weight: float, slot: int) -> None:
        levels = self.model.see(batch)
        logits = self.model.answer(batch, levels).float().flatten(0, 1)
        loss = functional.cross_entropy(logits, batch.targets.flatten(), ignore_index=-100)
        total = loss * weight
        if self.guide is not None and batch.marks is not None and levels is not None:
            total = total + self.guidance * self.guide(levels[0], batch.marks)
        total.backward()
        self.losses[slot].copy_(loss.detach())
        self.answers.add_((batch.targets == self.end_id).sum())
