"""The base of all layers: where their parameters live, and which checkpoint tensors fill them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.kernels.collectives import Collectives
from saccade.kernels.dispatch import Kernels
from saccade.layers.parallel import ALONE, ParallelGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The parameter view that one checkpoint tensor fills, and the shard of it that this rank takes. `shape` is that of
    the whole tensor in the checkpoint; along `dim` the view begins at `start`. `mean` and `std` are typical of trained
    tensors of this kind; dummy weights are drawn from them."""

    view: Tensor
    shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0
    mean: float = 0.0
    std: float

    def fill(self, tensor: Tensor) -> None:
        """Copies this rank's shard. Checkpoint tensors are memory-mapped, so only the shard is read."""
        assert tuple(tensor.shape) == self.shape, f"{tuple(tensor.shape)} for a slot of {self.shape}"
        self.view.copy_(self.shard_of(tensor))

    def shard_of(self, tensor: Tensor) -> Tensor:
        """This rank's part of a checkpoint tensor, as a view."""
        return tensor if self.dim is None else tensor.narrow(self.dim, self.start, self.view.shape[self.dim])


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a layer's parameters live, which kernels it calls and which rank it is."""

    kernels: Kernels
    device: torch.device
    dtype: torch.dtype
    group: ParallelGroup = ALONE

    def parameter(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self.device, dtype=self.dtype)


class Layer:
    """A callable with parameters. Children are attributes: layers, or lists of layers."""

    def own_slots(self) -> Iterator[tuple[str, Slot]]:
        """The slots of the layer's own parameters, without children."""
        return iter(())

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """All slots of this layer and its children by dotted path: exactly what a checkpoint must provide."""
        yield from self.own_slots()
        for name, child in self.children():
            for path, slot in child.slots():
                yield f"{name}.{path}", slot

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors of this layer and its children by dotted path; fused ones once."""
        return ((path, attributes[name]) for path, (attributes, name) in self.homes())

    def homes(self) -> Iterator[tuple[str, tuple[Mapping[str, Any], str]]]:
        """Where those tensors live, by dotted path: the attributes of a layer, and the name among them."""
        attributes = vars(self)
        yield from ((name, (attributes, name)) for name, value in attributes.items() if isinstance(value, Tensor))
        for name, child in self.children():
            yield from ((f"{name}.{path}", home) for path, home in child.homes())

    def links(self) -> Iterator[tuple[str, tuple[Any, Any]]]:
        """Other references that decide which tensors are used, by dotted path: child layers and None attributes."""
        attributes = vars(self)
        for name, value in attributes.items():
            if value is None or isinstance(value, Layer):
                yield name, (attributes, name)
            elif isinstance(value, list):
                yield from ((f"{name}.{i}", (value, i)) for i, item in enumerate(value) if isinstance(item, Layer))
        for name, child in self.children():
            yield from ((f"{name}.{path}", home) for path, home in child.links())

    def children(self) -> Iterator[tuple[str, "Layer"]]:
        for name, value in vars(self).items():
            if isinstance(value, Layer):
                yield name, value
            elif isinstance(value, list):
                yield from ((f"{name}.{i}", item) for i, item in enumerate(value) if isinstance(item, Layer))

    def parameter_bytes(self) -> int:
        """Bytes of this rank's slots; padding of a sharded vocabulary is not counted."""
        return sum(slot.view.nbytes for _, slot in self.slots())


EXCHANGE_MEMORY = "exchange.memory"


class Exchange(Layer):
    """The memory of the collectives. A layer although no checkpoint fills it, because graphs hold its address and it is
    watched like weights. Every pass writes it: phases name it in their `writes`, as the attribute `exchange` of a
    decoder or tower."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def homes(self) -> Iterator[tuple[str, tuple[Mapping[str, Any], str]]]:
        yield "memory", (vars(self._collectives), "memory")


def new_exchange(group: ParallelGroup) -> Exchange | None:
    return None if group.collectives is None else Exchange(group.collectives)
