"""What one step does, as data, and what came of it. Nothing here refers to a live request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from saccade.wire.update import Update


@dataclass(frozen=True, slots=True)
class EncodeItem:
    """An image or video to encode before the chunks run; its rows go to these pages of the encoder cache."""

    request_id: str
    media_idx: int
    digest: bytes
    num_rows: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MediaRows:
    """Positions `start` to `start + count` of a chunk's sequence take rows from `first_row` on of a media item."""

    start: int
    count: int
    media_idx: int
    first_row: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows `start` to `start + count` of a request; their keys and values go to `blocks` (the whole table).

    `wants_logits`: a token is sampled from the last row. `wants_all_logits`: the prompt rows are scored.
    `is_pending_input`: the one input token is what the previous plan samples, unknown when this plan was made.
    """

    request_id: str
    start: int
    count: int
    blocks: tuple[int, ...]
    media: tuple[MediaRows, ...] = ()
    wants_logits: bool = False
    wants_all_logits: bool = False
    is_pending_input: bool = False

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: encode, then run all chunks in one batch. Plans run and are committed in the order of `step`.

    `preempted` requests lost their blocks; `updates` end requests (deadline, or no room even alone).
    """

    step: int
    encode: tuple[EncodeItem, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    preempted: tuple[str, ...] = ()
    updates: tuple[Update, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Nothing to run, and nothing to commit."""
        return not self.chunks

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class RowError:
    """Why a request's rows gave nothing; it ends the request."""

    message: str


Results = Mapping[str, Sequence[int] | RowError]
