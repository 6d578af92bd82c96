"""A step and its results as plain data that refers to no live request, and the draft that a plan is made from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from saccade.cache.encoder import Entry
from saccade.cache.prefix import Span, overlapping
from saccade.scheduling.pace import PacedStep
from saccade.scheduling.request import Request
from saccade.scheduling.resources import DetachedResources, Resources, UnfinishedMedia
from saccade.wire.update import Update


@dataclass(frozen=True, slots=True)
class EncodeItem:
    """An image or video to encode before the chunks run, into these pages of the encoder cache. One that takes longer
    than a step may is divided into `num_parts`, of which this step runs parts `first_part` to `end_part`. Its rows are
    there after the last."""

    request_id: str
    media_idx: int
    digest: bytes
    num_rows: int
    pages: tuple[int, ...]
    first_part: int = 0
    end_part: int = 1
    num_parts: int = 1

    @property
    def is_last(self) -> bool:
        return self.end_part == self.num_parts


@dataclass(frozen=True, slots=True)
class MediaRows:
    """Positions `start` to `start + count` of a sequence take a media item's rows from `first_row` on."""

    start: int
    count: int
    first_row: int
    pages: tuple[int, ...]


class Chunk(msgspec.Struct, frozen=True):  # one per row of a decode step: a dataclass takes ten times as long
    """Rows `start` to `start + count` of a request; their keys and values go to `blocks` (the whole table).
    `wants_logits`: a token is sampled from the last row. `wants_all_logits`: the prompt rows are scored.
    `num_summed`: how many rows at the end are summed to a vector. `picks_logits`: logits of some tokens are copied from
    the last row. `is_pending_input`: the only input token is sampled by the previous plan and not known yet."""

    request_id: str
    start: int
    count: int
    blocks: tuple[int, ...]
    media: tuple[MediaRows, ...] = ()
    wants_logits: bool = False
    wants_all_logits: bool = False
    is_pending_input: bool = False
    num_summed: int = 0
    picks_logits: bool = False

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: encode, then run all chunks in one batch. Plans run and commit in order of `step`; one without chunks
    does neither. `preempted` requests lost their blocks. `updates` end requests: past deadline, or too large to fit."""

    step: int
    encode: tuple[EncodeItem, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    preempted: tuple[str, ...] = ()
    updates: tuple[Update, ...] = ()


@dataclass(frozen=True, slots=True)
class RowError:
    """Why a request's rows failed; it ends the request."""

    message: str


Results = Mapping[str, Sequence[int] | RowError]


@dataclass(slots=True)
class Draft:
    """A plan in the making. It keeps the requests until the commit, because an id may belong to another one by then."""

    step: int
    resources: Resources
    tokens_left: int
    encoder_left: int
    max_chunk_rows: int  # 0 sets no limit
    chunks: dict[Request, Chunk] = field(default_factory=dict)
    items: list[EncodeItem] = field(default_factory=list)
    encode: dict[Entry, EncodeItem] = field(default_factory=dict)  # those whose rows this step completes
    preempted: list[str] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    has_skipped: bool = False  # a running request got no row
    paced: PacedStep | None = None  # set if the step has outputs and a pace
    void: set[Request] = field(default_factory=set)  # requests whose rows were computed from wrong media rows
    held: list[DetachedResources] = field(default_factory=list)  # released when the plan is committed

    @property
    def prompt_rows_left(self) -> int:
        return self.tokens_left if self.paced is None else min(self.tokens_left, self.paced.prompt_rows_left)

    def reach(self, request: Request, start: int, share: float = 1.0) -> int:
        """Returns the end of a chunk from `start`, and holds the media it reads. The chunk ends at `share` of the rows
        left, or before media rows that are not available in this step."""
        left = int(share * self.prompt_rows_left)
        if not left:
            return start
        end = min(start + min(self.max_chunk_rows or left, left), request.num_tokens)
        for span in overlapping(request.spans, start, end):
            begin = max(span.offset, start)
            if begin >= end:
                break
            if span.is_whole and span.end > end:
                if begin > start or span.end - start > self.tokens_left:
                    return begin
                end = span.end  # computed in one piece, even if longer than a chunk
            if not self._secure_media(request, span):
                return begin
            if not span.is_whole:  # encoding leaves less time for rows, but at least one of this image
                end = max(begin + 1, min(end, start + self.prompt_rows_left))
        return end

    def rows_in_half(self, request: Request) -> int:
        """How many of its rows fit into half of what is left of the step."""
        return self.reach(request, request.num_planned, share=0.5) - request.num_planned

    def take(self, num_rows: int) -> None:
        """Takes rows of the step. A negative `num_rows` gives them back."""
        self.tokens_left -= num_rows
        if self.paced is not None:
            self.paced.add_rows(num_rows)

    def add_rows(self, request: Request, end: int) -> None:
        start, pooling, is_whole_prompt = request.num_planned, request.params.pooling, end == len(request.prompt_ids)
        wants_logits = end == request.num_tokens + request.num_pending and request.max_outputs > 0
        assert start < end and request not in self.chunks, f"{request} is planned twice, or without rows"
        assert end - start <= self.tokens_left, f"{end - start} rows, {self.tokens_left} left in the budget"
        media = []
        for span in overlapping(request.spans, start, end) if request.entries else ():
            first, last = max(span.offset, start), min(span.end, end)
            pages = request.entries[span.media_idx].pages
            media.append(MediaRows(first, last - first, span.first_row + first - span.offset, pages))
        self.chunks[request] = Chunk(
            request_id=request.id,
            start=start,
            count=end - start,
            blocks=request.blocks,
            media=tuple(media),
            wants_logits=wants_logits,
            wants_all_logits=request.has_unscored_rows and start < len(request.prompt_ids) and end > request.num_scored,
            is_pending_input=request.num_pending > 0,
            num_summed=end - start if pooling == "mean" else int(pooling == "last" and is_whole_prompt),
            picks_logits=pooling == "logits" and is_whole_prompt,
        )
        self.take(end - start)
        request.num_planned = end
        request.num_pending += wants_logits

    def plan(self) -> StepPlan:
        return StepPlan(
            step=self.step,
            encode=tuple(self.items),
            chunks=tuple(self.chunks.values()),
            preempted=tuple(self.preempted),
            updates=tuple(self.updates),
        )

    def readers(self, entry: Entry) -> list[Request]:
        """Requests whose chunks read an entry's rows."""
        return [
            request for request, chunk in self.chunks.items() if any(rows.pages == entry.pages for rows in chunk.media)
        ]

    def is_encoding(self, request: Request) -> bool:
        """Whether its image was begun and is not complete. Every step takes it further, until only the last parts are
        left."""
        return self.resources.unfinished is not None and self.resources.unfinished.request is request

    def continue_encoding(self) -> None:
        """Encodes more parts of an unfinished image, whether or not its request gets rows in this step. The last parts
        wait until it does, so that an error ends it."""
        one = self.resources.unfinished
        if one is not None and self.paced is not None:  # otherwise there is time for the last parts
            end = one.num_planned + self.paced.parts_in_time(one.entry.num_rows, one.num_parts)
            if end < one.num_parts:
                self._encode(one, end)

    def _secure_media(self, request: Request, span: Span) -> bool:
        """Holds media rows that exist or that this plan completes. Others are begun to be encoded if there is time; the
        first image may exceed the budget."""
        idx = span.media_idx
        if idx in request.entries:
            return True
        num_rows = request.media_rows[idx]
        key = (request.cache_salt, span.digest, num_rows)
        one = self.resources.unfinished
        if one is not None and one.entry.key == key:
            is_next = self.is_encoding(request) and one.media_idx == idx and not self.items
            return is_next and self._encode(one, one.num_parts)
        entry = self.resources.encoder.hold(key)
        if entry is not None:
            request.entries[idx] = entry
            return True
        if one is not None or (self.items and num_rows > self.encoder_left):
            return False
        num_parts = 1 if self.paced is None else self.paced.pace.num_parts(num_rows)
        count = 1 if self.paced is None else self.paced.parts_in_time(num_rows, num_parts)
        entry = self.resources.encoder.reserve(key, num_rows) if count else None
        return entry is not None and self._encode(UnfinishedMedia(request, idx, entry, num_parts), count)

    def _encode(self, one: UnfinishedMedia, end: int) -> bool:
        """Encodes its next parts, up to `end`. With the last one, the request holds the rows. Returns whether it
        does."""
        entry, first = one.entry, one.num_planned
        place = (one.request.id, one.media_idx, entry.key[1], entry.num_rows, entry.pages)
        item = EncodeItem(*place, first, end, one.num_parts)
        num_rows = entry.num_rows * (end - first) // one.num_parts
        self.items.append(item)
        self.encoder_left -= num_rows
        if self.paced is not None:
            self.paced.add_image(num_rows)
        if item.is_last:
            self.resources.unfinished = None
            self.encode[entry] = item
            one.request.entries[one.media_idx] = entry
        else:
            self.resources.unfinished = replace(one, num_planned=end)
        return item.is_last
