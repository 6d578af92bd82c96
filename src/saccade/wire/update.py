"""The engine's updates about requests. Processes without torch read them too, so nothing here imports it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from msgspec import Struct
from numpy.typing import NDArray

from saccade.wire.passes import PassCount

# `Finish.detail` of errors that callers tell apart.
NO_NUMBERS = "the model's logits are not numbers"
NO_HIDDEN_NUMBERS = "the model's hidden states are not numbers"
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
    """`detail` is the stop token or string (None for the end of text), or a message."""

    reason: FinishReason
    detail: int | str | None = None


class Scores(Struct, frozen=True, array_like=True):
    """Log-probabilities of given tokens and of the likeliest ones, one entry per row."""

    chosen: NDArray[Any]
    ranks: NDArray[Any]
    top_ids: NDArray[Any]
    top_logprobs: NDArray[Any]


class PromptScores(Struct, frozen=True, array_like=True):
    """Scores of the prompt tokens from `start` on."""

    start: int
    scores: Scores


class Update(Struct, frozen=True, array_like=True):
    """What is new about one request; an update with `finish` is its last."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    scores: Scores | None = None
    prompt_scores: PromptScores | None = None
    finish: Finish | None = None
    timings: dict[str, float] | None = None  # seconds by stage, with the finish
    pooled: NDArray[Any] | None = None  # float32, with the finish of a request that asked for a vector
    passes: tuple[PassCount, ...] | None = None  # with the finish of a request that asked for them
