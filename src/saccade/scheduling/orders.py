"""Orders: the device work of a step as plain data that can be printed, compared, kept and sent to other ranks.

The composer decides everything; an executor obeys. A step has, in this order, `Begin` for starting requests with
penalties or rules, `Encode` for images, `Run` for rows, `SampleTokens` if argmax of raw logits is not enough. The
others come between steps.
"""

from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from saccade.choice.exact import ExactLayout
from saccade.choice.key import Decision, GraphKey
from saccade.inputs.text.chat_messages import MediaKind

Array = NDArray[Any]
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class PatchSource:
    """An image (H, W, 3) or frames (F, H, W, 3) of a plan's item, their resized size, and the patch rows they fill."""

    item: int
    kind: MediaKind
    pixels: NDArray[np.uint8]
    size_hw: tuple[int, int]
    out_row: int
    num_rows: int

    @property
    def frames(self) -> NDArray[np.uint8]:
        return self.pixels[None] if self.pixels.ndim == 3 else self.pixels


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """One pass of a phase: its inputs and how to run it. A vision pass has the pictures its patches come from."""

    phase: str
    decision: Decision
    values: Arrays
    pictures: tuple[PatchSource, ...] = ()

    @property
    def is_padded(self) -> bool:
        return (self.decision.key or self.decision.padded_to) is not None


@dataclass(frozen=True, slots=True, eq=False)
class TokenRules:
    """How all rows of logits of a request are changed: biases, and a bit mask of allowed tokens (None: any). `end_ids`
    are forbidden in the steps that say so."""

    bias_ids: Array
    biases: Array
    end_ids: Array
    allowed: Array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Begin:
    """A sequence gets a new request. Penalties, if it has any, count the tokens of its prompt and its output so far."""

    sequence: int
    prompt_ids: Array
    output_ids: Array
    rules: TokenRules | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Encode:
    """A vision pass, before the language passes that read its rows; the same on all ranks. Where ranks encode their own
    images, `others` are the passes of ranks 1 and up; all run the same way and name the target rows of all."""

    step: int
    vision: Pass
    others: tuple[Pass, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class ScorePrompt:
    """Score prompt tokens: `next_ids` follow the pass's rows from `row` on."""

    row: int
    next_ids: Array
    num_top: int


@dataclass(frozen=True, slots=True, eq=False)
class PoolRows:
    """Sum hidden states after the final norm: vector i adds up the next `lengths[i]` of the prefill's `rows`."""

    rows: Array
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PickLogits:
    """A vector of the logits of some tokens, in one row of the head pass."""

    row: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Language passes in order, and what to copy out: tokens of the first `num_sampled` rows of the head, prompt
    scores, sums of hidden states, single logits."""

    step: int
    passes: tuple[Pass, ...]
    num_sampled: int
    prompt_scores: tuple[ScorePrompt, ...] = ()
    pool: PoolRows | None = None
    picks: tuple[PickLogits, ...] = ()


@dataclass(frozen=True, slots=True)
class Edit:
    """A row of logits is changed by the rules its sequence began with."""

    row: int
    sequence: int
    forbids_ends: bool


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """What grammars allow in the rows from `row` on: bit t % 32 of word t // 32 for each token t."""

    row: int
    words: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ScoreToken:
    """Score a sequence's newest token, sampled from this row of logits."""

    row: int
    sequence: int
    num_top: int


@dataclass(frozen=True, slots=True, eq=False)
class SampleTokens:
    """Work after a step's passes: edit logits, sample, score the sampled tokens."""

    step: int
    edits: tuple[Edit, ...] = ()
    mask: Mask | None = None
    sampler: Pass | None = None
    scores: tuple[ScoreToken, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """Capture a vision graph of one image layout, in an idle moment."""

    layout: ExactLayout


@dataclass(frozen=True, slots=True)
class Drop:
    """Free exact vision graphs."""

    keys: tuple[GraphKey, ...]


@dataclass(frozen=True, slots=True)
class Calibrate:
    """Compare the times of eager runs and replays of vision passes, in so many rounds (0: as many as needed), and time
    replays of the passes that steps consist of."""

    num_rounds: int = 0
    times_vision: bool = True
    times_steps: bool = False


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Compile what runs outside graphs."""


Orders = Begin | Encode | Run | SampleTokens | Capture | Drop | Calibrate | WarmUp
ORDER_TYPES: tuple[type[Orders], ...] = get_args(Orders)
