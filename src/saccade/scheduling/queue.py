"""A queue of requests that is always in order and from which any request can leave."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from saccade.scheduling.request import Request


class RequestQueue:
    """Requests sorted by a key that is unique and does not change while they are in."""

    def __init__(self, key: Callable[[Request], Any]) -> None:
        self.num_prompt_tokens = 0
        self._key = key
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """In order. The one that was given last may leave before the next is asked for."""
        index = 0
        while index < len(self._requests):
            request = self._requests[index]
            yield request
            index += index < len(self._requests) and self._requests[index] is request

    @property
    def first(self) -> Request:
        return self._requests[0]

    @property
    def last(self) -> Request:
        return self._requests[-1]

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=self._key)
        self.num_prompt_tokens += len(request.prompt_ids)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, self._key(request), key=self._key)
        assert self._requests[index : index + 1] == [request], f"{request} is not in this queue"
        del self._requests[index]
        self.num_prompt_tokens -= len(request.prompt_ids)

    def check(self) -> None:
        keys = [self._key(request) for request in self._requests]
        assert all(a < b for a, b in pairwise(keys)), f"out of order: {keys}"
        assert self.num_prompt_tokens == sum(len(request.prompt_ids) for request in self._requests)
