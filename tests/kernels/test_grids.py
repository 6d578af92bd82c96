"""Sizes of grids and tiles, against Triton's own functions."""

import pytest

from saccade.kernels.grids import cdiv, next_power_of_2

triton = pytest.importorskip("triton")


def test_sizes_are_those_of_triton() -> None:
    sizes = (*range(1, 300), 1023, 1024, 1025, 151_936, 2**31 - 1, 2**31, 2**40 + 1)
    assert [next_power_of_2(size) for size in sizes] == [triton.next_power_of_2(size) for size in sizes]
    parts = (1, 2, 3, 16, 512, 1024)
    assert [cdiv(size, part) for size in sizes for part in parts] == [
        triton.cdiv(size, part) for size in sizes for part in parts
    ]
    assert cdiv(0, 8) == 0
