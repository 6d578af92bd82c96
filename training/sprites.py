"""Everything is drawn as sprites: small fields that are positive inside, placed by an affine map and blended.

Shapes and glyphs are signed distances, digits are the strokes of MNIST. B samples, S side of a field, H x W pixels.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from training.language import SHAPES

SHAPE_SIDE = 64
SHAPE_REACH = 1.3
"""The field of a shape of radius 1 reaches from -1.3 to 1.3, so that the shape never touches the border."""

GLYPH_REACH = 0.75
"""A glyph's field is 1.5 em wide; `GLYPH_CLIP` em is the largest distance it stores."""
GLYPH_CLIP = 0.12


TURNS = {"circle": 3.0, "square": 0.2, "triangle": 0.25, "star": 0.6, "cross": 0.25}
TURNS |= {"diamond": 0.15, "heart": 0.3, "ring": 3.0, "rectangle": 0.2, "oval": 0.5}
"""How far, in radians, a shape may be rotated without changing its name."""


@dataclass(frozen=True)
class Pose:
    """Where sprites are, all (B, K): center and half size in pixels, rotation in radians, slant."""

    x: Tensor
    y: Tensor
    half_x: Tensor
    half_y: Tensor
    turn: Tensor
    slant: Tensor | None = None


@dataclass(frozen=True)
class Ink:
    """alpha = (field - edge) * gain + 0.5, clamped to 0..1, and 0 for sprites that are not `shown`. All (B, K)."""

    rgb_BK3: Tensor
    edge: Tensor
    gain: Tensor
    shown: Tensor


def draw(canvas_BCHW: Tensor, fields_BKSS: Tensor, pose: Pose, ink: Ink) -> Tensor:
    """Draws the sprites of each sample over each other. On a GPU the canvas is written in place."""
    theta_BK23 = _theta(pose, *canvas_BCHW.shape[-2:])
    gain_BK = ink.gain * ink.shown
    bias_BK = (0.5 - ink.edge * ink.gain) * ink.shown - 1e3 * (1 - ink.shown)
    if canvas_BCHW.is_cuda:
        from training.drawing_kernels import draw_in_place

        parameters = torch.cat([theta_BK23.flatten(2), gain_BK[..., None], bias_BK[..., None], ink.rgb_BK3], -1)
        return draw_in_place(canvas_BCHW, fields_BKSS, parameters)
    return blend(canvas_BCHW, fields_BKSS, theta_BK23, gain_BK, bias_BK, ink.rgb_BK3)


def blend(
    canvas_BCHW: Tensor, fields_BKSS: Tensor, theta_BK23: Tensor, gain_BK: Tensor, bias_BK: Tensor, rgb_BK3: Tensor
) -> Tensor:
    """The plain-torch twin of the kernel."""
    height, width = canvas_BCHW.shape[-2:]
    gain, bias = (values[:, :, None, None, None] for values in (gain_BK, bias_BK))
    for k in range(fields_BKSS.shape[1]):
        grid = functional.affine_grid(theta_BK23[:, k], [len(canvas_BCHW), 1, height, width], align_corners=False)
        field = functional.grid_sample(fields_BKSS[:, k : k + 1], grid, padding_mode="border", align_corners=False)
        alpha = torch.addcmul(bias[:, k], field, gain[:, k]).clamp_(0, 1)
        color = rgb_BK3[:, k, :, None, None].expand_as(canvas_BCHW)
        canvas_BCHW = torch.lerp(canvas_BCHW, color, alpha.expand_as(canvas_BCHW))
    return canvas_BCHW


def kernel_error(device: torch.device) -> float:
    """The largest difference between the kernel and its twin. More than rounding raises an error."""
    canvas, fields = torch.rand(8, 3, 64, 96, device=device), torch.rand(8, 3, 28, 28, device=device)
    x, y, turn = (torch.rand(8, 3, device=device) * scale for scale in (96, 64, 6))
    pose = Pose(x, y, 5 + x / 3, 5 + y / 3, turn, turn / 9)
    ink = Ink(torch.rand(8, 3, 3, device=device), turn / 6, 1 + turn, torch.ones_like(turn))
    expected = draw(canvas.cpu(), fields.cpu(), *(_to_cpu(part) for part in (pose, ink)))
    error = float((draw(canvas, fields, pose, ink).cpu() - expected).abs().max())
    assert error < 1e-2, f"the drawing kernel is off by {error}"
    return error


def _to_cpu(part: Any) -> Any:
    return replace(part, **{name: value.cpu() for name, value in vars(part).items()})


def _theta(pose: Pose, height: int, width: int) -> Tensor:
    """Maps a pixel's place in the canvas (-1..1) to its place in the field (-1..1)."""
    cos, sin = pose.turn.cos(), pose.turn.sin()
    across_x, across_y = cos, sin
    if pose.slant is not None:
        across_x, across_y = cos - pose.slant * sin, sin + pose.slant * cos
    shift_x, shift_y = width / 2 - pose.x, height / 2 - pose.y
    first = torch.stack([across_x * (width / 2), across_y * (height / 2), across_x * shift_x + across_y * shift_y], -1)
    second = torch.stack([sin * (-width / 2), cos * (height / 2), cos * shift_y - sin * shift_x], -1)
    return torch.stack([first / pose.half_x.unsqueeze(-1), second / pose.half_y.unsqueeze(-1)], 2)


def shape_fields(device: torch.device) -> Tensor:
    """(shapes, S, S): signed distances in units of the radius, positive inside, in the order of SHAPES."""
    ticks = ((torch.arange(SHAPE_SIDE, dtype=torch.float32) + 0.5) / SHAPE_SIDE * 2 - 1) * SHAPE_REACH
    y, x = torch.meshgrid(ticks, ticks, indexing="ij")
    radius = torch.hypot(x, y)
    fields = {
        "circle": 1 - radius,
        "square": -_box(x, y, 0.85, 0.85),
        "triangle": _polygon(x, y, _ring(3, 1.0, 1.0)),
        "star": _polygon(x, y, _ring(5, 1.05, 0.42)),
        "cross": torch.maximum(-_box(x, y, 0.95, 0.3), -_box(x, y, 0.3, 0.95)),
        "diamond": _polygon(x, y, [(0.0, -1.05), (0.75, 0.0), (0.0, 1.05), (-0.75, 0.0)]),
        "heart": _heart(x, y),
        "ring": 0.24 - (radius - 0.76).abs(),
        "rectangle": -_box(x, y, 1.05, 0.58),
        "oval": _oval(x, y, 1.1, 0.6),
    }
    return torch.stack([fields[name] for name in SHAPES]).to(device)


def _box(x: Tensor, y: Tensor, half_x: float, half_y: float) -> Tensor:
    dx, dy = x.abs() - half_x, y.abs() - half_y
    return torch.hypot(dx.clamp(min=0), dy.clamp(min=0)) + torch.maximum(dx, dy).clamp(max=0)


def _ring(points: int, outer: float, inner: float) -> list[tuple[float, float]]:
    """Corners of a star, its first point up; with equal radii a regular polygon."""
    steps = points if outer == inner else 2 * points
    corners = []
    for i in range(steps):
        radius = outer if outer == inner or i % 2 == 0 else inner
        angle = 2 * math.pi * i / steps - math.pi / 2
        corners.append((radius * math.cos(angle), radius * math.sin(angle)))
    return corners


def _polygon(x: Tensor, y: Tensor, corners: list[tuple[float, float]]) -> Tensor:
    """Signed distance to a closed polygon: distance to its nearest edge, sign by the number of crossings."""
    distance = torch.full_like(x, 1e9)
    inside = torch.zeros_like(x, dtype=torch.bool)
    for (ax, ay), (bx, by) in zip(corners, corners[1:] + corners[:1], strict=True):
        ex, ey = bx - ax, by - ay
        along = (((x - ax) * ex + (y - ay) * ey) / (ex * ex + ey * ey)).clamp(0, 1)
        distance = torch.minimum(distance, torch.hypot(x - ax - along * ex, y - ay - along * ey))
        crosses = (ay <= y) != (by <= y)
        inside ^= crosses & (x < ax + (y - ay) / (by - ay if by != ay else 1.0) * ex)
    return torch.where(inside, distance, -distance)


def _heart(x: Tensor, y: Tensor) -> Tensor:
    """The outline of a heart, two circles over a point, as a polygon."""
    corners = []
    for i in range(48):
        t = 2 * math.pi * i / 48
        across = 16 * math.sin(t) ** 3
        up = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        corners.append((across / 16, -(up + 2.5) / 16))
    return _polygon(x, y, corners)


def _oval(x: Tensor, y: Tensor, half_x: float, half_y: float) -> Tensor:
    """First-order distance to an ellipse, exact at the edge, where it matters."""
    level = torch.hypot(x / half_x, y / half_y)
    slope = torch.hypot(x / half_x**2, y / half_y**2) / level.clamp(min=1e-6)
    return (1 - level) / slope.clamp(min=1 / half_x)


@dataclass(frozen=True)
class Bank:
    """Fields to draw from, on one device. Glyphs are A-Z, a-z, 0-9 of every font, with advance widths in em."""

    shapes_NSS: Tensor
    turns_N: Tensor
    digits_NSS: Tensor
    labels_N: Tensor
    glyphs_FGSS: Tensor
    advances_FG: Tensor
    words_N7: Tensor


def make_bank(
    tensors: dict[str, Tensor], device: torch.device, *, num_heldout: int = 2000, heldout: bool = False
) -> Bank:
    """Training never uses the last `num_heldout` digits; `heldout` selects just those."""
    packed = tensors["digits"]
    digits = torch.stack([packed >> 4, packed & 15], -1).flatten(1).unflatten(1, (28, 28)).to(torch.uint8)
    part = slice(len(digits) - num_heldout, None) if heldout else slice(None, len(digits) - num_heldout)
    glyphs = tensors["glyphs"].to(device).float()
    return Bank(
        shapes_NSS=shape_fields(device),
        turns_N=torch.tensor([TURNS[name] for name in SHAPES], device=device),
        digits_NSS=digits[part].to(device),
        labels_N=tensors["labels"][part].long().to(device),
        glyphs_FGSS=((glyphs / 255 - 0.5) * 2 * GLYPH_CLIP).half(),
        advances_FG=tensors["advances"].to(device),
        words_N7=tensors["words"].long().to(device),
    )
