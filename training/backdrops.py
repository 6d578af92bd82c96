"""Colors, backgrounds, and what cameras and files do to a picture. B samples, N colors, H x W pixels; values 0..1."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from training.language import COLORS
from training.model import patchify

ANCHORS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "red": ((255, 0, 0), (220, 20, 60), (200, 15, 15), (230, 50, 40)),
    "green": ((0, 128, 0), (0, 255, 0), (34, 139, 34), (60, 180, 75)),
    "blue": ((0, 0, 255), (30, 80, 220), (0, 0, 180), (65, 105, 225)),
    "yellow": ((255, 255, 0), (255, 215, 0), (240, 230, 40), (255, 235, 60)),
    "orange": ((255, 165, 0), (255, 140, 0), (245, 130, 32), (255, 127, 0)),
    "purple": ((128, 0, 128), (140, 40, 190), (110, 20, 160), (148, 0, 211)),
    "pink": ((255, 192, 203), (255, 105, 180), (250, 150, 200), (255, 130, 170)),
    "brown": ((139, 69, 19), (165, 42, 42), (120, 70, 30), (101, 55, 20)),
    "black": ((0, 0, 0), (25, 25, 25), (10, 10, 15), (20, 20, 20)),
    "white": ((255, 255, 255), (245, 245, 245), (255, 250, 245), (240, 245, 250)),
    "gray": ((128, 128, 128), (150, 150, 150), (110, 110, 115), (160, 160, 160)),
    "cyan": ((0, 255, 255), (0, 220, 235), (40, 230, 240), (60, 210, 225)),
}
CONTRAST = 0.42
NODES = 5


@dataclass(frozen=True)
class Palette:
    """The named colors as ranges between anchors."""

    anchors_NA3: Tensor

    @classmethod
    def on(cls, device: torch.device) -> "Palette":
        rows = torch.tensor([ANCHORS[name] for name in COLORS], dtype=torch.float32, device=device)
        return cls(rows / 255)

    def mix(self, color: Tensor) -> Tensor:
        """Draws a shade of each named color: between two of its anchors, with a little noise."""
        shape = color.shape
        flat = color.flatten()
        near, far = (self.anchors_NA3[flat, torch.randint(0, 4, flat.shape, device=flat.device)] for _ in range(2))
        shade = torch.lerp(near, far, torch.rand(len(flat), 1, device=flat.device))
        shade = shade + 0.02 * torch.randn_like(shade)
        out: Tensor = shade.clamp(0, 1).unflatten(0, shape)
        return out

    def pick(self, behind_B3: Tensor, num: int) -> tuple[Tensor, Tensor]:
        """Draws (B, num) named colors that stand out from the color behind them, and their shades."""
        batch, device = behind_B3.shape[0], behind_B3.device
        names = torch.randint(0, len(COLORS), (batch, num, 6), device=device)
        shades = self.mix(names)
        apart = (shades - behind_B3[:, None, None]).norm(dim=-1)
        score = apart.clamp(max=CONTRAST) + torch.rand(apart.shape, device=device) * 1e-3
        best = score.argmax(-1, keepdim=True)
        chosen = names.gather(-1, best).squeeze(-1)
        return chosen, shades.gather(2, best.unsqueeze(-1).expand(-1, -1, -1, 3)).squeeze(2)


def backdrop(batch: int, height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Draws (B, 3, H, W) backgrounds, and returns the main color of each.

    They are plain, have a gradient, or look rough. All are interpolated between a few nodes.
    """
    base_B3 = _base(batch, device)
    kind = torch.rand(batch, 1, 1, 1, device=device)
    nodes = base_B3[:, :, None, None] + (kind < 0.15) * _gradient(batch, NODES, NODES, device)
    nodes = nodes + ((kind > 0.15) & (kind < 0.28)) * torch.randn(batch, 3, NODES, NODES, device=device) * 0.05
    canvas = functional.interpolate(nodes.clamp(0, 1), size=(height, width), mode="bilinear", align_corners=True)
    tenth = batch // 10
    if tenth:
        canvas[-tenth:] = _frame(canvas[-tenth:])
    return canvas, base_B3


def _base(batch: int, device: torch.device) -> Tensor:
    """Draws white, black, gray, light or arbitrary colors."""
    chance = torch.rand(batch, 1, device=device)
    grey = torch.rand(batch, 1, device=device).expand(-1, 3)
    light = 1 - 0.25 * torch.rand(batch, 3, device=device)
    base = torch.rand(batch, 3, device=device)
    base = torch.where(chance < 0.80, light, base)
    base = torch.where(chance < 0.66, grey, base)
    base = torch.where(chance < 0.56, 0.06 * grey, base)
    return torch.where(chance < 0.42, 1 - 0.05 * grey * (chance > 0.3), base)


def _gradient(batch: int, height: int, width: int, device: torch.device) -> Tensor:
    angle = torch.rand(batch, 1, 1, 1, device=device) * 2 * math.pi
    y = torch.linspace(-0.5, 0.5, height, device=device)[None, None, :, None]
    x = torch.linspace(-0.5, 0.5, width, device=device)[None, None, None, :]
    strength = 0.3 * torch.rand(batch, 3, 1, 1, device=device)
    return (angle.cos() * x + angle.sin() * y) * strength


def _frame(canvas: Tensor) -> Tensor:
    """Adds a plain border, as around a scanned or letterboxed photo."""
    batch, _, height, width = canvas.shape
    device = canvas.device
    edge = torch.rand(batch, 1, 1, 1, device=device) * 0.06
    y = (torch.arange(height, device=device) + 0.5)[None, None, :, None] / height
    x = (torch.arange(width, device=device) + 0.5)[None, None, None, :] / width
    outside = (torch.minimum(x, 1 - x) < edge) | (torch.minimum(y, 1 - y) < edge)
    color = torch.rand(batch, 1, 1, 1, device=device).round().expand(-1, 3, -1, -1)
    return torch.where(outside, color, canvas)


def photograph(canvas: Tensor, factor: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Turns pictures into (B, P, 768) patches with values -1..1, as if they came from image files.

    Parts of the batch are blurred, get noise or JPEG artifacts, or are enlarged from `factor` (below 1) of their size.
    All get a new exposure and are rounded to bytes. The canvas is overwritten.
    """
    batch, device = canvas.shape[0], canvas.device
    eighth = batch // 8
    if eighth:
        canvas[:eighth] = _shrink(canvas[:eighth], factor)
        canvas[5 * eighth : 6 * eighth] = _shrink(canvas[5 * eighth : 6 * eighth], 1.1 - factor)
        canvas[eighth : 2 * eighth] = _blur(canvas[eighth : 2 * eighth])
        canvas[2 * eighth : 5 * eighth] = _noise(canvas[2 * eighth : 5 * eighth])
        canvas[4 * eighth : 5 * eighth] = _jpeg(canvas[4 * eighth : 5 * eighth])
    darker = torch.rand(batch, device=device)
    scale, shift = 1 - 0.12 * darker, 0.06 * darker * torch.rand(batch, device=device)
    if canvas.is_cuda:
        from training.drawing_kernels import develop

        return develop(canvas, scale, shift, dtype)
    return quantise(canvas, scale, shift).to(dtype)


def quantise(canvas: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """The plain-torch twin of the kernel."""
    exposed = canvas * scale[:, None, None, None] + shift[:, None, None, None]
    return patchify(((exposed * 255 + 0.5).floor().clamp(0, 255) / 127.5 - 1)[:, None])


def _shrink(canvas: Tensor, factor: float) -> Tensor:
    height, width = canvas.shape[-2:]
    size = (max(8, int(height * factor)), max(8, int(width * factor)))
    small = functional.interpolate(canvas, size=size, mode="bilinear", antialias=True, align_corners=False)
    back = functional.interpolate(small, size=(height, width), mode="bicubic", align_corners=False)
    return back.clamp(0, 1)


def _blur(canvas: Tensor) -> Tensor:
    side = torch.rand(canvas.shape[0], 1, 1, 1, device=canvas.device)
    soft = functional.avg_pool2d(functional.pad(canvas, (1, 1, 1, 1), mode="replicate"), 3, 1)
    return torch.lerp(canvas, soft, side)


def _noise(canvas: Tensor) -> Tensor:
    strength = 0.06 * torch.rand(canvas.shape[0], 1, 1, 1, device=canvas.device)
    return (canvas + torch.randn_like(canvas) * strength).clamp(0, 1)


def _jpeg(canvas: Tensor) -> Tensor:
    """Quantizes the cosine transform of each 8 x 8 block, higher frequencies more coarsely."""
    batch, channels, height, width = canvas.shape
    k = torch.arange(8, device=canvas.device, dtype=torch.float32)
    waves = torch.cos((2 * k[None] + 1) * k[:, None] * math.pi / 16) * 0.5
    waves = waves * (1 - (1 - math.sqrt(0.5)) * (k[:, None] == 0))
    both_64_64 = torch.kron(waves, waves)  # one large product instead of many of 8 x 8
    blocks = canvas.unflatten(2, (-1, 8)).unflatten(4, (-1, 8)).transpose(3, 4).flatten(-2)
    steps = ((1 + k[:, None] + k[None]) * 0.02).flatten() * torch.rand(batch, 1, 1, 1, 1, device=canvas.device) + 1e-3
    coded = ((blocks @ both_64_64.T) / steps).round() * steps
    back: Tensor = (coded @ both_64_64).unflatten(-1, (8, 8)).transpose(3, 4).reshape(batch, channels, height, width)
    return back.clamp(0, 1)
