"""Forward and backward passes, compiled and captured where a GPU can."""

import time
from collections.abc import Callable

import torch
from torch.nn import functional

from training.marks import Guide
from training.model import Batch, Model

Key = tuple[str, tuple[int, int]]
CROWDED = 0.6
"""Share of a GPU's memory above which what is cached is given back before a capture, which could not do so itself."""


class Passes:
    """Forward and backward passes over batches that are made on the way.

    With `graphs`, a kind of batch is captured when it comes for the second time, drawing and all, and replayed from
    then on: torch's own generator gives every replay other random numbers, and gradients are added up where they were
    allocated first. Host values that were drawn for the capture stay as they were.
    """

    def __init__(
        self, model: Model, *, guide: Guide | None = None, graphs: bool, log: Callable[[str], None], end_id: int = 0
    ) -> None:
        """`end_id` is the token that ends an answer."""
        self.model, self.guide, self.graphs, self.log, self.end_id = model, guide, graphs, log, end_id
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
        elif not self.graphs or key not in self.met:
            self._eager(make(), weight, slot)
        else:
            if key not in self.captured:
                self._capture(key, make, weight, slot)
            self.captured[key].replay()
        self.met.add(key)

    def _capture(self, key: Key, make: Callable[[], Batch], weight: float, slot: int) -> None:
        """As torch.cuda.graph does on the stream that is current, but without emptying the cache each time: the
        passes in between would have to ask the driver for all of it again."""
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        if free < (1 - CROWDED) * total:
            torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=next(iter(self.captured.values())).pool() if self.captured else None)
        try:
            self._eager(make(), weight, slot)
        finally:
            graph.capture_end()
        self.captured[key] = graph

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
