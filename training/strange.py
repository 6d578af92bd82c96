"""Pictures of many kinds that show nothing the model knows; it learns to say so. B pictures, H x W pixels."""

import random
from collections.abc import Callable
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from training import papers, photos

Kind = Callable[[int, int, int, torch.device], Tensor]


def strange(batch: int, height: int, width: int, glyphs_FGSS: Tensor) -> Tensor:
    """Draws (B, 3, H, W) pictures, as many of each kind, but twice as many leaves, in random order, most paler."""
    device = glyphs_FGSS.device
    if not batch:
        return torch.zeros(0, 3, height, width, device=device)
    kinds: tuple[tuple[int, Kind], ...] = (
        *((2, photos.foliage), (1, photos.clouds), (1, photos.landscapes), (1, photos.portraits), (1, photos.pebbles)),
        *((1, partial(kind, glyphs_FGSS=glyphs_FGSS)) for kind in (papers.pages, papers.screens)),
        *((1, papers.plots), (1, papers.doodles), (1, papers.empty), (1, papers.cloths), (1, papers.tangles)),
    )
    total = sum(share for share, _ in kinds)
    shift = random.random()  # a small batch cannot have all kinds, so chance decides which it has
    ends = [int(batch * end / total + shift) for end in accumulate((share for share, _ in kinds), initial=0)]
    made = [
        kind(end - start, height, width, device)
        for (_, kind), start, end in zip(kinds, ends[:-1], ends[1:], strict=True)
        if end > start
    ]
    picture = torch.cat([part.expand(-1, 3, -1, -1) for part in made])
    picture = picture[
        torch.rand(batch, device=device).argsort()
    ]  # `photograph` treats pictures by their place in the batch
    colorful = photos.rand(batch, 0.1, 1.4, device).clamp(max=1)
    return torch.lerp(picture.mean(1, keepdim=True).expand_as(picture), picture, colorful)
