"""Pictures of nothing that the model knows, with the look of photos: it learns to say so. B pictures, H x W pixels.

Photos have as much variation at every scale, and edges where things hide others. Both are drawn: sums of noise at all
scales, and many overlapping leaves of any size, which leave no ground between them.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

MOST_LEAVES = 36
SCALES = (2, 3, 5, 9, 17, 33, 65)
HALF = 0.5


def strange(batch: int, height: int, width: int, device: torch.device) -> Tensor:
    """(B, 3, H, W): clouds, leaves, or leaves with the clouds as their surface; some with straight or bent stripes, and
    most with less colour than pure noise has."""
    if not batch:
        return torch.zeros(0, 3, height, width, device=device)
    chance = torch.rand(batch, 1, 1, 1, device=device)
    clouds = _clouds(batch, height, width, device)
    striped = (clouds + 0.5 * _stripes(clouds)).clamp(0, 1)
    clouds = torch.where(torch.rand(batch, 1, 1, 1, device=device) < 0.25, striped, clouds)
    leaves = _leaves(batch, height, width, device)
    mixed = (leaves + (clouds - HALF) * torch.rand(batch, 1, 1, 1, device=device)).clamp(0, 1)
    picture = torch.where(chance < 0.3, clouds, torch.where(chance < 0.45, leaves, mixed))
    colorful = 0.1 + 0.9 * torch.rand(batch, 1, 1, 1, device=device)
    return torch.lerp(picture.mean(1, keepdim=True).expand_as(picture), picture, colorful)


def _clouds(batch: int, height: int, width: int, device: torch.device) -> Tensor:
    """Noise that is weaker the finer it is, mostly of light and dark, a little of colour."""
    fade = 0.4 + 0.6 * torch.rand(batch, 1, 1, 1, device=device)
    total = torch.zeros(batch, 3, height, width, device=device)
    for level, nodes in enumerate(SCALES):
        grey = torch.randn(batch, 1, nodes, nodes, device=device)
        noise = grey + 0.4 * torch.randn(batch, 3, nodes, nodes, device=device)
        spread = functional.interpolate(noise, size=(height, width), mode="bilinear", align_corners=True)
        total = total + spread * (0.16 * fade.pow(level))
    base = torch.rand(batch, 3, 1, 1, device=device) * 0.5 + 0.25
    return (base + total).clamp(0, 1)


def _stripes(clouds: Tensor) -> Tensor:
    """Waves across the picture, bent by what is there."""
    batch, _, height, width = clouds.shape
    device = clouds.device
    y, x = _places(height, width, device)
    angle, often, bend = (torch.rand(batch, 1, 1, 1, device=device) for _ in range(3))
    along = (angle * math.pi).cos() * x + (angle * math.pi).sin() * y
    waves: Tensor = torch.sin(along * (8 + 60 * often) + 12 * bend * clouds.mean(1, keepdim=True))
    return waves


def _leaves(batch: int, height: int, width: int, device: torch.device) -> Tensor:
    """Ellipses and strips that hide each other, the large ones first; colours of a picture are near each other."""
    y, x = _places(height, width, device)
    size = 0.7 * torch.rand(batch, MOST_LEAVES, device=device).pow(2) + 0.04
    size = size.sort(dim=1, descending=True).values
    middle_x, middle_y = (torch.rand(batch, MOST_LEAVES, device=device) for _ in range(2))
    turn = torch.rand(batch, MOST_LEAVES, device=device) * math.pi
    slim = 0.15 + 0.85 * torch.rand(batch, MOST_LEAVES, device=device)
    power = torch.where(torch.rand(batch, MOST_LEAVES, device=device) < HALF, 2.0, 8.0)  # ellipses, and near rectangles
    tone = torch.rand(batch, 1, 3, device=device)
    color = torch.lerp(tone.expand(-1, MOST_LEAVES, -1), torch.rand(batch, MOST_LEAVES, 3, device=device), 0.6)
    canvas = tone[:, 0, :, None, None].expand(-1, -1, height, width)
    for k in range(MOST_LEAVES):
        at = [values[:, k, None, None, None] for values in (middle_x, middle_y, turn, size, slim, power)]
        dx, dy = x - at[0], y - at[1]
        across, down = dx * at[2].cos() + dy * at[2].sin(), dy * at[2].cos() - dx * at[2].sin()
        inside = (across / at[3]).abs().pow(at[5]) + (down / (at[3] * at[4])).abs().pow(at[5]) < 1
        shade = color[:, k, :, None, None] * (0.8 + 0.4 * (across / at[3]).clamp(-1, 1) * HALF)
        canvas = torch.where(inside, shade.clamp(0, 1), canvas)
    return canvas


def _places(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of every pixel, 0 to 1 along the shorter side."""
    side = min(height, width)
    y = torch.arange(height, device=device)[None, None, :, None] / side
    return y, torch.arange(width, device=device)[None, None, None, :] / side
