"""Sizes of grids and tiles, on the host. Triton's functions of the same names serve kernels too and take 1.4 us a call,
a hundred times as long; a pass calls them several hundred times."""


def cdiv(size: int, part: int) -> int:
    """How many parts cover a size."""
    return -(-size // part)


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is at least `size`, which must be positive."""
    return 1 << (size - 1).bit_length()
