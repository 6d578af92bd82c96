"""Weight formats: what a layer allocates, and which checkpoint tensors fill it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from saccade.errors import ConfigError
from saccade.kernels.weight import BLOCK, E4M3, Layout, Weight

ALIGNED, ROOM = 16, 64
ROOM_OF_QUANTIZED = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The destination of one checkpoint tensor: the parameter view it fills, and the shard that this rank takes.

    `shape` is the shape of the whole tensor in the checkpoint. The shard begins at `start` along `dim`. Dummy weights
    are drawn with `mean` and `std`, which are typical of trained tensors of this kind.
    """

    view: Tensor
    shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0
    mean: float = 0.0
    std: float

    def fill(self, tensor: Tensor) -> None:
        """Copies this rank's shard. Checkpoint tensors are memory-mapped, so nothing else is read."""
        assert self.fault(tensor) is None, self.fault(tensor)
        self.view.copy_(self.shard_of(tensor))

    def shard_of(self, tensor: Tensor) -> Tensor:
        """A view of this rank's shard of a checkpoint tensor."""
        return tensor if self.dim is None else tensor.narrow(self.dim, self.start, self.view.shape[self.dim])

    def fault(self, tensor: Tensor) -> str | None:
        """Why this slot cannot take the tensor, or None if it can."""
        if tuple(tensor.shape) != self.shape:
            return f"is {_size(tensor.shape)}; {_size(self.shape)} is needed"
        if (tensor.dtype.itemsize == 1 or self.view.dtype.itemsize == 1) and tensor.dtype != self.view.dtype:
            return (
                f"is {_word(tensor)}; {_word(self.view)} is needed: its quantization is not what config.json says, or "
                f"the layer is one that must be plain (embedding, head or router)"
            )
        return None

    @property
    def nbytes(self) -> int:
        return self.view.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingSlot(Slot):
    """The destination of a plain tensor that is quantised while it is copied."""

    weight: Weight

    def fill(self, tensor: Tensor) -> None:
        self.weight.fill(self.shard_of(tensor))

    def fault(self, tensor: Tensor) -> str | None:
        if tensor.dtype.itemsize == 1:
            return f"is {_word(tensor)}; weights that are already quantised need a quantization_config in config.json"
        return None if tuple(tensor.shape) == self.shape else f"is {_size(tensor.shape)}; {_size(self.shape)} is needed"

    @property
    def nbytes(self) -> int:
        return self.view.nbytes + (0 if self.weight.scales is None else self.weight.scales.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberSlot(Slot):
    """The destination of a single number, whatever its shape in the checkpoint. With `keeps_largest`, several tensors
    may fill it and the largest value stays."""

    keeps_largest: bool = False

    def fill(self, tensor: Tensor) -> None:
        number = tensor.reshape(()).to(self.view)
        self.view.copy_(self.view.maximum(number) if self.keeps_largest else number)

    def fault(self, tensor: Tensor) -> str | None:
        return None if tensor.numel() == 1 else f"is {_size(tensor.shape)}; a single number is needed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScaleSlot(Slot):
    """The destination of the scales of rows, (N, 1) or (N) in the checkpoint, or of one number for all of them."""

    def fill(self, tensor: Tensor) -> None:
        self.view.copy_(tensor.reshape(1, 1) if tensor.numel() == 1 else self.shard_of(tensor.reshape(self.shape)))

    def fault(self, tensor: Tensor) -> str | None:
        if tensor.dtype.itemsize == 1:
            return f"is {_word(tensor)}; scales in a float of 16 or 32 bits are needed"
        if tensor.numel() == 1 or tuple(tensor.shape) in (self.shape, self.shape[:1]):
            return None
        return f"is {_size(tensor.shape)}; {_size(self.shape)} or a single number is needed"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """The layout of a weight, and whether the checkpoint has its scales.

    Otherwise the checkpoint's weights are plain, and loading quantises them if the layout has scales. With
    `has_input_scale` the checkpoint also has a calibrated scale for the inputs.
    """

    layout: Layout = Layout.PLAIN
    is_stored: bool = False
    has_input_scale: bool = False

    def whole(self, num_rows: int) -> int:
        """`num_rows` rounded up to whole blocks, so that no two parts of a fused weight share a scale."""
        return -(-num_rows // BLOCK) * BLOCK if self.layout is Layout.BLOCKS else num_rows

    def slots(
        self, weight: Weight, shape: tuple[int, int], *, dim: int | None = None, start: int = 0, std: float
    ) -> Iterator[tuple[str, Slot]]:
        """The slots of `weight`, or part of one, which holds a shard of a checkpoint tensor of this shape."""
        place: dict[str, Any] = {"dim": dim, "start": start}
        if weight.scales is None:
            yield "weight", Slot(view=weight.data, shape=shape, std=std, **place)
            return
        if not self.is_stored:
            yield "weight", RoundingSlot(view=weight.data, weight=weight, shape=shape, std=std, **place)
            return
        yield "weight", Slot(view=weight.data, shape=shape, std=std, **place)
        yield "weight_scale", self._scale_slot(weight.scales, shape, dim, start)
        if weight.input_scale is not None:
            yield "input_scale", NumberSlot(view=weight.input_scale, shape=(), std=0.0, keeps_largest=True)

    def _scale_slot(self, scales: Tensor, shape: tuple[int, int], dim: int | None, start: int) -> Slot:
        if self.layout is Layout.ROWS:
            rows = {"dim": 0, "start": start} if dim == 0 else {}
            return RowScaleSlot(view=scales.unsqueeze(1), shape=(shape[0], 1), std=0.0, **rows)
        blocks = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
        if dim is None:
            return Slot(view=scales, shape=blocks, std=0.0)
        return Slot(view=scales, shape=blocks, dim=dim, start=start // BLOCK, std=0.0)


class Formats(Protocol):
    """The format of every weight of a model, by the dotted path of its layer."""

    def of(self, path: str) -> WeightFormat: ...

    @property
    def multiple(self) -> int:
        """A rank's share of an inner width is a multiple of this: of whole blocks, if blocks have scales."""

    def room(self, width: int) -> int:
        """The padded size of an inner width, between two layers. Padding is zero and adds nothing to sums; without it
        rows would be misaligned, and slower kernels would multiply them."""


@dataclass(frozen=True)
class PlainFormats:
    """No weight is quantised."""

    multiple = 1

    def of(self, path: str) -> WeightFormat:
        return WeightFormat()

    def room(self, width: int) -> int:
        return width if width % ALIGNED == 0 else -(-width // ROOM) * ROOM


def room_of_quantized(width: int) -> int:
    """`Formats.room` where some weights are quantised."""
    return -(-width // ROOM_OF_QUANTIZED) * ROOM_OF_QUANTIZED


def require_whole_blocks(start: int, count: int, what: str, size: int) -> None:
    """Raises if a rank's share begins inside a block and ends in another: its blocks would not be the checkpoint's."""
    if start % BLOCK and start % BLOCK + count > BLOCK:
        raise ConfigError(
            f"{what}: shares of {count} over {size} ranks cut the {BLOCK} x {BLOCK} blocks that are scaled together; "
            f"choose a smaller tensor-parallel size (--tensor-parallel-size)"
        )


def _word(tensor: Tensor) -> str:
    return "e4m3" if tensor.dtype == E4M3 else str(tensor.dtype).removeprefix("torch.")


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(str(n) for n in shape) or "a single number"
