"""Random rows and parameters for sampling tests. Padded rows are poisoned."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

NAN, INF = float("nan"), float("inf")

# temperature, top_k, top_p, min_p: each filter alone, all together, filters that keep one token or (nearly) all
SETTINGS = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 20, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.3, 0, 1.0, 0.05),
    (0.8, 50, 0.8, 0.02),
    (2.5, 0, 0.999, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 700, 0.95, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 10**6, 0.5, 0.0),
    (0.0, 5, 0.5, 0.5),
    (1.0, 3, 1.0, 0.9),
]


@dataclass(frozen=True)
class Rows:
    """The arguments of `sample`."""

    logits: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    counters: Tensor

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, f.name) for f in fields(self))

    def take(self, rows: list[int]) -> Rows:
        return Rows(*(x[rows] for x in self.inputs))

    def to(self, device: str) -> Rows:
        return Rows(*(x.to(device) for x in self.inputs))

    def with_(self, **changes: Any) -> Rows:
        return replace(self, **changes)


def rows_of(settings: list[tuple[float, int, float, float]], vocabulary: int, *, seed: int, scale: float = 3.0) -> Rows:
    """One row of normal logits for each setting, with seeds and counters beyond 32 bits and of both signs."""
    generator = torch.Generator().manual_seed(seed)
    count = len(settings)
    columns = list(zip(*settings, strict=True))
    return Rows(
        logits=torch.randn(count, vocabulary, generator=generator) * scale,
        temperature=torch.tensor(columns[0], dtype=torch.float32),
        top_k=torch.tensor(columns[1], dtype=torch.int32),
        top_p=torch.tensor(columns[2], dtype=torch.float32),
        min_p=torch.tensor(columns[3], dtype=torch.float32),
        seeds=torch.randint(-(2**62), 2**62, (count,), generator=generator),
        counters=torch.randint(0, 2**35, (count,), generator=generator),
    )


def repeated(logits: Tensor, setting: tuple[float, int, float, float], num_draws: int, *, seed: int) -> Rows:
    """The same logits num_draws times, with counters 0, 1, 2 ... of one seed."""
    one = rows_of([setting], 1, seed=0)
    return Rows(
        logits=logits.expand(num_draws, -1),
        **{name: getattr(one, name).expand(num_draws) for name in ("temperature", "top_k", "top_p", "min_p")},
        seeds=torch.full((num_draws,), seed),
        counters=torch.arange(num_draws),
    )


def poisoned(rows: Rows, where: list[int]) -> Rows:
    """Sets the logits and parameters of some rows to NaN, or to absurd integers."""
    copies = [x.clone() for x in rows.inputs]
    for x in copies:
        x[where] = NAN if x.is_floating_point() else -(2**31)
    return Rows(*copies)


def flags(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


def integers(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def pack_bits(is_allowed_NV: Tensor) -> Tensor:
    """The bits of each row as int32 words."""
    num_rows, vocabulary = is_allowed_NV.shape
    words = torch.zeros(num_rows, -(-vocabulary // 32), dtype=torch.int64)
    for token in range(vocabulary):
        words[:, token // 32] |= is_allowed_NV[:, token].long() << (token % 32)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
