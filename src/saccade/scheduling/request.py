"""One request as the scheduler sees it: tokens, media rows, progress, the blocks it owns, and how it ended."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import groupby

from saccade.cache.encoder import Entry, MediaKey
from saccade.cache.prefix import Span
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.update import Finish, FinishReason

MOST_OUTPUTS = 2**40  # more than any request has


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again; what was computed will be recomputed
    FINISHED = "finished"


@dataclass(eq=False, kw_only=True, slots=True)
class Request:
    """What was asked for (first part) and how far it is (second part; the scheduler alone writes it).

    Rows are positions of the sequence prompt + output. Invariant: 0 <= num_computed <= num_planned <= num_tokens +
    num_pending: rows below `num_computed` are in the KV cache, those up to `num_planned` will be when the plans in
    flight are done. `num_pending` counts tokens that plans in flight sample, not known yet. A request that is not
    running owns no blocks and holds no encoder entries.
    """

    id: str
    prompt_ids: tuple[int, ...] = field(repr=False)
    params: SamplingParams
    spans: tuple[Span, ...] = field(default=(), repr=False)  # in order; a media_idx has all its rows in its spans
    eos_token_ids: frozenset[int] = frozenset()
    arrival: float = 0.0
    priority: int = 0  # lower first, then arrival
    deadline: float | None = None
    cache_salt: str | None = None
    output_shift: int = 0  # how much further on outputs are than the same tokens in a prompt
    parent: "Request | None" = field(default=None, repr=False)  # forked from it: the same prompt, another output

    status: Status = field(default=Status.WAITING, init=False)
    finish: Finish | None = field(default=None, init=False)
    output_ids: list[int] = field(default_factory=list, init=False, repr=False)
    max_outputs: int = field(default=0, init=False)
    num_computed: int = field(default=0, init=False)
    num_planned: int = field(default=0, init=False)
    num_pending: int = field(default=0, init=False)
    num_scored: int = field(init=False)  # prompt rows whose log-probabilities were given out, or are not wanted
    num_cached_tokens: int = field(default=0, init=False)  # prompt tokens that the first start found computed
    num_preemptions: int = field(default=0, init=False)
    blocks: tuple[int, ...] = field(default=(), init=False, repr=False)
    entries: dict[int, Entry] = field(default_factory=dict, init=False, repr=False)  # by media_idx
    keys: list[bytes] = field(default_factory=list, init=False, repr=False)  # of the full blocks, for the prefix cache
    num_inserted: int = field(default=0, init=False)  # blocks offered to the prefix cache
    order: tuple[int, float, int] = field(default=(0, 0.0, 0), init=False)
    _media_rows: Counter[int] = field(default_factory=Counter, init=False, repr=False)  # by media_idx
    _media_ends: dict[int, int] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.num_scored = self.first_scored_row
        for span in self.spans:
            self._media_rows[span.media_idx] += span.length
            self._media_ends[span.media_idx] = max(span.end, self._media_ends.get(span.media_idx, 0))

    def fork(self, index: int) -> "Request":
        """Output `index` (from 1) of the same prompt, with a seed of its own; prompt scores are the parent's job."""
        seed = None if self.params.seed is None else _wrap_int64(self.params.seed + index)
        return Request(
            id=f"{self.id}:{index}",
            prompt_ids=self.prompt_ids,
            params=replace(self.params, n=1, seed=seed, prompt_logprobs=None),
            spans=self.spans,
            eos_token_ids=self.eos_token_ids,
            arrival=self.arrival,
            priority=self.priority,
            deadline=self.deadline,
            cache_salt=self.cache_salt,
            output_shift=self.output_shift,
            parent=self,
        )

    @property
    def key_spans(self) -> tuple[Span, ...]:
        """What tells rows of equal tokens apart, for the prefix cache: media, and outputs at positions that the same
        tokens would not have in the prompt of a later turn."""
        if not self.output_shift:
            return self.spans
        shift = self.output_shift.to_bytes(8, "little", signed=True)
        return *self.spans, Span(len(self.prompt_ids), MOST_OUTPUTS, digest=b"", layout=shift)

    @property
    def num_tokens(self) -> int:
        """Known tokens."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_left(self) -> int:
        """Rows that can be planned now. Behind the last output there is none, and with a grammar none before the
        newest output is known: it decides which tokens may follow."""
        if self.num_pending and self.params.grammar is not None:
            return 0
        if self.num_pending and len(self.output_ids) + self.num_pending >= self.max_outputs:
            return 0
        return self.num_tokens + self.num_pending - self.num_planned

    @property
    def is_decoding(self) -> bool:
        """Only the newest output, known or not, has to be computed."""
        return self.num_left == 1 and len(self.output_ids) + self.num_pending > 0

    @property
    def first_scored_row(self) -> int:
        """A row's logits are about the token that follows it."""
        return max(self.params.prompt_logprobs_start - 1, 0)

    @property
    def has_unscored_rows(self) -> bool:
        return self.params.prompt_logprobs is not None and self.num_scored < len(self.prompt_ids)

    def tokens_from(self, start: int) -> tuple[int, ...]:
        """Known tokens from a position on."""
        num_prompt = len(self.prompt_ids)
        return self.prompt_ids[start:] + tuple(self.output_ids[max(start - num_prompt, 0) :])

    def media_key(self, span: Span) -> MediaKey:
        return (self.cache_salt, span.digest, self.media_rows(span.media_idx))

    def media_rows(self, media_idx: int) -> int:
        return self._media_rows[media_idx]

    def media_end(self, media_idx: int) -> int:
        return self._media_ends[media_idx]

    def stop_met(self) -> Finish | None:
        """Whether the newest output is the last one."""
        params, token = self.params, self.output_ids[-1]
        if params.grammar is not None and token in self.eos_token_ids:
            return Finish(FinishReason.STOP)  # a grammar has let it through, so nothing else was left, or it was wanted
        if len(self.output_ids) >= params.min_tokens:
            if token in self.eos_token_ids and not params.ignore_eos:
                return Finish(FinishReason.STOP)
            if token in params.stop_token_ids:
                return Finish(FinishReason.STOP, token)
        if len(self.output_ids) >= self.max_outputs:
            return Finish(FinishReason.LENGTH)
        return None

    def reset(self) -> None:
        """Back to waiting, with nothing computed; outputs stay."""
        self.status = Status.PREEMPTED
        self.num_preemptions += 1
        self.num_computed = self.num_planned = self.num_pending = 0

    def check_progress(self, block_size: int) -> None:
        assert 0 <= self.num_computed <= self.num_planned <= self.num_tokens + self.num_pending, f"progress of {self}"
        assert len(self.output_ids) + self.num_pending <= self.max_outputs, f"too many outputs are planned for {self}"
        assert self.num_planned <= len(self.blocks) * block_size, f"{self} has rows without slots"
        if self.status is not Status.RUNNING:
            assert self.status is not Status.FINISHED and not self.blocks and not self.entries, f"{self} owns something"

    def check_spans(self) -> None:
        """Spans are what the prefix cache and the chunks take for granted."""
        previous = 0
        for span in self.spans:
            assert previous <= span.offset and span.length > 0, f"{self.id}: {span} is empty or out of order"
            assert len(span.digest) >= 16, f"{self.id}: a digest of {len(span.digest)} bytes may collide"
            previous = span.end
        indices = [span.media_idx for span in self.spans]
        assert indices == sorted(indices), f"{self.id}: media are not one after the other: {indices}"
        assert previous <= len(self.prompt_ids), f"{self.id}: media rows behind the prompt's end"
        for _, spans in groupby(self.spans, key=lambda span: span.media_idx):
            _check_rows(self.id, tuple(spans))


def _check_rows(request_id: str, spans: Sequence[Span]) -> None:
    row = 0
    for span in spans:
        assert span.first_row == row and span.digest == spans[0].digest, f"{request_id}: rows of {span} are not next"
        row += span.length


def _wrap_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
