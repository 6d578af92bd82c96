# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Device code of the drawing: all sprites of a picture in one pass, and a finished picture to patches in one pass.

Both have their plain-torch twin in sprites.py and backdrops.py, which a CPU uses and tests compare with.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PARAMETERS = 11
_BLOCK = 1024


@triton.jit(do_not_specialize=("height", "width"))
def _draw_kernel(
    canvas_ptr, fields_ptr, parameters_ptr, height, width, K: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr
):
    sample = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < height * width
    x = (2.0 * (place % width).to(tl.float32) + 1.0) / width - 1.0
    y = (2.0 * (place // width).to(tl.float32) + 1.0) / height - 1.0
    red_ptr = canvas_ptr + sample * 3 * height * width + place
    red = tl.load(red_ptr, mask=inside, other=0.0)
    green = tl.load(red_ptr + height * width, mask=inside, other=0.0)
    blue = tl.load(red_ptr + 2 * height * width, mask=inside, other=0.0)
    for k in range(K):
        p = parameters_ptr + (sample * K + k) * 11
        u = tl.load(p) * x + tl.load(p + 1) * y + tl.load(p + 2)
        v = tl.load(p + 3) * x + tl.load(p + 4) * y + tl.load(p + 5)
        column = tl.minimum(tl.maximum(((u + 1.0) * S - 1.0) * 0.5, 0.0), S - 1.0)
        row = tl.minimum(tl.maximum(((v + 1.0) * S - 1.0) * 0.5, 0.0), S - 1.0)
        left, top = tl.floor(column), tl.floor(row)
        dx, dy = column - left, row - top
        left, top = left.to(tl.int32), top.to(tl.int32)
        right, bottom = tl.minimum(left + 1, S - 1), tl.minimum(top + 1, S - 1)
        f = fields_ptr + (sample * K + k) * S * S
        above = tl.load(f + top * S + left) * (1.0 - dx) + tl.load(f + top * S + right) * dx
        below = tl.load(f + bottom * S + left) * (1.0 - dx) + tl.load(f + bottom * S + right) * dx
        field = above * (1.0 - dy) + below * dy
        alpha = tl.minimum(tl.maximum(tl.load(p + 7) + field * tl.load(p + 6), 0.0), 1.0)
        red += alpha * (tl.load(p + 8) - red)
        green += alpha * (tl.load(p + 9) - green)
        blue += alpha * (tl.load(p + 10) - blue)
    tl.store(red_ptr, red, mask=inside)
    tl.store(red_ptr + height * width, green, mask=inside)
    tl.store(red_ptr + 2 * height * width, blue, mask=inside)


@triton.jit(do_not_specialize=("height", "width"))
def _develop_kernel(canvas_ptr, scale_ptr, shift_ptr, patches_ptr, height, width, BLOCK: tl.constexpr):
    """Patches of 16 x 16 in 2 x 2 groups; the columns of a patch are channel, y, x."""
    sample = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < height * width
    row, column = place // width, place % width
    group = (row // 32) * (width // 32) + column // 32
    patch = group * 4 + (row // 16 % 2) * 2 + column // 16 % 2
    target = patches_ptr + sample * 3 * height * width + patch * 768 + (row % 16) * 16 + column % 16
    scale, shift = tl.load(scale_ptr + sample), tl.load(shift_ptr + sample)
    for channel in range(3):
        value = tl.load(canvas_ptr + (sample * 3 + channel) * height * width + place, mask=inside, other=0.0)
        level = tl.floor((value * scale + shift) * 255.0 + 0.5)
        level = tl.minimum(tl.maximum(level, 0.0), 255.0)
        tl.store(target + channel * 256, (level / 127.5 - 1.0).to(patches_ptr.dtype.element_ty), mask=inside)


def draw_in_place(canvas_BCHW: Tensor, fields_BKSS: Tensor, parameters_BKP: Tensor) -> Tensor:
    """Draws all sprites onto the canvas. `parameters` has six numbers of the map, then gain, bias, red, green, blue."""
    batch, _, height, width = canvas_BCHW.shape
    num, side = fields_BKSS.shape[1:3]
    assert canvas_BCHW.is_contiguous() and parameters_BKP.shape == (batch, num, PARAMETERS)
    grid = (triton.cdiv(height * width, _BLOCK), batch)
    _draw_kernel[grid](
        canvas_BCHW, fields_BKSS.contiguous(), parameters_BKP.contiguous(), height, width, K=num, S=side, BLOCK=_BLOCK
    )
    return canvas_BCHW


def develop(canvas_BCHW: Tensor, scale_B: Tensor, shift_B: Tensor, dtype: torch.dtype) -> Tensor:
    """Cuts pictures into (B, P, 768) patches, rounded to bytes and scaled to -1..1."""
    batch, channels, height, width = canvas_BCHW.shape
    canvas = canvas_BCHW.contiguous()
    patches = torch.empty(batch, height * width // 256, channels * 256, dtype=dtype, device=canvas.device)
    grid = (triton.cdiv(height * width, _BLOCK), batch)
    _develop_kernel[grid](canvas, scale_B.contiguous(), shift_B.contiguous(), patches, height, width, BLOCK=_BLOCK)
    return patches
