"""What a run teaches, batch after batch."""

import queue
import random
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count

import torch

from training.batches import PAIR_GRIDS, VIDEO_GRIDS, Recipe
from training.model import Batch, Model
from training.passes import Key

SIDE_SHARE = 0.35
"""Weight of the second batch of a step: pairs, videos and text take turns in it."""

_SIDE_GRIDS = {"pairs": PAIR_GRIDS, "videos": VIDEO_GRIDS, "texts": ((1, 1),)}

AHEAD = 2
"""Steps whose batches are prepared while others are learned from."""


@dataclass(frozen=True)
class Lesson:
    """A batch to be made, and what Passes.run needs beside it."""

    key: Key
    make: Callable[[], Batch]
    weight: float
    slot: int


Lessons = tuple[Lesson, ...]
"""Those of one step."""


def make_lessons(
    recipe: Recipe,
    sizes: tuple[int, int],
    *,
    grids: Sequence[tuple[int, int]],
    always: str = "",
    parts: int = 1,
) -> Iterator[Lessons]:
    """For one step after the other, without end: pictures in `parts` batches of one of the `grids` each, then pairs,
    videos or texts in turn, those called `always` in every step. `sizes` are how many pictures a step has, and how many
    others. The first steps show every grid once, the largest first: memory that one graph has takes the next."""
    sides = ("pairs", "videos", "pairs", "texts")
    tour = sorted(dict.fromkeys(grids), key=lambda grid: -grid[0] * grid[1])
    for step in count():
        chosen = [tour[step]] * parts if step < len(tour) else random.choices(grids, k=parts)
        pictures = [_lesson(recipe, "pictures", grid, sizes[0] // parts, 1 / parts, 0) for grid in chosen]
        kinds = dict.fromkeys([sides[step % len(sides)], *([always] if always else [])])
        others = [_lesson(recipe, kind, random.choice(_SIDE_GRIDS[kind]), sizes[1], SIDE_SHARE, 1) for kind in kinds]
        yield *pictures, *others


def side_batch(batch: int) -> int:
    return max(8, batch // 4)


def _lesson(recipe: Recipe, kind: str, grid: tuple[int, int], batch: int, weight: float, slot: int) -> Lesson:
    return Lesson((kind, grid), lambda: getattr(recipe, kind)(grid, batch), weight, slot)


def prepare(steps: Iterator[Lessons], model: Model) -> Generator[Lessons, None, None]:
    """The same lessons, drawn and seen by a frozen tower in a thread of their own: on a CPU that takes as long as
    learning from them does. The thread ends when the iterator is closed."""
    ready: queue.Queue[Lessons | Exception] = queue.Queue(AHEAD)
    is_closed = threading.Event()

    @torch.no_grad()
    def work() -> None:
        try:
            for lessons in steps:
                ready.put(tuple(_seen(lesson, model) for lesson in lessons))
                if is_closed.is_set():
                    return
        except Exception as error:
            ready.put(error)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    try:
        while True:
            lessons = ready.get()
            if isinstance(lessons, Exception):
                raise lessons
            yield lessons
    finally:
        is_closed.set()
        while worker.is_alive():  # it may wait for room to put its last batch
            with suppress(queue.Empty):
                ready.get(timeout=0.1)


def _seen(lesson: Lesson, model: Model) -> Lesson:
    batch = lesson.make()
    seen = replace(batch, levels=model.see(batch), patches=None)
    return replace(lesson, make=lambda: seen)
