"""An auxiliary loss for the tower in the first part of a run: what is where, for single rows instead of whole pictures.

An answer says little about a picture, and nothing about which rows it came from. So a head that is dropped after
training predicts name, color and place of each thing from the row at its center. B pictures, N things, U rows of a
picture, D their width.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.language import COLORS, LETTERS, SHAPES
from training.model import FACTOR

FIRST_LETTER, FIRST_DIGIT = len(SHAPES), len(SHAPES) + len(LETTERS)
GROUND = FIRST_DIGIT + 10
NUM_NAMES = GROUND + 1
NOTHING = -100
NUM_GROUNDS = 3
PLACE_SHARE = 4.0
"""The weight of the distance to the right place (in picture sizes) next to the losses of names and colors."""


class Marks(NamedTuple):
    """All (B, N): the row at each thing's center, its name, its color, and its place as shares of width and height. A
    few rows far from all things are named GROUND. The name is NOTHING where two things share a row, or as padding."""

    units: Tensor
    names: Tensor
    colors: Tensor
    x: Tensor
    y: Tensor


def mark(names: Tensor, colors: Tensor, x: Tensor, y: Tensor, size: tuple[int, int]) -> Marks:
    """Marks things at these pixels of a picture of `size` (height, width)."""
    height, width = size
    row, column = (y.clamp(0, height - 1) // FACTOR).long(), (x.clamp(0, width - 1) // FACTOR).long()
    units = row * (width // FACTOR) + column
    present = names != NOTHING
    same = (units[:, :, None] == units[:, None]) & present[:, None]
    is_shared = same.sum(-1) > 1
    return Marks(units, names.masked_fill(is_shared, NOTHING), colors, x / width, y / height)


def mark_ground(x: Tensor, y: Tensor, radius: Tensor, size: tuple[int, int]) -> Marks:
    """Marks random places as GROUND, or as NOTHING if they are near a thing."""
    height, width = size
    at_x, at_y = (torch.rand(len(x), NUM_GROUNDS, device=x.device) * side for side in (width, height))
    away = torch.hypot(at_x[:, :, None] - x[:, None], at_y[:, :, None] - y[:, None]) - radius[:, None]
    names = torch.where(away.amin(-1) > FACTOR, GROUND, NOTHING)
    return mark(names, torch.zeros_like(names), at_x, at_y, size)


def mark_nothing(num: int, device: torch.device) -> Marks:
    """Marks of pictures without known things."""
    zero = torch.zeros(num, 1, device=device)
    return Marks(zero.long(), torch.full_like(zero.long(), NOTHING), zero.long(), zero, zero)


def beside(*parts: Marks) -> Marks:
    """Concatenates marks of the same pictures."""
    return Marks(*(torch.cat([part[i] for part in parts], 1) for i in range(len(parts[0]))))


def join(*parts: Marks) -> Marks:
    """Concatenates marks of different pictures, padded to the longest."""
    longest = max(part.names.shape[1] for part in parts)

    def padded(part: Tensor, value: int) -> Tensor:
        return functional.pad(part, (0, longest - part.shape[1]), value=value)

    fills = (0, NOTHING, 0, 0, 0)
    return Marks(*(torch.cat([padded(part[i], fill) for part in parts]) for i, fill in enumerate(fills)))


class Guide(nn.Module):
    """The head. It predicts name, color and two coordinates from a row, and returns the loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.read = nn.Linear(width, NUM_NAMES + len(COLORS) + 2)

    def forward(self, rows_BUD: Tensor, marks: Marks) -> Tensor:
        index = marks.units.unsqueeze(-1).expand(-1, -1, rows_BUD.shape[-1])
        read = self.read(rows_BUD.gather(1, index)).float()
        names, colors, places = read.split([NUM_NAMES, len(COLORS), 2], -1)
        is_there = (marks.names != NOTHING) & (marks.names != GROUND)
        loss = functional.cross_entropy(names.flatten(0, 1), marks.names.flatten(), ignore_index=NOTHING)
        wanted = marks.colors.masked_fill(~is_there, NOTHING)
        loss = loss + functional.cross_entropy(colors.flatten(0, 1), wanted.flatten(), ignore_index=NOTHING)
        away = (places - torch.stack([marks.x, marks.y], -1)).abs().sum(-1) * is_there
        total: Tensor = loss + PLACE_SHARE * away.sum() / is_there.sum().clamp(min=1)
        return total
