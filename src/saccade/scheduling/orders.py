"""Orders: the device work of a step as plain data. They can be printed, compared, kept and sent to other ranks.

Whoever composes them decides everything; an executor obeys. The orders of a step come in this sequence: `Begin` for
requests with penalties that start, `Encode` for its images, `Run` for its rows, `SampleTokens` where argmax of the raw
logits is not enough. The others come between steps.
"""

from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from saccade.choice.exact import ExactLayout
from saccade.choice.key import Decision, GraphKey
from saccade.inputs.messages import MediaKind

Array = NDArray[Any]
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class PatchSource:
    """An image (H, W, 3) or frames (F, H, W, 3) of an item of the plan, the size they get, and the rows of patches that
    they fill."""

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
    """One pass of a phase: its inputs, and how it is run. A vision pass has the pictures that its patches come from."""

    phase: str
    decision: Decision
    values: Arrays
    pictures: tuple[PatchSource, ...] = ()

    @property
    def is_padded(self) -> bool:
        """Whether it is run at the size of a bucket."""
        return (self.decision.key or self.decision.padded_to) is not None


@dataclass(frozen=True, slots=True, eq=False)
class Begin:
    """A sequence gets another request. Penalties count the tokens of its prompt and of its output so far."""

    sequence: int
    prompt_ids: Array
    output_ids: Array


@dataclass(frozen=True, slots=True, eq=False)
class Encode:
    """A vision pass, on the stream beside the language passes: the same on all ranks. Where each has images of its own,
    `others` are the passes of ranks 1 and up; all are run in the same way, and say where the rows of all go."""

    step: int
    vision: Pass
    others: tuple[Pass, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class ScorePrompt:
    """Score tokens of a prompt: `next_ids` follow the rows from `row` on of the pass."""

    row: int
    next_ids: Array
    num_top: int


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Language passes, in order, and what to copy out: tokens of `num_sampled` rows, scores of prompts."""

    step: int
    passes: tuple[Pass, ...]
    num_sampled: int
    waits_for_vision: bool = False
    prompt_scores: tuple[ScorePrompt, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Edit:
    """Changes to one row of logits: added biases, tokens that are not allowed, bits of all that are (None: any)."""

    row: int
    bias_ids: Array
    biases: Array
    suppressed_ids: Array
    allowed: Array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """What grammars allow: bit t % 32 of word t // 32 for each token t, for the rows from `row` on."""

    row: int
    words: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ScoreToken:
    """Score the newest token of a sequence, which came from one row of logits."""

    row: int
    sequence: int
    num_top: int


@dataclass(frozen=True, slots=True, eq=False)
class SampleTokens:
    """What follows the passes of a step: edited logits, a sampler, log-probabilities of what was taken."""

    step: int
    edits: tuple[Edit, ...] = ()
    mask: Mask | None = None
    sampler: Pass | None = None
    scores: tuple[ScoreToken, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """Capture a vision graph of one layout of images, in an idle moment."""

    layout: ExactLayout


@dataclass(frozen=True, slots=True)
class Drop:
    """Let go of vision graphs of one layout each."""

    keys: tuple[GraphKey, ...]


@dataclass(frozen=True, slots=True)
class Calibrate:
    """Time eager runs and replays of vision passes; `num_rounds` 0: as many as it takes."""

    num_rounds: int = 0


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Compile what runs outside of graphs."""


Orders = Begin | Encode | Run | SampleTokens | Capture | Drop | Calibrate | WarmUp
ORDER_TYPES: tuple[type[Orders], ...] = get_args(Orders)
