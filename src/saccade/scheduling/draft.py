"""A plan before and after it is data: while it is being made, and while it is in flight."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from saccade.cache.encoder import Entry
from saccade.cache.prefix import Span, overlapping
from saccade.scheduling.plan import Chunk, EncodeItem, MediaRows, Plan
from saccade.scheduling.request import Request
from saccade.scheduling.resources import DetachedResources
from saccade.wire.update import Update


@dataclass(slots=True)
class Draft:
    """A plan in the making. `is_short`: somebody who runs got no row in it."""

    tokens_left: int
    encoder_left: int
    chunks: dict[Request, Chunk] = field(default_factory=dict)
    encode: dict[Entry, EncodeItem] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    is_short: bool = False

    def add_rows(self, request: Request, end: int) -> None:
        """The request's next rows, up to `end`."""
        start, num_prompt = request.num_planned, len(request.prompt_ids)
        wants_logits = end == request.num_tokens + request.num_pending and request.max_outputs > 0
        assert start < end and request not in self.chunks, f"{request} is planned twice, or without rows"
        assert end - start <= self.tokens_left, f"{end - start} rows, {self.tokens_left} left in the budget"
        self.chunks[request] = Chunk(
            request_id=request.id,
            start=start,
            count=end - start,
            blocks=request.blocks,
            media=tuple(_media_rows(request, start, end)) if request.entries else (),
            wants_logits=wants_logits,
            wants_all_logits=request.has_unscored_rows and start < num_prompt and end > request.num_scored,
            is_pending_input=request.num_pending > 0,
        )
        self.tokens_left -= end - start
        request.num_planned = end
        request.num_pending += wants_logits

    def add_media(self, request: Request, span: Span, entry: Entry) -> None:
        """Encode the media of a span into an entry."""
        self.encode[entry] = EncodeItem(request.id, span.media_idx, span.digest, entry.num_rows, entry.pages)
        self.encoder_left -= entry.num_rows

    def finish(self, step: int) -> Plan:
        return Plan(
            step=step,
            encode=tuple(self.encode.values()),
            chunks=tuple(self.chunks.values()),
            preempted=tuple(self.preempted),
            updates=tuple(self.updates),
        )


@dataclass(slots=True)
class Flight:
    """A plan that is not committed yet, with the requests it is about: an id may have a new owner by then."""

    plan: Plan
    chunks: dict[Request, Chunk]
    encode: dict[Entry, EncodeItem]
    void: set[Request] = field(default_factory=set)  # their rows were computed from wrong ones
    held: list[DetachedResources] = field(default_factory=list)  # to be given back when this plan is committed


def _media_rows(request: Request, start: int, stop: int) -> Iterator[MediaRows]:
    for span in overlapping(request.spans, start, stop):
        begin, end = max(span.offset, start), min(span.end, stop)
        pages = request.entries[span.media_idx].pages
        yield MediaRows(begin, end - begin, span.media_idx, span.first_row + begin - span.offset, pages)
