"""Reads the prompts of a call of `LLM`."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from types import TracebackType
from typing import Generic, Self, TypeVar

from rich.progress import Progress

from saccade.inputs.placeholders import Prompt
from saccade.machine import usable_cores
from saccade.offline.llm_inputs import naming_prompt

MAX_THREADS = 16
KEPT_BYTES = 2 * 2**30

Item = TypeVar("Item")


class PromptReader(Generic[Item]):
    """All prompts are read before the first runs, so that an error in one loses no work. Threads read them, because
    decoding one image after another would keep a GPU waiting. Pixels beyond KEPT_BYTES are dropped and read again, a
    few prompts ahead, while the engine works. Iterate once."""

    def __init__(self, items: Sequence[Item], read: Callable[[Item], Prompt]) -> None:
        self._items, self._read = items, read
        self._num_threads = min(MAX_THREADS, usable_cores())
        self._pool = ThreadPoolExecutor(self._num_threads, "prompts")
        self._prompts: list[Prompt | None] = []  # None if it has to be read again, or was handed over
        self._kept_bytes = 0
        self._lock = Lock()  # guards the line above

    def __len__(self) -> int:
        return len(self._items)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read_all(self, bar: Progress) -> None:
        """Raises the error of the first prompt that has one."""
        task = bar.add_task("reading", total=len(self))
        for prompt in self._pool.map(self._first, range(len(self))):
            self._prompts.append(prompt)
            bar.advance(task)

    def __iter__(self) -> Iterator[Prompt]:
        dropped = iter([i for i, prompt in enumerate(self._prompts) if prompt is None])
        again: deque[Future[Prompt]] = deque()
        for i in range(len(self)):
            while len(again) < self._num_threads and (idx := next(dropped, None)) is not None:
                again.append(self._pool.submit(self._one, idx))
            prompt, self._prompts[i] = self._prompts[i], None
            yield again.popleft().result() if prompt is None else prompt

    def _first(self, index: int) -> Prompt | None:
        prompt = self._one(index)
        with self._lock:
            fits = self._kept_bytes + prompt.pixel_bytes <= KEPT_BYTES
            self._kept_bytes += prompt.pixel_bytes if fits else 0
        return prompt if fits else None

    def _one(self, index: int) -> Prompt:
        with naming_prompt(index, len(self)):
            return self._read(self._items[index])
