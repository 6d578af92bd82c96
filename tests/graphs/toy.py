"""A small packed encoder in plain torch, correct and with the bugs that graphs cause."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.graphs import (
    Arena,
    Batch,
    Capacity,
    Frame,
    GraphRunner,
    GraphSettings,
    Phase,
    Watched,
    boundaries,
    bridge,
    output,
    rows,
)

WIDTH, HEADS, LAYERS = 32, 4, 3
Attend = Callable[..., Tensor]


def segment_attention(qkv: Tensor, cu: Tensor) -> Tensor:
    """Rows attend within their segment; the boundaries are data."""
    q, k, v = qkv.view(qkv.shape[0], 3, HEADS, WIDTH // HEADS).permute(1, 2, 0, 3)
    row = torch.arange(qkv.shape[0], device=qkv.device, dtype=cu.dtype)
    segment = torch.bucketize(row, cu, right=True)
    apart = segment[:, None] != segment[None, :]
    scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(apart, -torch.inf)
    weights = scores.softmax(-1).masked_fill(apart, 0)
    out: Tensor = weights @ v.nan_to_num()  # a masked weight is zero, but zero times NaN is NaN
    return out.transpose(0, 1).reshape(qkv.shape[0], WIDTH)


def split_attention(qkv: Tensor, lengths: list[int]) -> Tensor:
    """The same, with the boundaries as host values."""
    ends = torch.zeros(2, dtype=torch.int32, device=qkv.device)
    return torch.cat([segment_attention(part, ends + len(part)) for part in qkv.split(lengths)])


def from_data(frame: Frame, qkv: Tensor) -> Tensor:
    return segment_attention(qkv, frame["cu"])


def from_key(frame: Frame, qkv: Tensor) -> Tensor:
    """Right in exact graphs only, whose key covers these host values."""
    return split_attention(qkv, np.diff(frame.structure("cu")).tolist())


def read_back(frame: Frame, qkv: Tensor) -> Tensor:
    """A bug: reads boundaries of a capacity graph back from their buffer during capture."""
    return split_attention(qkv, np.diff(frame["cu"].tolist()).tolist())


class HostCopy:
    """The bug of sglang#16902: reads boundaries from the host's copy, which a capture silently freezes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lengths: list[int] = []
        admit = Arena.admit

        def remember(arena: Arena, values: Mapping[str, Any]) -> Batch:
            batch = admit(arena, values)
            self.lengths = np.diff(batch.structure["cu"]).tolist()
            return batch

        monkeypatch.setattr(Arena, "admit", remember)

    def attend(self, frame: Frame, qkv: Tensor) -> Tensor:
        return split_attention(qkv, self.lengths)


class Encoder(nn.Module):
    def __init__(
        self, attend: Attend = from_data, dtype: torch.dtype = torch.float32, *, has_parts: bool = False
    ) -> None:
        super().__init__()
        self.attend, self.has_parts = attend, has_parts
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH, dtype=dtype) for _ in range(LAYERS))
        self.proj = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(LAYERS))
        self.mlp = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(LAYERS))

    def forward(self, frame: Frame) -> dict[str, Tensor]:
        x = frame["x"]
        for i, (qkv, proj, mlp) in enumerate(zip(self.qkv, self.proj, self.mlp, strict=True)):
            if i and self.has_parts:
                frame.cut()
            attended = frame.outside(self.attend, frame, out="attended", qkv=qkv(x))
            x = x + proj(attended)
            x = x + F.gelu(mlp(x))
        return {"y": x}


def example(
    lengths: tuple[int, ...], rng: torch.Generator, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    x = torch.randn(sum(lengths), WIDTH, generator=rng).to(device, dtype)
    return {"x": x, "cu": [0, *np.cumsum(lengths).tolist()]}


def make_phase(
    buckets: tuple[tuple[int, int], ...] = ((16, 4), (32, 6)),
    *,
    encoder: nn.Module | None = None,
    arena: Arena | None = None,
    device: str = "cpu",
    state: Mapping[str, Tensor] | None = None,
) -> Phase:
    torch.manual_seed(1)
    encoder = (encoder or Encoder()).to(device)
    dtype = next(encoder.parameters()).dtype
    return Phase(
        name="toy",
        body=encoder,
        arena=arena or make_arena(max(r for r, _ in buckets), max(s for _, s in buckets), device, dtype),
        rows="tokens",
        buckets=tuple(Capacity.of(tokens=r, segments=s) for r, s in buckets),
        example=partial(example, device=device, dtype=dtype),
        state=state if state is not None else Watched.of_module(encoder),
    )


def make_arena(tokens: int, segments: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Arena:
    buffers = [
        rows("x", ("tokens", WIDTH), dtype),
        boundaries("cu", of="tokens", count="segments"),
        bridge("qkv", ("tokens", 3 * WIDTH), dtype),
        bridge("attended", ("tokens", WIDTH), dtype),
        output("y", ("tokens", WIDTH), dtype),
    ]
    return Arena(buffers, {"tokens": tokens, "segments": segments}, device)


def make_runner(settings: GraphSettings | None = None, **phase: Any) -> GraphRunner:
    runner = GraphRunner(make_phase(**phase), settings)
    runner.capture_buckets()
    return runner


def batch(*lengths: int, seed: int = 0, device: str = "cpu") -> dict[str, Any]:
    return example(lengths, torch.Generator().manual_seed(seed), device)


def alone(runner: GraphRunner, values: Mapping[str, Any]) -> Tensor:
    """The oracle: runs every segment by itself, so that boundaries cannot matter."""
    cu = values["cu"]
    parts = [
        runner.eager({"x": values["x"][low:high], "cu": [0, high - low]}, lambda outputs: outputs["y"].clone())
        for low, high in pairwise(cu)
    ]
    return torch.cat(parts)
