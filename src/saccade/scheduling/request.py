"""A request as the scheduler sees it (tokens, media rows, progress, blocks, finish), and queues of requests."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from typing import Any

from saccade.cache.encoder import Entry
from saccade.cache.prefix import Span
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.update import Finish, FinishReason

MAX_OUTPUTS = 2**40  # more than any request can have
USUAL_OUTPUTS = 256  # assumed length of an answer that may be longer


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again, to be recomputed
    FINISHED = "finished"


@dataclass(eq=False, kw_only=True, slots=True)
class Request:
    """First what was asked for, then progress, which only the scheduler and `Resources` write. Rows are positions in
    prompt + output. Invariant: 0 <= num_computed <= num_planned <= num_tokens + num_pending. Rows below `num_computed`
    are in the KV cache; rows below `num_planned` will be when the plans in flight are done. `num_pending` counts tokens
    that plans in flight sample, unknown until they commit. A request that is not running owns no blocks and holds no
    encoder entries."""

    id: str
    prompt_ids: tuple[int, ...] = field(repr=False)
    params: SamplingParams
    spans: tuple[Span, ...] = field(default=(), repr=False)  # in order; the spans of a media_idx cover all its rows
    eos_token_ids: frozenset[int] = frozenset()
    arrival: float = 0.0
    priority: int = 0  # lower runs first
    tenant: str = ""  # tenants take fair turns
    weight: float = 1.0  # of its tenant
    deadline: float | None = None
    cache_salt: str | None = None
    output_shift: int = 0  # offset of output positions from those of the same tokens in a prompt
    parent: "Request | None" = field(default=None, repr=False)  # of a fork: same prompt, another output

    status: Status = field(default=Status.WAITING, init=False)
    finish: Finish | None = field(default=None, init=False)
    output_ids: list[int] = field(default_factory=list, init=False, repr=False)
    max_outputs: int = field(default=0, init=False)
    num_computed: int = field(default=0, init=False)
    num_planned: int = field(default=0, init=False)
    num_pending: int = field(default=0, init=False)
    first_scored_row: int = field(init=False)  # a row's logits score the token after it
    num_scored: int = field(init=False)  # prompt rows whose log-probabilities were sent or are not wanted
    num_cached_tokens: int = field(default=0, init=False)  # prompt tokens found in the cache at the first start
    num_preemptions: int = field(default=0, init=False)
    blocks: tuple[int, ...] = field(default=(), init=False, repr=False)
    entries: dict[int, Entry] = field(default_factory=dict, init=False, repr=False)  # by media_idx
    key_spans: tuple[Span, ...] = field(init=False, repr=False)  # what else the keys of blocks depend on
    keys: list[bytes] = field(default_factory=list, init=False, repr=False)  # of the full blocks, for the prefix cache
    num_inserted: int = field(default=0, init=False)  # blocks offered to the prefix cache
    fair_start: float = field(default=0.0, init=False)  # see `FairClock`
    order: tuple[int, float, float, int] = field(default=(0, 0.0, 0.0, 0), init=False)
    media_rows: Counter[int] = field(default_factory=Counter, init=False, repr=False)  # by media_idx
    media_ends: dict[int, int] = field(default_factory=dict, init=False, repr=False)  # by media_idx

    def __post_init__(self) -> None:
        self.num_scored = self.first_scored_row = max(self.params.prompt_logprobs_start - 1, 0)
        end, last, digests = 0, 0, dict[int, bytes]()
        for span in self.spans:  # the prefix cache and the chunks rely on these assertions
            idx, length = span.media_idx, span.length
            assert end <= span.offset and length > 0 and last <= idx, f"{self.id}: {span} is empty or out of order"
            assert len(span.digest) >= 16, f"{self.id}: a digest of {len(span.digest)} bytes may collide"
            is_next = span.first_row == self.media_rows[idx] and digests.setdefault(idx, span.digest) == span.digest
            assert is_next, f"{self.id}: rows of {span} are not next"
            end, last = span.offset + length, idx
            self.media_rows[idx] += length
            self.media_ends[idx] = end
        assert end <= len(self.prompt_ids), f"{self.id}: media rows behind the prompt's end"
        self.key_spans = self.spans
        if self.output_shift:  # in a later turn's prompt, the same tokens would have other positions
            shift = self.output_shift.to_bytes(8, "little", signed=True)
            self.key_spans += (Span(len(self.prompt_ids), MAX_OUTPUTS, digest=b"", layout=shift),)

    def fork(self, index: int) -> "Request":
        """Output `index` (from 1) of the same prompt, with its own seed; the parent scores the prompt."""
        seed = None if self.params.seed is None else _wrap_int64(self.params.seed + index)
        params = replace(self.params, n=1, seed=seed, prompt_logprobs=None)
        return replace(self, id=f"{self.id}:{index}", params=params, parent=self)

    @property
    def num_tokens(self) -> int:
        """Known tokens."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_left(self) -> int:
        """Rows that can be planned now: none after the last output, and with a grammar none until the newest output is
        known, because it decides which tokens may follow."""
        if self.num_pending and self.params.grammar is not None:
            return 0
        if self.num_pending and len(self.output_ids) + self.num_pending >= self.max_outputs:
            return 0
        return self.num_tokens + self.num_pending - self.num_planned

    @property
    def unencoded_rows(self) -> list[int]:
        """Rows of each media item that must still be encoded or found in the cache, in order."""
        return [
            rows
            for idx, rows in self.media_rows.items()
            if idx not in self.entries and self.media_ends[idx] > self.num_planned
        ]

    @property
    def fair_cost(self) -> float:
        """Estimated cost in tokens, divided by the tenant's weight. Forks share the prompt."""
        num_prompt = 1 if self.parent is not None else len(self.prompt_ids)
        return (num_prompt + min(self.max_outputs, USUAL_OUTPUTS)) / self.weight

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest output, known or pending, remains to be computed."""
        return self.num_left == 1 and len(self.output_ids) + self.num_pending > 0

    @property
    def has_unscored_rows(self) -> bool:
        return self.params.prompt_logprobs is not None and self.num_scored < len(self.prompt_ids)

    @property
    def num_reusable(self) -> int:
        """How many known tokens may come from the prefix cache. The last one never does: its row is always needed."""
        if self.params.pooling == "mean":
            return 0
        return self.num_scored if self.has_unscored_rows else self.num_tokens - 1

    def tokens_from(self, start: int) -> tuple[int, ...]:
        num_prompt = len(self.prompt_ids)
        return self.prompt_ids[start:] + tuple(self.output_ids[max(start - num_prompt, 0) :])

    def check_stop(self) -> Finish | None:
        """Returns the finish if the newest output is the last."""
        params, token = self.params, self.output_ids[-1]
        if params.grammar is not None and token in self.eos_token_ids:
            return Finish(FinishReason.STOP)  # the grammar allowed it: it was chosen, or nothing else was possible
        if len(self.output_ids) >= params.min_tokens:
            if token in self.eos_token_ids and not params.ignore_eos:
                return Finish(FinishReason.STOP)
            if token in params.stop_token_ids:
                return Finish(FinishReason.STOP, token)
        if len(self.output_ids) >= self.max_outputs:
            return Finish(FinishReason.LENGTH)
        return None

    def reset(self) -> None:
        """Goes back to waiting with nothing computed. Outputs are kept."""
        self.status = Status.PREEMPTED
        self.num_preemptions += 1
        self.num_computed = self.num_planned = self.num_pending = 0

    def check_progress(self, block_size: int) -> None:
        assert 0 <= self.num_computed <= self.num_planned <= self.num_tokens + self.num_pending, f"progress of {self}"
        assert len(self.output_ids) + self.num_pending <= self.max_outputs, f"too many outputs are planned for {self}"
        assert self.num_planned <= len(self.blocks) * block_size, f"{self} has rows without slots"
        if self.status is not Status.RUNNING:
            assert self.status is not Status.FINISHED and not self.blocks and not self.entries, f"{self} owns something"


class RequestQueue:
    """Requests sorted by a unique key that must not change while they are queued. Any of them can be removed."""

    def __init__(self, key: Callable[[Request], Any]) -> None:
        self.num_prompt_tokens = self.num_media_rows = 0
        self._key = key
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """In order. The request yielded last may be removed during iteration."""
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
        self.num_media_rows += request.media_rows.total()

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, self._key(request), key=self._key)
        assert self._requests[index : index + 1] == [request], f"{request} is not in this queue"
        del self._requests[index]
        self.num_prompt_tokens -= len(request.prompt_ids)
        self.num_media_rows -= request.media_rows.total()

    def check(self) -> None:
        keys = [self._key(request) for request in self._requests]
        assert all(a < b for a, b in pairwise(keys)), f"out of order: {keys}"
        assert self.num_prompt_tokens == sum(len(request.prompt_ids) for request in self._requests)
        assert self.num_media_rows == sum(request.media_rows.total() for request in self._requests)


def _wrap_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
