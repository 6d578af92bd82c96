"""Orders: the device work of a step as plain data that can be printed, compared, kept and sent to other ranks.

The composer decides everything; an executor obeys. The orders of a step come in this sequence: `Begin` for requests
that start with penalties or rules, `EncodeMore` and `Encode` for images, `Run` for rows, and `SampleTokens` if the
argmax of raw logits is not enough. All other orders come between steps.
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
    """One pass of a phase: its inputs and how to run it. `pictures` are the sources of a vision pass's patches."""

    phase: str
    decision: Decision
    values: Arrays
    pictures: tuple[PatchSource, ...] = ()

    @property
    def is_padded(self) -> bool:
        return (self.decision.key or self.decision.padded_to) is not None


@dataclass(frozen=True, slots=True, eq=False)
class TokenRules:
    """How all logits of a request are changed: biases, and a bit mask of allowed tokens (None allows all). `end_ids`
    are forbidden in rows whose `Edit` says so."""

    bias_ids: Array
    biases: Array
    end_ids: Array
    allowed: Array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Begin:
    """A request takes over a sequence. For penalties, the tokens of its prompt and of its output so far are counted."""

    sequence: int
    prompt_ids: Array
    output_ids: Array
    rules: TokenRules | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Encode:
    """A vision pass, run before the language passes that read its rows, on all ranks. If ranks encode their own images,
    `others` are the passes of ranks 1 and up; all use the same bucket and contain the target rows of all ranks. With an
    `end_part` below `num_parts`, the parts of its graph, it stops there; `EncodeMore` orders follow in later steps."""

    step: int
    vision: Pass
    others: tuple[Pass, ...] = ()
    end_part: int = 1
    num_parts: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class EncodeMore:
    """Go on with the vision pass that was stopped, up to part `end_part` of `num_parts`. The decision is the same."""

    step: int
    decision: Decision
    end_part: int
    num_parts: int


@dataclass(frozen=True, slots=True, eq=False)
class ScorePrompt:
    """Score prompt tokens. The rows of the pass from `row` on predict `next_ids`."""

    row: int
    next_ids: Array
    num_top: int


@dataclass(frozen=True, slots=True, eq=False)
class PoolRows:
    """Sum hidden states after the final norm. Vector i is the sum of the next `lengths[i]` of the prefill's `rows`."""

    rows: Array
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PickLogits:
    """Copy the logits of some tokens from one row of the head pass."""

    row: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Language passes in sequence, and what to copy out: tokens of the first `num_sampled` rows of the head, prompt
    scores, sums of hidden states, picked logits."""

    step: int
    passes: tuple[Pass, ...]
    num_sampled: int
    prompt_scores: tuple[ScorePrompt, ...] = ()
    pool: PoolRows | None = None
    picks: tuple[PickLogits, ...] = ()


@dataclass(frozen=True, slots=True)
class Edit:
    """Change a row of logits by the rules that its sequence began with."""

    row: int
    sequence: int
    forbids_ends: bool


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """Tokens that grammars allow in the rows from `row` on: bit t % 32 of word t // 32 for each token t."""

    row: int
    words: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ScoreToken:
    """Score the newest token of a sequence, which was sampled from this row of logits."""

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
    """Capture a vision graph of one image layout."""

    layout: ExactLayout


@dataclass(frozen=True, slots=True)
class Drop:
    """Free exact vision graphs."""

    keys: tuple[GraphKey, ...]


@dataclass(frozen=True, slots=True)
class Calibrate:
    """Compare the times of eager runs and replays of vision passes, and time replays of the passes that make up a step.
    `num_rounds=0` takes as many rounds as needed."""

    num_rounds: int = 0
    times_vision: bool = True
    times_steps: bool = False


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Compile the kernels that run outside graphs."""


@dataclass(frozen=True, slots=True)
class BeginShadow:
    """Begin to record a share of the replays, for shadow checks."""


@dataclass(frozen=True, slots=True)
class CheckReplay:
    """Run a recorded replay again without its graph, and compare the results. Its number is that of the pass."""

    number: int
    key: GraphKey


@dataclass(frozen=True, slots=True)
class VerifyGraphs:
    """Compare all graphs, or a sample of them, with eager runs."""

    is_short: bool


@dataclass(frozen=True, slots=True)
class AuditGraphs:
    """Find what all graphs, or a sample of them, froze."""

    is_short: bool


@dataclass(frozen=True, slots=True)
class RepeatReplay:
    """Run the replay of a shadow check's file again, with its graph and without. Each rank reads its own file."""

    file: str


GraphCheck = BeginShadow | CheckReplay | VerifyGraphs | AuditGraphs | RepeatReplay
Orders = Begin | Encode | EncodeMore | Run | SampleTokens | Capture | Drop | Calibrate | WarmUp | GraphCheck
ORDER_TYPES: tuple[type[Orders], ...] = get_args(Orders)
