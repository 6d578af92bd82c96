"""Sharded linear layers.

A column layer splits its output over the ranks, a row layer its input. A column layer followed by a row layer needs one
all-reduce, in the row layer. Fused layers are column layers whose rows come from several checkpoint tensors.

Widths between two layers are padded with zeros where that is faster (`Formats.room`). The layer before a product may be
told which weight it `feeds`; it then returns its result in the form that this weight takes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from saccade.errors import ConfigError
from saccade.kernels.weight import Inputs, Layout, num_rows_of
from saccade.layers.formats import Slot, require_whole_blocks
from saccade.layers.layer import Layer, Placement

BIAS_STD = 0.02


class Linear(Layer):
    """A layer that every rank holds whole."""

    def __init__(self, place: Placement, fan_in: int, fan_out: int, *, bias: bool = False) -> None:
        self.kernels = place.kernels
        self.weight, self.format = place.weight(fan_out, fan_in)
        self.bias = place.parameter(fan_out) if bias else None

    def __call__(self, x: Inputs, out: Tensor | None = None) -> Tensor:
        return self.kernels.multiply(x, self.weight, self.bias, out)

    def own_slots(self) -> Iterator[tuple[str, Slot]]:
        fan_out, fan_in = self.weight.shape
        yield from self.format.slots(self.weight, (fan_out, fan_in), std=fan_in**-0.5)
        if self.bias is not None:
            yield "bias", Slot(view=self.bias, shape=tuple(self.bias.shape), std=BIAS_STD)


@dataclass(frozen=True, slots=True)
class Rows:
    """A rank's rows of one checkpoint tensor: `count` of `total` from `start` on, padded with zeros to `room`."""

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
        self.weight, self.format = place.weight(sum(self.sizes), fan_in, part=parts[0].name)
        self.bias = place.parameter(sum(self.sizes)) if bias else None
        self._check_forms(place)

    def __call__(self, x: Inputs) -> Tensor:
        return self.kernels.multiply(x, self.weight, self.bias)

    def own_slots(self) -> Iterator[tuple[str, Slot]]:
        row, fan_in = 0, self.weight.shape[1]
        for part in self.parts:
            prefix = f"{part.name}." if part.name else ""
            shard = {"dim": 0, "start": part.start}
            held = self.weight.rows(row, part.count)
            for name, slot in self.format.slots(held, (part.total, fan_in), std=fan_in**-0.5, **shard):
                yield prefix + name, slot
            if self.bias is not None:
                view = self.bias[row : row + part.count]
                yield prefix + "bias", Slot(view=view, shape=(part.total,), std=BIAS_STD, **shard)
            row += part.room

    def _check_forms(self, place: Placement) -> None:
        """All parts are one product, so they must have the same format."""
        for part in self.parts:
            if part.name and place.formats.of(f"{place.path}.{part.name}") != self.format:
                names = ", ".join(part.name for part in self.parts)
                raise ConfigError(
                    f"{place.path}: {self.parts[0].name} and {part.name} are quantised differently, but are computed "
                    f"as one product; use a checkpoint that quantises all of {names} or none"
                )
            if self.format.layout is Layout.BLOCKS and self.format.is_stored:
                require_whole_blocks(part.start, part.count, f"{place.path}.{part.name}", place.group.size)


def column_linear(place: Placement, fan_in: int, fan_out: int, *, bias: bool = False) -> ColumnLinear:
    """Pads its output where that is faster."""
    return ColumnLinear(place, fan_in, [_inner_rows(place, "", fan_out)], bias=bias)


def gate_up_linear(place: Placement, fan_in: int, width: int, *, bias: bool = False) -> ColumnLinear:
    """[gate | up], each with `width` rows in the checkpoint and padded where that is faster."""
    return ColumnLinear(place, fan_in, [_inner_rows(place, name, width) for name in ("gate", "up")], bias=bias)


def _inner_rows(place: Placement, name: str, width: int) -> Rows:
    start, count, room = place.group.spread(width, "MLP width", multiple=place.formats.multiple)
    return Rows(name, width, start, count, place.formats.room(room))


class QKVLinear(ColumnLinear):
    """[q | k | v] in whole heads. With more ranks than key/value heads, neighbouring ranks hold the same head."""

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
        """`what` prefixes names in error messages."""
        start, self.num_heads = place.group.shard(num_heads, f"{what}num_heads")
        kv_start, self.num_kv_heads = place.group.shard_or_share(num_kv_heads, f"{what}num_kv_heads")
        self.head_dim = head_dim
        form = place.formats.of(f"{place.path}.q")
        own, own_kv = self.num_heads * head_dim, self.num_kv_heads * head_dim
        q = Rows("q", num_heads * head_dim, start * head_dim, own, form.whole(own))
        kv = (num_kv_heads * head_dim, kv_start * head_dim, own_kv, form.whole(own_kv))
        super().__init__(place, fan_in, [q, Rows("k", *kv), Rows("v", *kv)], bias=bias)
        self.has_room = any(part.room != part.count for part in self.parts)

    def heads(self, x_TD: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values per head, as views of one product."""
        y_TN = self(x_TD)
        if not self.has_room:
            y_THK = y_TN.view(y_TN.shape[0], self.num_heads + 2 * self.num_kv_heads, self.head_dim)
            q, k, v = y_THK.split_with_sizes([self.num_heads, self.num_kv_heads, self.num_kv_heads], 1)
        else:
            q, k, v = (
                rows[:, : part.count].unflatten(-1, (-1, self.head_dim))
                for rows, part in zip(y_TN.split(self.sizes, dim=-1), self.parts, strict=True)
            )
        return q, k, v


class RowLinear(Layer):
    """Each rank multiplies its columns, and an all-reduce adds the products; only rank 0 adds the bias. With `has_room`
    the inputs come from a padded layer. Otherwise all ranks must have equal shares."""

    def __init__(
        self, place: Placement, fan_in: int, fan_out: int, *, bias: bool = False, has_room: bool = False
    ) -> None:
        self.kernels, self.group = place.kernels, place.group
        self.shape = (fan_out, fan_in)
        if has_room:
            rows = _inner_rows(place, "", fan_in)
            self.start, self.count, room = rows.start, rows.count, rows.room
        else:
            self.start, self.count = place.group.shard(fan_in, "width")
            room = self.count
        self.weight, self.format = place.weight(fan_out, room)
        self.bias = place.parameter(fan_out) if bias else None
        if self.format.layout is Layout.BLOCKS and self.format.is_stored:
            require_whole_blocks(self.start, self.count, place.path, place.group.size)

    def __call__(self, x: Inputs, out: Tensor | None = None) -> Tensor:
        if self.group.size == 1:
            return self.kernels.multiply(x, self.weight, self.bias, out)
        bias = self.bias if self.group.rank == 0 else None
        staging = self.group.staging((num_rows_of(x), self.shape[0]), self.weight.dtype)
        return self.group.all_reduce(self.kernels.multiply(x, self.weight, bias, staging), out)

    def own_slots(self) -> Iterator[tuple[str, Slot]]:
        held = self.weight.columns(self.count)
        yield from self.format.slots(held, self.shape, dim=1, start=self.start, std=self.shape[1] ** -0.5)
        if self.bias is not None:
            yield "bias", Slot(view=self.bias, shape=tuple(self.bias.shape), std=BIAS_STD)
