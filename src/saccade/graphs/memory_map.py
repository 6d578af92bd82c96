"""Names for addresses: which buffer, weight or temporary a node's argument points to."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from operator import itemgetter

from torch import Tensor

from saccade.graphs.arena import Arena
from saccade.graphs.lane import Lane

TEMPORARY = "a temporary"
MAX_NESTED = 64  # ranges that start inside another, such as metadata buffers in their slab


class MemoryMap:
    """The buffers of an arena at a capacity, declared state, and the lane's pool. All addresses in the pool get one
    name, because a temporary may lie elsewhere in another capture."""

    def __init__(self, arena: Arena, capacity: Mapping[str, int], state: Mapping[str, Tensor], lane: Lane) -> None:
        pool, on_device = lane.memory()
        ranges = [(start, stop, TEMPORARY) for start, stop in pool]
        ranges += [_range(name, storage) for name, storage in arena.storages().items()]
        ranges += [_range(name, tensor) for name, tensor in state.items()]
        ranges += [_range(name, view) for name, view in arena.views(capacity).items()]
        self._starts, self._stops, self._names = _flattened(ranges)
        self._device_memory = sorted(on_device)  # of ranges that do not overlap

    def is_foreign(self, address: int) -> bool:
        """Whether this is an address in device memory that is not declared here. False for other numbers."""
        at = bisect_right(self._device_memory, address, key=itemgetter(0)) - 1
        in_use = at >= 0 and address < self._device_memory[at][1]
        return in_use and self.find(address) is None

    def find(self, address: int) -> str | None:
        """The name and byte offset of the declared memory at an address, if any."""
        last = bisect_right(self._starts, address) - 1
        for at in range(last, max(last - MAX_NESTED, -1), -1):
            if address < self._stops[at]:
                name, offset = self._names[at], address - self._starts[at]
                return f"{name}+{offset}" if offset and name != TEMPORARY else name
        return None


def _range(name: str, tensor: Tensor) -> tuple[int, int, str]:
    """From the first byte to the last, whatever the strides."""
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size)
    nbytes = (extent + 1) * tensor.element_size() if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + nbytes, name


def _flattened(ranges: Iterable[tuple[int, int, str]]) -> tuple[list[int], list[int], list[str]]:
    """Ranges ordered by start. Of two with the same start, the later in the list gives the name."""
    kept: dict[int, tuple[int, str]] = {}
    for start, stop, name in ranges:
        if stop > start:
            before = kept.get(start)
            kept[start] = (max(stop, before[0]) if before else stop, name)
    starts = sorted(kept)
    return starts, [kept[start][0] for start in starts], [kept[start][1] for start in starts]
