"""The vision tower that all families share. P patch rows, C values of a patch, D width of the tower, U merged units,
L levels, E width of the decoder."""

import torch
from torch import Tensor

from saccade.layers.layer import Layer, Placement, first_of_each, new_exchange
from saccade.layers.layer_spec import MergerSpec, PoolSpec
from saccade.layers.linear import Linear
from saccade.layers.norm import new_norm
from saccade.layers.parallel import ALONE, ParallelGroup
from saccade.layers.rotary import GridRotary
from saccade.layers.step import VisionStep
from saccade.layers.vision import Merger, PoolProjector, PositionGrid, VisionBlock
from saccade.models.model_spec import VisionSpec


class Tower(Layer):
    """Turns patches into rows of the decoder's width.

    The result is one tensor with a level for the projected rows and one for each deepstack layer. The tower is either
    split over the ranks of `place`, which all see the same images, or whole on every rank of `sharing`. Those encode
    different images, and each gets the concatenated rows of all ranks.
    """

    def __init__(self, place: Placement, spec: VisionSpec, sharing: ParallelGroup = ALONE) -> None:
        assert place.group.size == 1 or sharing.size == 1, "a tower is split, or whole on each rank"
        self.place, self.spec, self.sharing = place, spec, sharing
        self.group = sharing if sharing.size > 1 else place.group
        self.exchange = new_exchange(self.group)
        width = spec.block.width
        # A convolution whose stride is its kernel size: one product per patch, channel-major within the patch.
        self.patches = Linear(place.inside("patches"), spec.patch_values, width, bias=spec.patch_bias)
        self.grid = PositionGrid(place, spec.grid_side, width) if spec.grid_side else None
        head_dim = width // spec.block.num_heads
        self.rotary = GridRotary(place, head_dim, spec.rotary_base) if spec.rotary_base else None
        self.blocks = [VisionBlock(place.inside(f"blocks.{i}"), spec.block) for i in range(spec.depth)]
        self.norm = new_norm(place, width, spec.final_norm) if spec.final_norm else None
        self.projector = _new_projector(place.inside("projector"), spec, spec.projector)
        self.deepstack = [
            _new_projector(place.inside(f"deepstack.{i}"), spec, spec.deepstack_merger)
            for i in range(len(spec.deepstack_layers))
        ]
        self.warmup_layers = self._warmup_layers()

    def __call__(self, step: VisionStep, out_LUE: Tensor | None = None) -> Tensor:
        """(L, U, E): the projected rows, then the deepstack rows, in patch order; written to `out_LUE` if given. With
        `sharing`, U counts the units of all ranks."""
        if self.sharing.size > 1:
            return self.sharing.all_gather(self._rows(step), dim=1, out=out_LUE)
        return self._rows(step, out_LUE)

    def exchanged_bytes(self, *, patches: int) -> int:
        """The largest input of one collective, in bytes per rank, in a pass of this size."""
        units, projector = patches // self.spec.unit, self.spec.projector.out_width
        merged = units * projector * (self.spec.levels if self.sharing.size > 1 else 1)
        return max(patches * self.spec.block.width, merged) * self.place.dtype.itemsize

    def _rows(self, step: VisionStep, out_LUE: Tensor | None = None) -> Tensor:
        x_PD = self._embed(step)
        if out_LUE is None:
            out_LUE = x_PD.new_empty(self.spec.levels, x_PD.shape[0] // self.spec.unit, self.spec.projector.out_width)
        rotation = self.rotary(self._windowed(step, step.positions_P2).T) if self.rotary else None
        frames = windows = step.cu_seqlens_S1, step.max_segment
        if step.window_cu_seqlens_W1 is not None:
            windows = step.window_cu_seqlens_W1, step.max_window
        residual_PD: Tensor | None = None
        level = 0  # levels are in layer order, mergers in the order of the config
        for i in self.warmup_layers if step.is_warmup else range(self.spec.depth):
            segments = frames if i in self.spec.full_layers else windows
            x_PD, residual_PD = self.blocks[i](x_PD, residual_PD, rotation, segments)
            if i in self.spec.deepstack_layers:
                x_PD, residual_PD = x_PD + residual_PD, None
                level += 1
                merger = self.deepstack[self.spec.deepstack_layers.index(i)]
                self._merge(merger, x_PD, step, out_LUE[level])
            if i in step.cuts:
                step.cut()
        if self.norm is not None:
            x_PD = self.norm(x_PD) if residual_PD is None else self.norm.close(x_PD, residual_PD)
        elif residual_PD is not None:
            x_PD = x_PD + residual_PD
        self._merge(self.projector, x_PD, step, out_LUE[0])
        return out_LUE

    def _warmup_layers(self) -> list[int]:
        """The smallest set of blocks that launches every kernel of the tower. The last is one of them, so that what
        follows the blocks gets its usual input."""
        full, deepstack = self.spec.full_layers, self.spec.deepstack_layers
        mergers = {i: merger.kind() for i, merger in zip(deepstack, self.deepstack, strict=True)}
        kinds = (
            (i in full, mergers.get(i), i == 0 or i - 1 in deepstack, block.kind())
            for i, block in enumerate(self.blocks)
        )
        return sorted({*first_of_each(kinds), self.spec.depth - 1})

    def _embed(self, step: VisionStep) -> Tensor:
        # Padding may hold anything; attention gives it weight zero, and 0 * NaN is NaN.
        x_PD = self.patches(step.patches_PC.nan_to_num())
        if self.grid is not None:
            assert step.grid_indices_4P is not None and step.grid_weights_4P is not None
            x_PD = self.grid(x_PD, step.grid_indices_4P, step.grid_weights_4P)
        return self._windowed(step, x_PD)

    def _merge(self, projector: Merger | PoolProjector, x_PD: Tensor, step: VisionStep, out_UE: Tensor) -> None:
        """Writes rows to `out_UE` in patch order, undoing the reordering by windows."""
        if step.window_inverse_U is None:
            projector(x_PD, out_UE)
        else:
            torch.index_select(projector(x_PD), 0, step.window_inverse_U, out=out_UE)

    def _windowed(self, step: VisionStep, x_PX: Tensor) -> Tensor:
        """Reorders rows so that each window is contiguous; the patches of a unit stay together."""
        if step.window_order_U is None:
            return x_PX
        units_UX: Tensor = x_PX.unflatten(0, (-1, self.spec.unit))
        return units_UX[step.window_order_U].flatten(0, 1)


def _new_projector(place: Placement, tower: VisionSpec, spec: MergerSpec | PoolSpec | None) -> Merger | PoolProjector:
    assert spec is not None, "a tower with deepstack layers needs a deepstack merger"
    width, unit = tower.block.width, tower.unit
    return Merger(place, width, unit, spec) if isinstance(spec, MergerSpec) else PoolProjector(place, width, unit, spec)
