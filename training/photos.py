"""Pictures that look like photos, drawn in batches. The model can name nothing in them. B pictures, H x W pixels, 0..1.

Photos vary equally at all scales, and have edges where things hide others. So these are drawn as sums of noise at all
scales, and as leaves of any size that hide each other. Nothing is copied from the host or waits for the device, so that
a CUDA graph can capture it.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

MAX_LEAVES = 28
SCALES = (2, 3, 5, 9, 17, 33, 65)
HALF = 0.5
SKIN = ((0.98, 0.87, 0.77), (0.35, 0.2, 0.12))
"""From the lightest to the darkest."""


def rand(batch: int, low: float, high: float, device: torch.device) -> Tensor:
    """(B, 1, 1, 1)"""
    return low + (high - low) * torch.rand(batch, 1, 1, 1, device=device)


def places(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The y and x of every pixel, 0 to 1 along the shorter side."""
    side = min(height, width)
    y = torch.arange(height, device=device)[None, None, :, None] / side
    return y, torch.arange(width, device=device)[None, None, None, :] / side


def noise(batch: int, height: int, width: int, device: torch.device, nodes: int, channels: int = 1) -> Tensor:
    """Noise of about unit strength, interpolated between `nodes` by `nodes` values."""
    values = torch.randn(batch, channels, nodes, nodes, device=device)
    return functional.interpolate(values, size=(height, width), mode="bilinear", align_corners=True)


def clouds(batch: int, height: int, width: int, device: torch.device) -> Tensor:
    """Noise that is weaker the finer it is, mostly in brightness, a little in color; a quarter has stripes."""
    fade = rand(batch, 0.25, 1.0, device)
    total = torch.zeros(batch, 3, height, width, device=device)
    for level, nodes in enumerate(SCALES):
        grey = noise(batch, height, width, device, nodes)
        spread = grey + 0.4 * noise(batch, height, width, device, nodes, 3)
        total = total + spread * (0.16 * fade.pow(level))
    base = torch.rand(batch, 3, 1, 1, device=device) * 0.5 + 0.25
    made = (base + total).clamp(0, 1)
    is_striped = rand(batch, 0, 1, device) < 0.25
    return torch.where(is_striped, (made + HALF * _stripes(made)).clamp(0, 1), made)


def _stripes(behind: Tensor) -> Tensor:
    """Waves across the picture, bent by its brightness."""
    batch, _, height, width = behind.shape
    y, x = places(height, width, behind.device)
    angle, often, bend = (rand(batch, 0, 1, behind.device) for _ in range(3))
    along = (angle * math.pi).cos() * x + (angle * math.pi).sin() * y
    waves: Tensor = torch.sin(along * (8 + 60 * often) + 12 * bend * behind.mean(1, keepdim=True))
    return waves


class Leaves(NamedTuple):
    """Ellipses, or with a high `power` almost rectangles; all (B, K), the first at the bottom, and colors (B, K, 3).
    `across` and `down` are half their size, relative to the shorter side of the picture."""

    x: Tensor
    y: Tensor
    across: Tensor
    down: Tensor
    turn: Tensor
    power: Tensor
    color: Tensor


def pile(canvas: Tensor, leaves: Leaves, shade: float = 0.2) -> Tensor:
    """Draws leaves, lighter on one side, onto the canvas."""
    y, x = places(canvas.shape[2], canvas.shape[3], canvas.device)
    cos, sin = leaves.turn.cos(), leaves.turn.sin()
    middle_across, middle_down = leaves.x * cos + leaves.y * sin, leaves.y * cos - leaves.x * sin
    rows = [cos / leaves.across, sin / leaves.across, middle_across / leaves.across]
    rows += [cos / leaves.down, sin / leaves.down, middle_down / leaves.down, leaves.power]
    for k in range(leaves.x.shape[1]):
        ax, ay, a0, bx, by, b0, power = (values[:, k, None, None, None] for values in rows)
        across, down = ax * x + (ay * y - a0), (bx * y - b0) - by * x
        inside = across.abs().pow(power) + down.abs().pow(power) < 1
        color = leaves.color[:, k, :, None, None] * (1 - shade / 2 + shade * across.clamp(-1, 1))
        canvas = torch.where(inside, color.clamp(0, 1), canvas)
    return canvas


def foliage(batch: int, height: int, width: int, device: torch.device) -> Tensor:
    """Leaves that fill the picture, the large ones at the bottom, in similar colors. Most have a cloudy texture."""
    shape = (batch, MAX_LEAVES)
    side = min(height, width)
    size = (0.7 * torch.rand(shape, device=device).pow(2) + 0.04).sort(dim=1, descending=True).values
    tone = torch.rand(batch, 1, 3, device=device)
    leaves = Leaves(
        torch.rand(shape, device=device) * (width / side),
        torch.rand(shape, device=device) * (height / side),
        size,
        size * (0.15 + 0.85 * torch.rand(shape, device=device)),
        torch.rand(shape, device=device) * math.pi,
        torch.where(torch.rand(shape, device=device) < HALF, 2.0, 8.0),
        torch.lerp(tone.expand(-1, MAX_LEAVES, -1), torch.rand(*shape, 3, device=device), 0.6),
    )
    made = pile(tone[:, 0, :, None, None].expand(-1, -1, height, width), leaves)
    rough = (rand(batch, 0, 1, device) - 0.3).clamp(min=0) * 1.4
    return (made + (clouds(batch, height, width, device) - HALF) * rough).clamp(0, 1)


def landscapes(batch: int, height: int, width: int, device: torch.device) -> Tensor:
    """Ridges in front of each other, under a sky."""
    y, x = places(height, width, device)
    y, x = y * (min(height, width) / height), x * (min(height, width) / width)
    rough = clouds(batch, height, width, device) - HALF
    sky = torch.cat([rand(batch, low, low + 0.5, device) for low in (0.3, 0.4, 0.5)], 1)
    canvas = sky + (HALF - y) * rand(batch, -0.3, 0.5, device) + rough * rand(batch, 0, 0.5, device)
    horizon = rand(batch, 0.2, 0.6, device)
    for _ in range(4):
        waves = sum(
            torch.sin(x * (often * rand(batch, 0.5, 1.5, device)) + rand(batch, 0, 6.3, device)) / often
            for often in (3.0, 8.0, 21.0, 55.0)
        )
        ridge = horizon + waves * rand(batch, 0.0, 0.5, device)
        color = torch.rand(batch, 3, 1, 1, device=device) * 0.6
        ground = color + rough * rand(batch, 0.2, 1.2, device) + (y - horizon) * rand(batch, -0.3, 0.3, device)
        canvas = torch.where(y > ridge, ground, canvas)
        horizon = horizon + rand(batch, 0.05, 0.3, device)
    return canvas.clamp(0, 1)


def portraits(batch: int, height: int, width: int, device: torch.device) -> Tensor:
    """A head with hair, eyes, nose and mouth on shoulders, in front of something out of focus."""
    side = min(height, width)

    def some(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(batch, device=device)

    size, lean = some(0.14, 0.34), some(-0.25, 0.25)
    x, y = some(0.35, 0.65) * (width / side), some(0.35, 0.5) * (height / side)
    tan = some(0, 1)
    skin = torch.stack([light + (dark - light) * tan for light, dark in zip(*SKIN, strict=True)], 1)
    hair, cloth, lips = torch.rand(batch, 3, device=device) * 0.5, torch.rand(batch, 3, device=device), skin * 0.7
    eye, gap, look = skin * 0.2, some(0.35, 0.45), some(-0.15, 0.15)
    parts = (  # x and y from the head's center, half its size, all relative to the head; power; color
        (0.0, 2.6, 1.9, 1.4, 2.5, cloth),
        (0.0, 1.1, 0.45, 0.6, 4.0, skin * 0.85),
        (0.0, -0.25, 1.0, 1.15, 2.2, hair),
        (0.0, 0.0, 0.78, 1.0, 2.2, skin),
        (-gap + look, -0.12, 0.14, 0.07, 2.0, eye),
        (gap + look, -0.12, 0.14, 0.07, 2.0, eye),
        (-gap + look, -0.3, 0.2, 0.04, 2.0, hair),
        (gap + look, -0.3, 0.2, 0.04, 2.0, hair),
        (look, 0.15, 0.08, 0.2, 2.0, skin * 0.85),
        (look, 0.5, 0.26, 0.07, 2.0, lips),
    )
    rows = [
        (x + size * (dx + lean * dy * -0.3), y + size * dy, size * across, size * down, lean, lean * 0 + power, color)
        for dx, dy, across, down, power, color in parts
    ]
    leaves = Leaves(*(torch.stack([row[i] for row in rows], 1) for i in range(len(rows[0]))))
    behind = clouds(batch, height, width, device)
    soft = functional.avg_pool2d(behind, 9, 1, 4, count_include_pad=False)
    made = pile(soft, leaves, shade=0.5)
    rough = noise(batch, height, width, device, 33) * 0.04 + noise(batch, height, width, device, 5) * 0.06
    return (made + rough).clamp(0, 1)


def pebbles(batch: int, height: int, width: int, device: torch.device) -> Tensor:
    """Very many small things side by side: each pixel belongs to the nearest point of a jittered grid."""
    y, x = places(height, width, device)
    number = rand(batch, 5, 22, device)
    u, v = x * number, y * number
    shaken = rand(batch, 0.2, 0.95, device)
    tone, spread = torch.rand(batch, 3, 1, 1, device=device), rand(batch, 0.15, 0.9, device)
    seed = rand(batch, 0, 1000, device)
    first = torch.full((batch, 1, height, width), 9.0, device=device)
    second, color = first, tone.expand(-1, -1, height, width)
    for row in (-1, 0, 1):
        for column in (-1, 0, 1):
            cell_x, cell_y = u.floor() + column, v.floor() + row
            luck = [_hash(cell_x, cell_y, seed + 17.0 * part) for part in range(4)]
            far = torch.hypot(
                cell_x + HALF + shaken * (luck[0] - HALF) - u, cell_y + HALF + shaken * (luck[1] - HALF) - v
            )
            own = tone + spread * (torch.cat([luck[1], luck[2], luck[3]], 1) - HALF)
            color = torch.where(far < first, own, color)
            second = torch.minimum(second, torch.maximum(far, first))
            first = torch.minimum(first, far)
    seam = ((second - first) * rand(batch, 2, 12, device)).clamp(0, 1)
    is_seamed = (rand(batch, 0, 1, device) < 0.7).float()
    return (color * (1 - is_seamed * (1 - seam)) + 0.03 * noise(batch, height, width, device, 33)).clamp(0, 1)


def _hash(x: Tensor, y: Tensor, seed: Tensor) -> Tensor:
    """A random number, 0 to 1, the same for every pixel of a cell."""
    return (torch.sin(x * 12.9898 + y * 78.233 + seed) * 43758.5453).frac().abs()
