"""What the engine says of its requests. Also for processes that never touch a tensor, so nothing here imports torch."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

# Details of a finish with an error that a caller can tell from others.
NO_NUMBERS = "the model's logits are not numbers"
NO_TOKEN = "no token is allowed next: the grammar cannot be followed with this vocabulary and these parameters"
BROKEN = "the grammar's parser failed"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class Finish:
    """How a request ended. `detail` is the stop token or string that was met (None: end of text), or a message."""

    reason: FinishReason
    detail: int | str | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of given tokens and of the likeliest ones, one entry a row."""

    chosen: Any
    ranks: Any
    top_ids: Any
    top_logprobs: Any


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of the prompt tokens from `start` on."""

    start: int
    scores: Scores


@dataclass(frozen=True, slots=True)
class Update:
    """News of one request; the one with `finish` is its last."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    scores: Scores | None = None
    prompt_scores: PromptScores | None = None
    finish: Finish | None = None
    timings: dict[str, float] | None = None  # seconds by stage, with the finish
