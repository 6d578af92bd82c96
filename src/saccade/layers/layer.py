"""The base class of all layers: where parameters live, and which checkpoint tensors fill them."""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from saccade.kernels.collectives import Collectives
from saccade.kernels.dispatch import Kernels
from saccade.kernels.weight import Weight, new_weight
from saccade.layers.formats import Formats, PlainFormats, Slot, WeightFormat
from saccade.layers.parallel import ALONE, ParallelGroup

ALL_PLAIN = PlainFormats()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a layer's parameters live, which kernels it calls, and on which rank.

    `path` is the layer's dotted path, by which `formats` finds the format of its weights.
    """

    kernels: Kernels
    device: torch.device
    dtype: torch.dtype
    group: ParallelGroup = ALONE
    formats: Formats = ALL_PLAIN
    path: str = ""

    def inside(self, name: str) -> "Placement":
        """The placement of an attribute of the layer."""
        return replace(self, path=f"{self.path}.{name}" if self.path else name)

    def parameter(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self.device, dtype=self.dtype)

    def weight(self, *shape: int, part: str = "") -> tuple[Weight, WeightFormat]:
        """A new matrix and its format. If several checkpoint tensors fill it, `part` names one of them."""
        form = self.formats.of(f"{self.path}.{part}" if part else self.path)
        made = new_weight(
            *shape, layout=form.layout, dtype=self.dtype, device=self.device, has_input_scale=form.has_input_scale
        )
        return made, form


class Layer:
    """A callable with parameters. Its children are the attributes that are layers or lists of layers."""

    def own_slots(self) -> Iterator[tuple[str, Slot]]:
        """The slots of the layer's own parameters, without those of its children."""
        return iter(())

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """All slots of this layer and its children, by dotted path: exactly the tensors a checkpoint must provide."""
        yield from self.own_slots()
        for name, child in self.children():
            for path, slot in child.slots():
                yield f"{name}.{path}", slot

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors of this layer and its children, by dotted path. A fused tensor appears once."""
        return ((path, attributes[name]) for path, (attributes, name) in self.parameter_locations())

    def parameter_locations(self) -> Iterator[tuple[str, tuple[Mapping[str, Any], str]]]:
        """Where the tensors of `parameters` live, by dotted path: the attributes of a layer, and a name among them."""
        attributes = vars(self)
        for name, value in attributes.items():
            if isinstance(value, Tensor):
                yield name, (attributes, name)
            elif isinstance(value, Weight):
                held = vars(value)
                yield name, (held, "data")
                yield from (
                    (f"{name}.{part}", (held, part)) for part in ("scales", "input_scale") if held[part] is not None
                )
        for name, child in self.children():
            yield from ((f"{name}.{path}", location) for path, location in child.parameter_locations())

    def reference_locations(self) -> Iterator[tuple[str, tuple[Any, Any]]]:
        """Other attributes that decide which tensors are used, by dotted path: layers, weights and None."""
        attributes = vars(self)
        for name, value in attributes.items():
            if value is None or isinstance(value, (Layer, Weight)):
                yield name, (attributes, name)
            elif isinstance(value, list):
                yield from ((f"{name}.{i}", (value, i)) for i, item in enumerate(value) if isinstance(item, Layer))
        for name, child in self.children():
            yield from ((f"{name}.{path}", location) for path, location in child.reference_locations())

    def children(self) -> Iterator[tuple[str, "Layer"]]:
        for name, value in vars(self).items():
            if isinstance(value, Layer):
                yield name, value
            elif isinstance(value, list):
                yield from ((f"{name}.{i}", item) for i, item in enumerate(value) if isinstance(item, Layer))

    def kind(self) -> Hashable:
        """Layers of a class and kind launch the same kernels: their parameters have the same shapes and dtypes."""
        return tuple((path, tensor.shape, tensor.dtype) for path, tensor in self.parameters())

    def parameter_bytes(self) -> int:
        """Bytes of this rank's slots. Padding does not count."""
        return sum(slot.nbytes for _, slot in self.slots())


def first_of_each(kinds: Iterable[Hashable]) -> list[int]:
    """The first index of each kind."""
    first: dict[Hashable, int] = {}
    for i, kind in enumerate(kinds):
        first.setdefault(kind, i)
    return list(first.values())


EXCHANGE_MEMORY = "exchange.memory"


class Exchange(Layer):
    """The memory of the collectives, as the attribute `exchange` of a decoder or tower. No checkpoint fills it, but it
    is a layer because graphs hold its address, so it is watched like weights. Phases list it in `writes`."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def parameter_locations(self) -> Iterator[tuple[str, tuple[Mapping[str, Any], str]]]:
        yield "memory", (vars(self._collectives), "memory")


def new_exchange(group: ParallelGroup) -> Exchange | None:
    return None if group.collectives is None else Exchange(group.collectives)
