"""Pages, screens, plots, doodles, cloths, tangles and empty pictures, drawn in batches. The model can name nothing in
them. B pictures, H x W pixels, 0..1."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from training.photos import HALF, noise, places, rand

TILE = (16, 10)
ROWS, COLUMNS = 16, 36
"""The letters of a page, and the pixels of the tile of each."""


def empty(batch: int, height: int, width: int, device: torch.device) -> Tensor:
    """Pictures of one color, half of them white, black or gray; some have a linear or radial gradient."""
    y, x = places(height, width, device)
    chance = rand(batch, 0, 1, device)
    base = torch.where(chance < 0.4, rand(batch, 0, 1, device), torch.rand(batch, 3, 1, 1, device=device))
    base = torch.where(chance < 0.3, (chance > 0.12).float(), base)
    angle = rand(batch, 0, 2 * math.pi, device)
    straight = angle.cos() * x + angle.sin() * y
    around = torch.hypot(x - rand(batch, 0, 1, device), y - rand(batch, 0, 1, device))
    way = torch.where(rand(batch, 0, 1, device) < HALF, straight, around)
    strength = torch.randn(batch, 3, 1, 1, device=device) * 0.7 * (rand(batch, 0, 1, device) < HALF)
    return (base + strength * way).clamp(0, 1)


def letters(batch: int, height: int, width: int, device: torch.device, glyphs_FGSS: Tensor) -> Tensor:
    """The ink (B, 1, H, W) of many lines of words in one font, at some size and slightly turned."""
    shape = (batch, ROWS, COLUMNS)
    font = torch.randint(0, len(glyphs_FGSS), (batch, 1, 1), device=device)
    glyph = torch.randint(26, glyphs_FGSS.shape[1], shape, device=device)  # small letters and digits
    fields = glyphs_FGSS[font, glyph][..., 8:56, 17:47].float().flatten(0, 2)
    tiles = functional.interpolate((HALF + fields * 12).clamp(0, 1)[:, None], size=TILE, mode="area")
    is_ink = torch.rand(shape, device=device) < 0.83
    ends = COLUMNS * (1 - 0.6 * torch.rand(batch, ROWS, 1, device=device).pow(3))
    is_ink &= torch.arange(COLUMNS, device=device) < ends
    is_ink &= torch.rand(batch, ROWS, 1, device=device) < 0.9
    page = tiles[:, 0].unflatten(0, shape) * is_ink[..., None, None]
    page = page.permute(0, 1, 3, 2, 4).reshape(batch, 1, ROWS * TILE[0], COLUMNS * TILE[1])
    return _view(page, height, width)


def _view(page: Tensor, height: int, width: int) -> Tensor:
    """Shows part of a page, or all of it with a margin, slightly turned."""
    batch, device = len(page), page.device
    tall, wide = page.shape[-2:]
    zoom, turn = (rand(batch, low, high, device).flatten() for low, high in ((0.45, 1.15), (-0.06, 0.06)))
    aspect = (height / width) * (wide / tall)
    across = torch.stack([zoom, -turn * zoom, rand(batch, -0.1, 0.1, device).flatten()], -1)
    down = torch.stack([turn * zoom, zoom * aspect, rand(batch, -0.1, 0.1, device).flatten()], -1)
    grid = functional.affine_grid(torch.stack([across, down], 1), [batch, 1, height, width], align_corners=False)
    return functional.grid_sample(page, grid, align_corners=False)


def pages(batch: int, height: int, width: int, device: torch.device, glyphs_FGSS: Tensor) -> Tensor:
    """Text, dark on light or light on dark."""
    ink = letters(batch, height, width, device, glyphs_FGSS)
    paper = 1 - 0.2 * torch.rand(batch, 3, 1, 1, device=device) * rand(batch, 0, 1, device)
    color = 0.4 * torch.rand(batch, 3, 1, 1, device=device)
    made = torch.lerp(paper, color, ink)
    return torch.where(rand(batch, 0, 1, device) < 0.25, 1 - made, made)


def screens(batch: int, height: int, width: int, device: torch.device, glyphs_FGSS: Tensor) -> Tensor:
    """Panels and bars with vertical and horizontal edges, most of them gray, some with text."""
    y, x = places(height, width, device)
    side = min(height, width)
    ink = letters(batch, height, width, device, glyphs_FGSS)
    canvas = torch.rand(batch, 3, 1, 1, device=device).expand(-1, -1, height, width)
    for part in range(9):
        left, top = rand(batch, -0.1, 0.85 * width / side, device), rand(batch, -0.1, 0.85 * height / side, device)
        least, most = max(0.06, 0.6 - 0.2 * part), 1.2 - 0.11 * part
        right, bottom = left + rand(batch, least, most, device), top + rand(batch, least / 2, most, device)
        inside = (x > left) & (x < right) & (y > top) & (y < bottom)
        edge = inside & ~((x > left + 0.01) & (x < right - 0.01) & (y > top + 0.01) & (y < bottom - 0.01))
        grey = rand(batch, 0, 1, device).pow(0.4)
        color = torch.where(rand(batch, 0, 1, device) < 0.65, grey, torch.rand(batch, 3, 1, 1, device=device))
        written = torch.lerp(
            color, (color.mean(1, keepdim=True) < HALF).float(), ink * (rand(batch, 0, 1, device) < 0.6)
        )
        canvas = torch.where(edge, color * 0.6, torch.where(inside, written, canvas))
    return canvas.clamp(0, 1)


def plots(batch: int, height: int, width: int, device: torch.device) -> Tensor:
    """Curves, bars or points between two axes, with a grid or without."""
    y, x = places(height, width, device)
    y, x = y * (min(height, width) / height), x * (min(height, width) / width)
    thick = rand(batch, 0.008, 0.02, device)
    paper = 1 - 0.15 * rand(batch, 0, 1, device).expand(-1, 3, height, width)
    often = rand(batch, 3, 9, device)
    lines = ((x * often).frac() < thick * often / 2) | ((y * often).frac() < thick * often / 2)
    canvas = torch.where(lines & (rand(batch, 0, 1, device) < HALF), paper * 0.8, paper)
    kind = rand(batch, 0, 1, device)
    for _ in range(3):
        color = torch.rand(batch, 3, 1, 1, device=device) * 0.85
        curve, slope = _curve(batch, x, device)
        bars = rand(batch, 5, 16, device)
        step, _ = _curve(batch, ((x * bars).floor() + HALF) / bars, device)
        is_bar = (y > step) & ((x * bars).frac() < 0.7)
        is_line = (y - curve).abs() < thick * torch.sqrt(1 + slope * slope)
        dot = torch.hypot((x * bars).frac() - HALF, (y - step) * bars) < 0.25
        drawn = torch.where(kind < 0.45, is_line, torch.where(kind < 0.75, is_bar, dot))
        canvas = torch.where(drawn, color, canvas)
    is_axis = ((x - 0.08).abs() < thick / 2) | ((y - 0.92).abs() < thick / 2)
    margin = (x < 0.08) | (y > 0.92)
    return torch.where(is_axis, 0.1, torch.where(margin, paper, canvas))


def _curve(batch: int, x: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """A wavy function of x and its slope."""
    total, slope = rand(batch, 0.25, 0.75, device) + 0 * x, 0 * x
    for often in (2.0, 5.0, 12.0):
        wave, shift = often * rand(batch, 0.5, 1.5, device), rand(batch, 0, 2 * math.pi, device)
        tall = rand(batch, 0.1, 0.5, device) / often
        total, slope = total + tall * torch.sin(wave * x + shift), slope + tall * wave * torch.cos(wave * x + shift)
    return total, slope


def doodles(batch: int, height: int, width: int, device: torch.device) -> Tensor:
    """Winding lines, or irregular blobs, on a plain background."""
    ground, color = (torch.rand(batch, 3, 1, 1, device=device) for _ in range(2))
    ground = torch.where(rand(batch, 0, 1, device) < HALF, 1.0, ground)
    color = torch.where((ground - color).abs().mean(1, keepdim=True) < 0.25, 1 - ground.round(), color)
    hills = noise(batch, height, width, device, 4) + 0.6 * noise(batch, height, width, device, 8)
    line = hills.abs() < rand(batch, 0.05, 0.2, device)
    drawn = torch.where(rand(batch, 0, 1, device) < HALF, line, _spot(batch, height, width, device))
    return torch.where(drawn, color, ground.expand(-1, -1, height, width))


def cloths(batch: int, height: int, width: int, device: torch.device) -> Tensor:
    """Stripes, checks and plaids: colored bands in two directions, turned by any angle."""
    y, x = places(height, width, device)
    angle = rand(batch, 0, math.pi, device)
    along, across = angle.cos() * x + angle.sin() * y, angle.cos() * y - angle.sin() * x
    canvas = torch.rand(batch, 3, 1, 1, device=device).expand(-1, -1, height, width)
    thick = rand(batch, 0, 1, device)
    for way, often in ((along, 20.0), (across, 20.0), (along, 60.0), (across, 60.0)):
        wave = torch.sin(way * (often * rand(batch, 0.6, 2.0, device)) + rand(batch, 0, 2 * math.pi, device))
        color, strength = torch.rand(batch, 3, 1, 1, device=device), rand(batch, -0.4, 1.4, device).clamp(0, 1)
        canvas = torch.lerp(canvas, color.expand_as(canvas), (wave > thick).float() * strength)
    return canvas


def tangles(batch: int, height: int, width: int, device: torch.device) -> Tensor:
    """Many straight lines on a plain background; most start where another ends."""
    y, x = places(height, width, device)
    side = min(height, width)
    ground, color = (torch.rand(batch, 3, 1, 1, device=device) for _ in range(2))
    color = torch.where((ground - color).abs().mean(1, keepdim=True) < 0.25, 1 - ground.round(), color)
    drawn = torch.zeros(batch, 1, height, width, dtype=torch.bool, device=device)
    thick, reach = rand(batch, 0.004, 0.025, device), rand(batch, 0.1, 0.5, device)
    from_x, from_y = (rand(batch, 0, size / side, device) for size in (width, height))
    for _ in range(18):
        is_new = rand(batch, 0, 1, device) < 0.3
        from_x = torch.where(is_new, rand(batch, 0, width / side, device), from_x)
        from_y = torch.where(is_new, rand(batch, 0, height / side, device), from_y)
        angle = rand(batch, 0, 2 * math.pi, device)
        length = reach * rand(batch, 0.4, 1.2, device)
        dx, dy = x - from_x, y - from_y
        along = (dx * angle.cos() + dy * angle.sin()).clamp(min=0).minimum(length)
        drawn |= torch.hypot(dx - along * angle.cos(), dy - along * angle.sin()) < thick * rand(batch, 0.6, 1.6, device)
        from_x = (from_x + length * angle.cos()).clamp(0, width / side)
        from_y = (from_y + length * angle.sin()).clamp(0, height / side)
    return torch.where(drawn, color, ground.expand(-1, -1, height, width))


def _spot(batch: int, height: int, width: int, device: torch.device) -> Tensor:
    """A closed outline whose distance from its center varies strongly."""
    y, x = places(height, width, device)
    side = min(height, width)
    dx, dy = x - width / side * rand(batch, 0.4, 0.6, device), y - height / side * rand(batch, 0.4, 0.6, device)
    angle, reach = torch.atan2(dy, dx), torch.ones(batch, 1, 1, 1, device=device)
    for wave in (2, 3, 5, 7):
        reach = reach + rand(batch, 0.15, 0.4, device) * torch.cos(wave * angle + rand(batch, 0, 2 * math.pi, device))
    return torch.hypot(dx, dy) < reach * rand(batch, 0.15, 0.3, device)
