"""Comparisons of captures as a driver reports them: argument bytes, with addresses and uninitialised bytes."""

import struct

import pytest
import torch

from saccade.graphs import Arena, Capacity, output, rows
from saccade.graphs.memory_map import MemoryMap
from saccade.graphs.node_differences import differences
from saccade.graphs.nodes import Node, Touch
from saccade.graphs.recorded import Range, RecordedLane

CAPACITY = Capacity.of(tokens=4)


@pytest.fixture
def arena() -> Arena:
    return Arena([rows("x", ("tokens", 8), torch.float32), output("y", ("tokens", 8), torch.float32)], CAPACITY, "cpu")


@pytest.fixture
def memory(arena: Arena) -> MemoryMap:
    return MemoryMap(arena, CAPACITY, {"weight": WEIGHT}, RecordedLane())


WEIGHT = torch.randn(16, 8)


def kernel(*arguments: bytes, name: str = "kernel", grid: int = 1) -> Node:
    return Node(name, {"grid": (grid, 1, 1)}, raw={f"argument {i}": data for i, data in enumerate(arguments)})


def word(number: int) -> bytes:
    return struct.pack("<Q", number)


def found(one: Node, other: Node, memory: MemoryMap) -> list[str]:
    return [str(difference) for difference in differences([one], [other], memory)]


def test_a_number_that_differs_is_named_by_node_and_argument(memory: MemoryMap) -> None:
    one, other = (kernel(word(5), struct.pack("<i", number)) for number in (7, 9))
    assert found(one, other, memory) == [
        "frozen: node 0 (kernel) has argument 1 = 0x7, and 0x9 in a capture with different inputs"
    ]
    assert found(one, one, memory) == []


def test_addresses_are_named(arena: Arena, memory: MemoryMap) -> None:
    x, y = (arena.views(CAPACITY)[name].data_ptr() for name in ("x", "y"))
    assert found(kernel(word(x)), kernel(word(y + 32)), memory) == [
        "frozen: node 0 (kernel) has argument 0 = x, and y+32 in a capture with different inputs"
    ]
    (text,) = found(kernel(word(WEIGHT[2].data_ptr())), kernel(word(WEIGHT[3].data_ptr())), memory)
    assert "weight+64, and weight+96" in text


def test_different_grids_and_kernels_are_found(memory: MemoryMap) -> None:
    assert "has grid = (1, 1, 1), and (2, 1, 1)" in found(kernel(grid=1), kernel(grid=2), memory)[0]
    assert found(kernel(), kernel(name="other"), memory) == [
        "frozen: node 0 is kernel, and other in a capture with different inputs"
    ]
    more = list(differences([kernel()], [kernel(), kernel()], memory))
    assert [str(one) for one in more] == ["frozen: node 1 is nothing, and kernel in a capture with different inputs"]


def test_uninitialised_bytes_of_functors_and_casts_are_ignored(memory: MemoryMap) -> None:
    assert found(kernel(b"a"), kernel(b"b"), memory) == []
    cast = "_ZN2at6native27unrolled_elementwise_kernel...LoadWithCast"
    one, other = (kernel(word(number), name=cast) for number in (0x8_000000_04, 0x8_F2C610_04))
    assert found(one, other, memory) == []
    (text,) = found(one, kernel(word(0x4_000000_04), name=cast), memory)
    assert text.startswith("perhaps frozen: "), "structs of torch's own kernels may have more uninitialised bytes"


def test_undeclared_memory_has_no_name(memory: MemoryMap) -> None:
    elsewhere = torch.zeros(4)
    nodes = [Node("add", touches={"other": Touch(address, "(4,) float32")}) for address in (elsewhere.data_ptr(), 0)]
    assert memory.find(elsewhere.data_ptr()) is None
    assert found(nodes[0], nodes[1], memory) == []


def test_foreign_memory_is_held_on_the_device_and_not_declared(arena: Arena) -> None:
    weight = WEIGHT.data_ptr()

    class OnDevice(RecordedLane):
        def memory(self) -> tuple[list[Range], list[Range]]:
            return [(150, 160)], [(weight - 8, weight + WEIGHT.nbytes), (800, 900), (100, 200)]

    memory = MemoryMap(arena, CAPACITY, {"weight": WEIGHT}, OnDevice())
    addresses = (99, 100, 150, 199, 200, 500, 800, 900, weight - 8, weight)
    assert [one for one in addresses if memory.is_foreign(one)] == [100, 199, 800, weight - 8]
