"""Where two captures of one body differ: node by node, argument by argument, word by word."""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from saccade.graphs.memory_map import MemoryMap
from saccade.graphs.nodes import Node

WORD = 8
# torch's own kernels take structs with uninitialised bytes, where a leftover may look frozen.
TORCH_KERNEL, PERHAPS = "_ZN2at", "perhaps "
CASTING = "WithCast"  # its kernels take a type byte, three uninitialised bytes, and four for the element size
MAX_DIMENSIONS = 64

# A word of an argument: kernel, argument, number of dimensions (structs begin with it), and word index.
Position = tuple[str, str, int, int]


@dataclass(frozen=True, slots=True)
class NodeDifference:
    """A difference between two captures. Differences in raw arguments have a position, because they may be noise."""

    node: int
    name: str
    what: str
    was: str
    now: str
    position: Position | None = None

    def __str__(self) -> str:
        where = f"node {self.node} ({self.name}) has {self.what} = " if self.what else f"node {self.node} is "
        perhaps = PERHAPS if self.position is not None and self.name.startswith(TORCH_KERNEL) else ""
        return f"{perhaps}frozen: {where}{_cut(self.was)}, and {_cut(self.now)} in a capture with different inputs"


def differences(one: Sequence[Node], other: Sequence[Node], memory: MemoryMap) -> Iterator[NodeDifference]:
    for i in range(max(len(one), len(other))):
        was, now = (nodes[i].name if i < len(nodes) else "nothing" for nodes in (one, other))
        if was != now:
            yield NodeDifference(i, "", "", was, now)
            return  # later nodes do not line up
        yield from _node_differences(i, one[i], other[i], memory)


def _node_differences(i: int, a: Node, b: Node, memory: MemoryMap) -> Iterator[NodeDifference]:
    here, there = _arguments(a, memory), _arguments(b, memory)
    for argument in dict.fromkeys((*here, *there)):
        was, now = here.get(argument, "nothing"), there.get(argument, "nothing")
        if was != now:
            yield NodeDifference(i, a.name, argument, was, now)
    for argument, data in a.raw.items():
        if data != b.raw.get(argument):
            yield from _raw_differences(i, a.name, argument, data, b.raw.get(argument, b""), memory)


def _raw_differences(
    i: int, name: str, argument: str, one: bytes, other: bytes, memory: MemoryMap
) -> Iterator[NodeDifference]:
    if len(one) == 1:
        return  # an empty functor, which is never initialised
    if CASTING in name and len(one) == WORD:
        one, other = (data[:1] + bytes(3) + data[4:] for data in (one, other))
    first = int.from_bytes(one[:4], "little")
    kind = first if first <= MAX_DIMENSIONS else 0
    for at, (was, now) in enumerate(zip_longest(words(one, memory), words(other, memory), fillvalue="nothing")):
        if was != now:
            place = f"{argument}, word {at}" if len(one) > WORD else argument
            yield NodeDifference(i, name, place, was, now, (name, argument, kind, at))


def _arguments(node: Node, memory: MemoryMap) -> dict[str, str]:
    """All arguments but raw ones, in comparable form: addresses by name."""
    found = {name: str(value) for name, value in node.values.items()}
    for argument, touch in node.touches.items():
        found[argument] = f"{memory.find(touch.address) or 'undeclared memory'} {touch.layout}"
    return found


def words(data: bytes, memory: MemoryMap) -> Iterator[str]:
    whole = len(data) // WORD * WORD
    for (word,) in struct.iter_unpack("<Q", data[:whole]):
        yield memory.find(word) or f"{word:#x}"
    if rest := data[whole:]:
        yield f"{int.from_bytes(rest, 'little'):#x}"


def _cut(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:117]}..."
