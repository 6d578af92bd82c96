"""All inputs of one forward pass.

T token rows (packed, padded), R requests, M blocks in a table, L deepstack levels, D width of the decoder;
P patch rows (packed, padded), C values of a patch, S segments, W windows, U merged units.

Lengths, tables and boundaries are tensors. The only Python numbers are upper bounds (`max_*`). They may depend only on
buffer capacities, because a captured graph freezes them. A warm-up launches every kernel of a pass at least once and
skips layers that would launch no new ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

Cache = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One pass of a decoder over packed rows of several requests.

    Request r owns rows `query_start[r]:query_start[r + 1]`. Its keys are the first `key_lengths[r]` slots of its
    blocks, including the ones that this pass writes. Padded rows belong to a dummy request of key length 0 and write to
    block 0, which is never allocated. `outside(fn, *args, out=, **bridged)` calls `fn(*args, **bridged)`, perhaps
    between captured pieces, and returns the result in the shape of the buffer `out` (see `Frame.outside`).
    """

    embeds_TD: Tensor
    positions_3T: Tensor
    deepstack_LTD: Tensor | None = None
    slots_T: Tensor
    query_start_R1: Tensor
    key_lengths_R: Tensor
    block_tables_RM: Tensor
    limits_T: Tensor | None = None
    max_query: int
    max_keys: int
    caches: Sequence[Cache]
    outside: Callable[..., Tensor]
    is_warmup: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionStep:
    """One pass of a vision tower over packed patches of several images and frames.

    Patches are in merge-block order: the `merge` x `merge` patches of one merged unit are neighbours, and
    units are in raster order. Segments (frames) and windows cover all P rows: padded rows form their own segments. The
    fields of learned positions and windows are None for families without them. After the blocks in `cuts` the pass may
    stop and go on later.
    """

    patches_PC: Tensor
    positions_P2: Tensor
    cu_seqlens_S1: Tensor
    max_segment: int
    grid_indices_4P: Tensor | None = None
    grid_weights_4P: Tensor | None = None
    window_order_U: Tensor | None = None
    window_inverse_U: Tensor | None = None
    window_cu_seqlens_W1: Tensor | None = None
    max_window: int = 0
    cuts: frozenset[int] = frozenset()
    cut: Callable[[], None] = lambda: None
    is_warmup: bool = False
