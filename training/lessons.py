"""The batches that a run learns from."""

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
"""The weight of the second batch of a step, in which pairs, videos and texts take turns."""

_SIDE_GRIDS = {"pairs": PAIR_GRIDS, "videos": VIDEO_GRIDS, "texts": ((1, 1),)}

AHEAD = 2
"""How many steps ahead batches are prepared."""


@dataclass(frozen=True)
class Lesson:
    """The arguments of Passes.run for one batch."""

    key: Key
    make: Callable[[], Batch]
    weight: float
    slot: int


Lessons = tuple[Lesson, ...]
"""The lessons of one step."""


def make_lessons(
    recipe: Recipe,
    sizes: tuple[int, int],
    *,
    grids: Sequence[tuple[int, int]],
    always: str = "",
    parts: int = 1,
) -> Iterator[Lessons]:
    """Yields the lessons of each step, without end: `parts` batches of pictures, each in one of the `grids`, then
    pairs, videos or texts in turn; the kind called `always` is in every step. `sizes` has the number of pictures in a
    step, and of the others. The first steps show each grid once, largest first, so that smaller graphs reuse memory."""
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
    """Draws the pictures of lessons and encodes them with a frozen tower in another thread, because on a CPU that takes
    as long as training on them. The thread ends when the iterator is closed."""
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
        while worker.is_alive():  # it may be waiting for room in the queue
            with suppress(queue.Empty):
                ready.get(timeout=0.1)


def _seen(lesson: Lesson, model: Model) -> Lesson:
    batch = lesson.make()
    seen = replace(batch, levels=model.see(batch), patches=None)
    return replace(lesson, make=lambda: seen)
