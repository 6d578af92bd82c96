"""Matrix products on Hopper: cuBLAS, or a quack tile where that is faster.

A product runs in whole waves of tiles over the GPU's multiprocessors, so its time follows from the tile size: cuBLAS
loses up to a quarter when its tiles fit the rows badly. Fusing an activation saves a pass over memory. `choose` is a
pure function of the shape, so eager passes and graphs give the same bits. Its thresholds come from a scan of tiles on
one H200, at the shapes of Qwen3-VL-8B; `python -m tests.gpu.profile_products` compares the choice with cuBLAS.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil
from typing import Any, Literal

import torch
from torch import Tensor

from saccade.kernels import fused, fused_vision

Kind = Literal["plain", "bias", "gated", "gelu_tanh"]

_NUM_PROCESSORS = 132
_FLOPS_PER_US = 5.93e6  # per multiprocessor, when the whole GPU reaches 783 TFLOP/s
_LAUNCH_US = 3.0
_MIN_ROWS = 384  # below this, cuBLAS splits the inner dimension better
_MANY_ROWS = {"plain": 1024, "bias": 16384, "gelu_tanh": 2**31}
_WIDE_ROWS, _WIDE_COLUMNS = 2048, 16384
_BYTES_PER_US = 4e6
_MIN_SHARE = 0.84  # of peak: a tile must reach this by estimate to be preferred to cuBLAS
_MIN_SHARE_ACTIVATED = 0.7  # lower, because cuBLAS needs a second kernel
_FEW_ROWS = 512  # below this cuBLAS is further from peak, and narrow tiles fill the GPU in one wave
_MIN_SHARE_FEW = 0.75
_MIN_FILLED = 0.92  # of a narrow tile's columns; below this, whole clusters compute padding
_ACTIVATIONS = {"gelu_tanh": "gelu_tanh_approx"}


@dataclass(frozen=True, slots=True)
class Tile:
    """`rows` x `columns` of the result (of its transpose if `is_swapped`), computed by one thread block."""

    rows: int
    columns: int
    cluster: tuple[int, int]
    is_swapped: bool = False
    is_pingpong: bool = True

    def microseconds(self, m: int, n: int, k: int) -> float:
        height, width = (n, m) if self.is_swapped else (m, n)
        tall, wide = self.cluster
        tiles = _up(ceil(height / self.rows), tall) * _up(ceil(width / self.columns), wide)
        waves = ceil(tiles / (_NUM_PROCESSORS // (tall * wide) * (tall * wide)))
        return waves * 2 * self.rows * self.columns * k / _FLOPS_PER_US + _LAUNCH_US


_SMALL = Tile(128, 128, (2, 1))
_NARROW = (
    Tile(192, 112, (1, 2), is_swapped=True),
    Tile(128, 112, (1, 2), is_swapped=True),
    Tile(128, 96, (1, 2), is_swapped=True),
)
_TILES: dict[Kind, tuple[Tile, ...]] = {
    "plain": (
        Tile(128, 208, (2, 1), is_swapped=True),
        Tile(256, 192, (2, 1), is_pingpong=False),
        Tile(128, 256, (2, 1), is_pingpong=False),
        Tile(128, 160, (2, 1), is_swapped=True),
        Tile(192, 224, (2, 1), is_swapped=True, is_pingpong=False),
    ),
    "bias": (Tile(128, 192, (1, 2)), Tile(128, 160, (1, 2))),
    "gated": (Tile(256, 192, (2, 1), is_pingpong=False), Tile(128, 192, (1, 2))),
    "gelu_tanh": (Tile(128, 192, (2, 1), is_swapped=True), Tile(128, 208, (2, 1), is_swapped=True)),
}

EVERY_TILE: list[tuple[Kind, Tile]] = [
    *((kind, tile) for kind, tiles in _TILES.items() for tile in tiles),
    *(("plain", tile) for tile in _NARROW),
    ("gated", _SMALL),
]
_STEP = 16  # divides the rows and columns of every tile, so choices change only near its multiples
_MANY = 8192  # rows; the choice hardly changes above this


@lru_cache(maxsize=65536)
def choose(kind: Kind, m: int, n: int, k: int) -> Tile | None:
    """The tile for a product of (m, k) and (k, n); None for cuBLAS (and a separate kernel for an activation)."""
    if m < _MIN_ROWS or n % 8 or k % 8:
        return None
    if kind == "gated":
        return _choose_gated(m, n, k)
    if k > n and m >= _MANY_ROWS[kind]:
        return None  # cuBLAS was at least as fast in all measurements with such a large k
    tile = _fastest(kind, m, n, k)
    return tile if _share(tile, m, n, k) >= _min_share(kind, m) else None


@lru_cache
def _tiles_of(kind: Kind, n: int, k: int) -> frozenset[Tile]:
    """The tiles that `choose` returns for any number of rows. Between two multiples of the step, a tile is most
    efficient at the upper one. Some limits are at multiples, so the row before each is tried too."""
    steps = [*range(_MIN_ROWS, _MANY, _STEP), *range(_MANY, 8 * _MANY, _MANY // 8)]
    rows = (row for step in steps for row in (step, step - 1))
    return frozenset(tile for row in rows if (tile := choose.__wrapped__(kind, row, n, k)) is not None)


def _min_share(kind: Kind, m: int) -> float:
    if kind == "gelu_tanh":
        return _MIN_SHARE_ACTIVATED
    return _MIN_SHARE_FEW if kind == "plain" and m < _FEW_ROWS else _MIN_SHARE


def _choose_gated(m: int, n: int, k: int) -> Tile | None:
    if m >= _WIDE_ROWS and n >= _WIDE_COLUMNS:
        return _SMALL
    fused_tile, plain = _fastest("gated", m, n, k), _fastest("plain", m, n, k)
    apart_us = plain.microseconds(m, n, k) + _LAUNCH_US + 3 * m * n / _BYTES_PER_US
    is_fast = _share(fused_tile, m, n, k) >= _MIN_SHARE_ACTIVATED and fused_tile.microseconds(m, n, k) < apart_us
    return fused_tile if is_fast else None


def _fastest(kind: Kind, m: int, n: int, k: int) -> Tile:
    narrow = _NARROW if kind == "plain" and m < _FEW_ROWS else ()
    filled = (tile for tile in narrow if m / _up(m, tile.columns) >= _MIN_FILLED)
    return min((*_TILES[kind], *filled), key=lambda tile: tile.microseconds(m, n, k))


@dataclass(frozen=True, slots=True)
class HopperProducts:
    """The products of `reference`, with quack kernels for the tiles that `choose` returns."""

    plain: Callable[..., Any]
    activated: Callable[..., Any]
    configs: Mapping[Tile, Any]
    shapes_seen: set[tuple[Kind, int, int]] = field(default_factory=set)  # kind, n and k of the products so far

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        tile = self._tile("plain" if bias is None else "bias", x, weight)
        if tile is None:
            return fused.linear(x, weight, bias, out)
        y = _new(x, weight.shape[0]) if out is None else out
        self.plain(x, weight.t(), y, bias=bias, config=self.configs[tile], split_k=1)
        return y

    def gated_linear(self, x: Tensor, weight: Tensor, kind: str) -> Tensor:
        tile = self._tile("gated", x, weight) if kind == "silu" else None
        if tile is None and x.shape[0] == 1:
            return fused.gated_linear(x, weight, kind)
        if tile is None:
            return fused.gated_activation(self.linear(x, weight), kind)
        y = _new(x, weight.shape[0] // 2)
        self._activate(tile, x, weight, None, y, "swiglu", concat_layout=("B",))
        return y

    def activated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
        tile = self._tile("gelu_tanh", x, weight) if kind == "gelu_tanh" else None
        if tile is None:
            return fused_vision.activated_linear(x, weight, bias, kind)
        y = _new(x, weight.shape[0])
        self._activate(tile, x, weight, bias, y, _ACTIVATIONS[kind])
        return y

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Compiles every tile that the products so far may need at other numbers of rows. That takes seconds per tile,
        unless it is in quack's disk cache."""
        for kind, tile in self.tiles():
            self.compile_tile(kind, tile, device, dtype)

    def tiles(self) -> list[tuple[Kind, Tile]]:
        """The tiles that the products so far may need at any number of rows; all tiles if there was no product yet."""
        shapes = self.shapes_seen | {("plain", n, k) for kind, n, k in self.shapes_seen if kind == "gated"}
        found = {(kind, tile) for kind, n, k in shapes for tile in _tiles_of(kind, n, k)}
        return [each for each in EVERY_TILE if each in found or not shapes]

    def compile_tile(self, kind: Kind, tile: Tile, device: torch.device, dtype: torch.dtype) -> None:
        x, weight, bias = (
            torch.zeros(shape, device=device, dtype=dtype) for shape in ((512, 512), (1024, 512), (1024,))
        )
        if kind == "gated":
            self._activate(tile, x, weight, None, _new(x, 512), "swiglu", concat_layout=("B",))
        elif kind == "gelu_tanh":
            self._activate(tile, x, weight, bias, _new(x, 1024), _ACTIVATIONS[kind])
        else:
            has_bias = {"bias": bias if kind == "bias" else None}
            self.plain(x, weight.t(), _new(x, 1024), **has_bias, config=self.configs[tile], split_k=1)

    def _tile(self, kind: Kind, x: Tensor, weight: Tensor) -> Tile | None:
        if x.dim() != 2 or not x.is_contiguous() or not weight.is_contiguous():
            return None
        n, k = weight.shape
        self.shapes_seen.add((kind, n, k))
        return choose(kind, x.shape[0], n, k)

    def _activate(
        self, tile: Tile, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, name: str, **layout: Any
    ) -> None:
        self.activated(
            x,
            weight.t(),
            bias=bias,
            activation=name,
            postact_out=y,
            store_preact=False,
            tuned=False,
            config=self.configs[tile],
            **layout,
        )


def load_products() -> HopperProducts | str:
    """Returns the products, or the reason they cannot be used."""
    try:
        interface = importlib.import_module("quack.gemm_interface")
        config = importlib.import_module("quack.gemm_config").GemmConfig
        plain, activated = interface.gemm_tuned.fn, interface.gemm_act
    except Exception as error:  # a broken installation must not stop a model that works without it
        return f"quack-kernels cannot be used: {type(error).__name__}"
    return HopperProducts(plain, activated, {tile: config(**_fields(tile)) for _, tile in EVERY_TILE})


def _fields(tile: Tile) -> dict[str, Any]:
    return {
        "tile_m": tile.rows,
        "tile_n": tile.columns,
        "pingpong": tile.is_pingpong,
        "cluster_m": tile.cluster[0],
        "cluster_n": tile.cluster[1],
        "swap_ab": tile.is_swapped,
        "device_capacity": 9,
        "is_dynamic_persistent": False,
    }


def _share(tile: Tile, m: int, n: int, k: int) -> float:
    ideal = 2 * m * n * k / (_FLOPS_PER_US * _NUM_PROCESSORS)
    return ideal / tile.microseconds(m, n, k)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _new(x: Tensor, width: int) -> Tensor:
    return torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
