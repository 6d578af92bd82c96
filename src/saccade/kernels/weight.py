"""Weight matrices, plain or in e4m3 with scales, and inputs in the form that a weight takes.

M rows of input, N rows of a weight (columns of the result), K inner width. An e4m3 element stands for itself times its
scale. A product with an e4m3 weight takes its inputs in e4m3, too. A single row is the exception: its time is the time
to read the weight, so the row stays as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST_SCALE = 2.0**-40  # of rows of zeros
BLOCK = 128
_ALIGNED_SCALES = 4  # cuBLAS reads the scales of a row of blocks four at a time


class Layout(Enum):
    PLAIN = "plain"  # the model's own dtype
    ROWS = "rows"  # e4m3 with a scale per row; inputs have one per row, too, or a given one
    BLOCKS = "blocks"  # e4m3 with a scale per 128 x 128 block; inputs have one for every 128 values of a row


class Scaled(NamedTuple):
    """Inputs of a product in e4m3, (M, K), with scales (M, 1) or (M, K / 128 rounded up)."""

    data: Tensor
    scales: Tensor


class Pending(NamedTuple):
    """A single row whose RMS norm is left to the product that reads it, which saves a kernel. The product normalises
    x + residual and writes that sum to `total`. Without a residual, `total` is x itself."""

    x: Tensor
    residual: Tensor | None
    total: Tensor
    weight: Tensor
    eps: float
    offset: float

    def normed(self, rms_norm: Callable[..., Tensor], add_rms_norm: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
        """Normalises the row now, for products that cannot do it themselves."""
        if self.residual is None:
            return rms_norm(self.x, self.weight, self.eps, offset=self.offset)
        row, total = add_rms_norm(self.x, self.residual, self.weight, self.eps, offset=self.offset)
        self.total.copy_(total)
        return row


Inputs = Tensor | Scaled | Pending


@dataclass(frozen=True)
class Weight:
    """A matrix (N, K), or (E, N, K) for experts. `dtype` is the dtype of its products.

    `scales` are float32 and have shape (N,) or (N / 128, K / 128) rounded up, preceded by E for experts. `input_scale`
    is a scalar, given if the checkpoint says how to scale inputs.
    """

    data: Tensor
    dtype: torch.dtype
    layout: Layout = Layout.PLAIN
    scales: Tensor | None = None
    input_scale: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def is_plain(self) -> bool:
        return self.layout is Layout.PLAIN

    def needs_scaled(self, num_rows: int) -> bool:
        """Whether a product with `num_rows` rows takes them as `Scaled`."""
        return self.layout is not Layout.PLAIN and num_rows > 1

    def rows(self, start: int, count: int) -> "Weight":
        """A view of some rows. With block scales it must start at a block."""
        if self.scales is None:
            return replace(self, data=self.data[start : start + count])
        step = 1 if self.layout is Layout.ROWS else BLOCK
        assert start % step == 0, f"row {start} is inside a block of {step}"
        scales = self.scales[start // step : -(-(start + count) // step)]
        return replace(self, data=self.data[start : start + count], scales=scales)

    def columns(self, count: int) -> "Weight":
        """A view of the first columns."""
        if self.layout is not Layout.BLOCKS or self.scales is None:
            return replace(self, data=self.data[:, :count])
        return replace(self, data=self.data[:, :count], scales=self.scales[:, : -(-count // BLOCK)])

    def experts(self) -> list["Weight"]:
        """A view of each expert's matrix."""
        scales = [None] * len(self.data) if self.scales is None else list(self.scales)
        return [replace(self, data=data, scales=own) for data, own in zip(self.data, scales, strict=True)]

    def fill(self, tensor: Tensor) -> None:
        """Copies a tensor, quantising it if this weight has scales."""
        if self.scales is None:
            self.data.copy_(tensor)
            return
        rounded, scales = quantize(tensor.to(self.data.device), self.layout)
        self.data.copy_(rounded)
        self.scales.copy_(scales)


def new_weight(
    *shape: int, layout: Layout, dtype: torch.dtype, device: torch.device, has_input_scale: bool = False
) -> Weight:
    """A weight of zeros, with scales of 1."""
    if layout is Layout.PLAIN:
        return Weight(torch.zeros(shape, dtype=dtype, device=device), dtype)
    *experts, num_rows, inner = shape
    if layout is Layout.ROWS:
        scales = torch.ones((*experts, num_rows), device=device)
    else:
        num_blocks = -(-inner // BLOCK)
        room = -(-num_blocks // _ALIGNED_SCALES) * _ALIGNED_SCALES
        scales = torch.ones((*experts, -(-num_rows // BLOCK), room), device=device)[..., :num_blocks]
    data = torch.zeros(shape, dtype=E4M3, device=device)
    return Weight(data, dtype, layout, scales, torch.zeros((), device=device) if has_input_scale else None)


def quantize(tensor: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """A matrix in e4m3 and its scales, which map the largest absolute value to the largest e4m3 number."""
    if layout is Layout.ROWS:
        scales = to_scale(tensor.float().abs().amax(dim=1))
        return to_e4m3(tensor.float() / scales.unsqueeze(1)), scales
    scales = to_scale(_blocks(tensor.float().abs(), BLOCK).amax(dim=(1, 3)))
    return to_e4m3(tensor.float() / spread(scales, tensor.shape)), scales


def scale_inputs(x: Tensor, weight: Weight) -> Scaled:
    """Converts inputs to the form that this weight takes. A non-finite row does not affect the others."""
    x = x.float()
    if weight.input_scale is not None:
        scales = weight.input_scale.expand(x.shape[0], 1).contiguous()
    elif weight.layout is Layout.ROWS:
        scales = to_scale(x.abs().amax(dim=1, keepdim=True))
    else:
        scales = to_scale(_blocks(x.abs(), 1).amax(dim=(1, 3)))
    factors = scales.reciprocal()
    return Scaled(to_e4m3(x * (factors if factors.shape[1] == 1 else _wide(factors, x.shape[1]))), scales)


def num_rows_of(inputs: Inputs) -> int:
    if isinstance(inputs, Pending):
        return 1
    return (inputs if isinstance(inputs, Tensor) else inputs.data).shape[0]


def unscaled(inputs: Scaled) -> Tensor:
    """The values of scaled inputs, in float32."""
    scales = inputs.scales if inputs.scales.shape[1] == 1 else _wide(inputs.scales, inputs.data.shape[1])
    return inputs.data.float() * scales


def matrix_of(weight: Weight) -> Tensor:
    """The values of a weight, in float32."""
    if weight.scales is None:
        return weight.data.float()
    scales = weight.scales.unsqueeze(-1) if weight.layout is Layout.ROWS else spread(weight.scales, weight.shape)
    return weight.data.float() * scales


def to_scale(largest: Tensor) -> Tensor:
    return (largest / LARGEST).clamp(min=SMALLEST_SCALE)


def to_e4m3(x: Tensor) -> Tensor:
    """Rounds to nearest. Values beyond the largest number are clamped to it; torch would make them NaN."""
    return x.clamp(-LARGEST, LARGEST).to(E4M3)


def spread(scales: Tensor, shape: torch.Size) -> Tensor:
    """Block scales, repeated for each element of a matrix of this shape."""
    tall = scales.repeat_interleave(BLOCK, dim=-2)[..., : shape[-2], :]
    return _wide(tall, shape[-1])


def _wide(scales: Tensor, width: int) -> Tensor:
    return scales.repeat_interleave(BLOCK, dim=-1)[..., :width]


def _blocks(x: Tensor, height: int) -> Tensor:
    """A matrix cut into blocks, (block rows, height, block columns, 128), padded with zeros."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % BLOCK, 0, -x.shape[0] % height))
    return padded.view(padded.shape[0] // height, height, -1, BLOCK)
