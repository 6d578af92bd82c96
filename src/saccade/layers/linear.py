"""Sharded linear layers.

A column layer splits its output over the ranks, a row layer its input; a column layer followed by a row layer needs one
all-reduce, in the row layer. Fused layers are column layers whose rows come from several checkpoint tensors.

A width between two layers that is not a multiple of 16 is padded with zeros to the next multiple of 64 ("room"),
because rows that are not 32-byte aligned are multiplied by slower kernels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from saccade.layers.layer import Layer, Placement, Slot

BIAS_STD = 0.02
ALIGNED, ROOM = 16, 64


def with_room(width: int) -> int:
    return width if width % ALIGNED == 0 else -(-width // ROOM) * ROOM


class Linear(Layer):
    """A layer that every rank holds whole."""

    def __init__(self, place: Placement, fan_in: int, fan_out: int, *, bias: bool = False) -> None:
        self.kernels = place.kernels
        self.weight = place.parameter(fan_out, fan_in)
        self.bias = place.parameter(fan_out) if bias else None

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self.kernels.linear(x, self.weight, self.bias, out)

    def own_slots(self) -> Iterator[tuple[str, Slot]]:
        yield "weight", Slot(view=self.weight, shape=tuple(self.weight.shape), std=self.weight.shape[1] ** -0.5)
        if self.bias is not None:
            yield "bias", Slot(view=self.bias, shape=tuple(self.bias.shape), std=BIAS_STD)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one checkpoint tensor in a column layer: `count` of `total`, from `start`, zero-padded to `room`."""

    name: str
    total: int
    start: int
    count: int
    room: int


class ColumnLinear(Layer):
    """Each rank computes its rows of each part; the parts are concatenated."""

    def __init__(self, place: Placement, fan_in: int, parts: Sequence[Rows], *, bias: bool = False) -> None:
        self.kernels = place.kernels
        self.parts = tuple(parts)
        self.sizes = [part.room for part in parts]
        self.weight = place.parameter(sum(self.sizes), fan_in)
        self.bias = place.parameter(sum(self.sizes)) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.linear(x, self.weight, self.bias)

    def own_slots(self) -> Iterator[tuple[str, Slot]]:
        row, fan_in = 0, self.weight.shape[1]
        for part in self.parts:
            prefix = f"{part.name}." if part.name else ""
            view = self.weight[row : row + part.count]
            shape = (part.total, fan_in)
            yield prefix + "weight", Slot(view=view, shape=shape, dim=0, start=part.start, std=fan_in**-0.5)
            if self.bias is not None:
                view = self.bias[row : row + part.count]
                slot = Slot(view=view, shape=(part.total,), dim=0, start=part.start, std=BIAS_STD)
                yield prefix + "bias", slot
            row += part.room


def column_linear(place: Placement, fan_in: int, fan_out: int, *, bias: bool = False) -> ColumnLinear:
    """Padded if that is faster."""
    start, count, room = place.group.spread(fan_out, "MLP width")
    return ColumnLinear(place, fan_in, [Rows("", fan_out, start, count, with_room(room))], bias=bias)


def gate_up_linear(place: Placement, fan_in: int, width: int, *, bias: bool = False) -> ColumnLinear:
    """[gate | up], each of `width` rows in the checkpoint; padded if that is faster."""
    start, count, room = place.group.spread(width, "MLP width")
    parts = [Rows(name, width, start, count, with_room(room)) for name in ("gate", "up")]
    return ColumnLinear(place, fan_in, parts, bias=bias)


class QKVLinear(ColumnLinear):
    """[q | k | v] of whole heads. With more ranks than key/value heads, neighbouring ranks share a head."""

    def __init__(
        self,
        place: Placement,
        fan_in: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool = False,
        what: str = "",
    ) -> None:
        """`what` prefixes names in error messages; empty for the decoder."""
        start, self.num_heads = place.group.shard(num_heads, f"{what}num_heads")
        kv_start, self.num_kv_heads = place.group.shard_or_share(num_kv_heads, f"{what}num_kv_heads")
        self.head_dim = head_dim
        own, own_kv = self.num_heads * head_dim, self.num_kv_heads * head_dim
        q = Rows("q", num_heads * head_dim, start * head_dim, own, own)
        kv = (num_kv_heads * head_dim, kv_start * head_dim, own_kv, own_kv)
        super().__init__(place, fan_in, [q, Rows("k", *kv), Rows("v", *kv)], bias=bias)

    def heads(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values per head, as views of one product."""
        q, k, v = self(x_TD).split(self.sizes, dim=-1)
        kv = (self.num_kv_heads, self.head_dim)
        return q.unflatten(-1, (self.num_heads, self.head_dim)), k.unflatten(-1, kv), v.unflatten(-1, kv)


class RowLinear(Layer):
    """Each rank multiplies its columns, and an all-reduce adds the products; rank 0 adds the bias. With `has_room` the
    inputs come from a padded layer; otherwise shares must be equal."""

    def __init__(
        self, place: Placement, fan_in: int, fan_out: int, *, bias: bool = False, has_room: bool = False
    ) -> None:
        self.kernels, self.group = place.kernels, place.group
        self.shape = (fan_out, fan_in)
        if has_room:
            self.start, self.count, room = place.group.spread(fan_in, "MLP width")
            self.weight = place.parameter(fan_out, with_room(room))
        else:
            self.start, self.count = place.group.shard(fan_in, "width")
            self.weight = place.parameter(fan_out, self.count)
        self.bias = place.parameter(fan_out) if bias else None

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if self.group.size == 1:
            return self.kernels.linear(x, self.weight, self.bias, out)
        bias = self.bias if self.group.rank == 0 else None
        staging = self.group.staging((*x.shape[:-1], self.shape[0]), x.dtype)
        return self.group.all_reduce(self.kernels.linear(x, self.weight, bias, staging), out)

    def own_slots(self) -> Iterator[tuple[str, Slot]]:
        std = self.shape[1] ** -0.5
        view = self.weight[:, : self.count]
        yield "weight", Slot(view=view, shape=self.shape, dim=1, start=self.start, std=std)
        if self.bias is not None:
            yield "bias", Slot(view=self.bias, shape=tuple(self.bias.shape), std=BIAS_STD)
