"""Forward and backward passes, compiled and captured where a GPU can."""

import time
from collections.abc import Callable

import torch
from torch.nn import functional

from training.marks import Guide
from training.model import Batch, Model

Key = tuple[str, tuple[int, int]]
SPARE_BYTES = 12 << 30
"""With less of a GPU's memory left, what is cached is given back before a capture, which could not do so itself."""


class Passes:
    """Forward and backward passes over batches that are made on the way.

    With `graphs`, a kind of batch is captured when it comes for the second time, drawing and all, and replayed from
    then on: torch's own generator gives every replay other random numbers, and gradients are added up where they were
    allocated first. Host values that were drawn for the capture stay as they were.
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
        """`end_id` is the token that ends an answer, `limit_bytes` the memory that the run may take; 0: all."""
        self.model, self.guide, self.graphs, self.log, self.end_id = model, guide, graphs, log, end_id
        self.limit_bytes = limit_bytes
        device = next(model.parameters()).device
        self.losses = torch.zeros(2, device=device)
        self.answers = torch.zeros((), dtype=torch.long, device=device)
        self.guidance = torch.ones((), device=device)
        """How much the guide's loss counts; may change between replays."""
        self.met: set[Key] = set()
        self.captured: dict[Key, torch.cuda.CUDAGraph] = {}
        self.parameters = [part for part in model.parameters() if part.requires_grad]
        self.parameters += guide.parameters() if guide is not None else ()
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)

    def run(self, key: Key, make: Callable[[], Batch], weight: float, slot: int) -> None:
        if not self.met:
            self._compile(make(), weight, slot)
        if key[0] not in {kind for kind, _ in self.met}:
            self._first(key, make, weight, slot)
        elif self._has_graph(key, make, weight, slot):
            self.captured[key].replay()
        else:
            self._eager(make(), weight, slot)
        self.met.add(key)

    def _has_graph(self, key: Key, make: Callable[[], Batch], weight: float, slot: int) -> bool:
        """Whether there is a graph of this kind, made now if its time has come. Where that fails, as it does when other
        programs take the memory, there are no more graphs than there are already."""
        if self.graphs and key in self.met and key not in self.captured:
            try:
                self._capture(key, make, weight, slot)
            except Exception as error:  # whatever torch raises: a slow run is better than none
                self.log(f"no graph of {key} and no further ones: {type(error).__name__}: {str(error)[:500]}")
                self.graphs = False
                torch.cuda.empty_cache()
        return key in self.captured

    def _capture(self, key: Key, make: Callable[[], Batch], weight: float, slot: int) -> None:
        """As torch.cuda.graph does on the stream that is current, but without emptying the cache each time: the
        passes in between would have to ask the driver for all of it again."""
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
        """What the device has left, and of that what this run may take."""
        free, total = torch.cuda.mem_get_info()
        return min(free, (self.limit_bytes or total) - torch.cuda.memory_reserved())

    def _compile(self, batch: Batch, weight: float, slot: int) -> None:
        """Compiles, and goes on without where that fails: a slow run is better than none. The gradients are dropped:
        after a failure they are those of half a pass."""
        started = time.perf_counter()
        try:
            self._eager(batch, weight, slot)
            self.log(f"the first pass took {time.perf_counter() - started:.1f} s")
        except Exception as error:  # whatever a compiler raises
            self.log(f"without torch.compile: {type(error).__name__}: {str(error)[:2000]}")
            torch.compiler.set_stance("force_eager")
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.grad.zero_()
        self.answers.zero_()

    def _first(self, key: Key, make: Callable[[], Batch], weight: float, slot: int) -> None:
        """The first batch of a kind, with its time: more than a second or two means that something is compiled anew."""
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
