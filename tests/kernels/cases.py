"""Random inputs for kernel tests, with NaN wherever a kernel must not read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

POISON = float("nan")


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def qkv_slices(
    num_rows: int,
    num_heads: int,
    num_groups: int,
    head_width: int,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as strided views of one fused projection."""
    row = randn(num_rows, (num_heads + 2 * num_groups) * head_width, seed=seed, dtype=dtype, device=device)
    q, k, v = row.split([num_heads * head_width, num_groups * head_width, num_groups * head_width], dim=1)
    return (
        q.view(num_rows, num_heads, head_width),
        k.view(num_rows, num_groups, head_width),
        v.view(num_rows, num_groups, head_width),
    )


def rotary_tables(num_rows: int, width: int, *, seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """cos and sin with a different angle in every column, so that a test notices swapped halves."""
    angles = randn(num_rows, width, seed=seed, device=device) * 3
    return angles.cos(), angles.sin()


def turned(
    kernels: Any,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    weights: tuple[Tensor | None, Tensor | None] = (None, None),
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Queries and keys after norm and rotary, through a cache whose blocks have one slot."""
    keys, values = (torch.zeros_like(k).unsqueeze(1) for _ in "kv")
    slots = torch.arange(len(k), dtype=torch.int32, device=k.device)
    q = kernels.qk_norm_rotary_store(q, k, k, *weights, 1e-6, cos, sin, slots, keys, values, offset=offset)
    return q, keys.squeeze(1)


def boundaries(lengths: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class Paged:
    """Requests over a paged cache. Block 0, unused blocks and unused slots hold NaN."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    query_start: Tensor
    key_lengths: Tensor
    block_tables: Tensor
    num_queries: list[int]
    num_keys: list[int]
    keys: list[Tensor]
    values: list[Tensor]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (
            self.q,
            self.k_cache,
            self.v_cache,
            self.query_start,
            self.key_lengths,
            self.block_tables,
        )


def paged_case(
    num_queries: list[int],
    num_keys: list[int],
    *,
    num_heads: int,
    num_groups: int,
    head_width: int,
    block_size: int = 16,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    poison: float = POISON,
) -> Paged:
    """Request r has num_queries[r] rows over num_keys[r] keys. With 0 keys it is a dummy with poisoned queries."""
    blocks_each = [-(-n // block_size) for n in num_keys]
    num_blocks, table_width = sum(blocks_each) + 3, max([*blocks_each, 1]) + 1
    generator = torch.Generator().manual_seed(seed + 1)
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    k_cache, v_cache = (torch.full((num_blocks, block_size, num_groups, head_width), poison) for _ in "kv")
    tables = torch.zeros(len(num_keys), table_width, dtype=torch.int32)
    q = randn(sum(num_queries), num_heads, head_width, seed=seed)
    keys, values, row = [], [], 0
    for r, (n, length) in enumerate(zip(num_queries, num_keys, strict=True)):
        k = randn(length, num_groups, head_width, seed=seed + 100 + r)
        v = randn(length, num_groups, head_width, seed=seed + 200 + r)
        blocks = [order.pop() for _ in range(blocks_each[r])]
        tables[r, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for cache, rows in ((k_cache, k), (v_cache, v)):
            slots = torch.full((len(blocks) * block_size, num_groups, head_width), poison)
            slots[:length] = rows
            cache[blocks] = slots.view(len(blocks), block_size, num_groups, head_width)
        if length == 0:
            q[row : row + n] = poison
        keys.append(k.to(device, dtype))
        values.append(v.to(device, dtype))
        row += n
    return Paged(
        q=q.to(device, dtype),
        k_cache=k_cache.to(device, dtype),
        v_cache=v_cache.to(device, dtype),
        query_start=boundaries(num_queries, device),
        key_lengths=torch.tensor(num_keys, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        num_queries=num_queries,
        num_keys=num_keys,
        keys=keys,
        values=values,
    )


def span_limits(case: Paged, spans: dict[int, list[tuple[int, int]]]) -> Tensor:
    """The per-row limits of requests whose key positions [begin, end) are images."""
    limits = torch.zeros(case.q.shape[0], dtype=torch.int32)
    for r, ranges in spans.items():
        start = int(case.query_start[r])
        for i in range(case.num_queries[r]):
            position = case.num_keys[r] - case.num_queries[r] + i
            limits[start + i] = max([0, *(end for begin, end in ranges if begin <= position < end)])
    return limits.to(case.q.device)


def photo(height: int, width: int, *, seed: int) -> Tensor:
    """Bytes (height, width, 3): smooth areas, noise, and hard black and white edges that make filters overshoot."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, 4, 5, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bilinear")[0].permute(1, 2, 0)
    pixels = (smooth + 0.1 * torch.randn(height, width, 3, generator=generator)).mul(255).clamp(0, 255).byte()
    pixels[height // 3 : height // 2, width // 4 : width // 2] = 255
    pixels[height // 2 : height * 2 // 3, width // 3 :] = 0
    return pixels


def patches_to_frames(rows: Tensor, size_hw: tuple[int, int], patch: int, temporal_patch: int, merge: int) -> Tensor:
    """Turns patch rows back into frames (F, H, W, 3), one patch at a time."""
    height, width = size_hw[0] // patch, size_hw[1] // patch
    num_steps = rows.shape[0] // (height * width)
    frames = torch.empty(num_steps * temporal_patch, *size_hw, 3, dtype=rows.dtype)
    places = [
        (step, big_y * merge + y, big_x * merge + x)
        for step in range(num_steps)
        for big_y in range(height // merge)
        for big_x in range(width // merge)
        for y in range(merge)
        for x in range(merge)
    ]
    for row, (step, y, x) in zip(rows.cpu(), places, strict=True):
        cell = row.view(3, temporal_patch, patch, patch).permute(1, 2, 3, 0)
        time, down, across = (slice(i * n, (i + 1) * n) for i, n in ((step, temporal_patch), (y, patch), (x, patch)))
        frames[time, down, across] = cell
    return frames
