"""Resizes and normalises decoded pixels and cuts them into the patch rows of a vision tower: the CPU path and oracle.

F frames, H x W pixels, P patches, C columns of a patch row.

The resize is torch's for bytes, which torchvision, and so the fast processors of transformers, use on the CPU: an
antialiased filter along rows, then along columns, rounded to bytes after each. Next to saturated edges, order and
rounding change the result by many levels (Pillow 13 may filter columns first).
"""

import torch
from torch import Tensor
from torch.nn import functional

from saccade.errors import ConfigError
from saccade.kernels.image_jobs import RESAMPLING, PatchSettings


def resize_patchify(
    pixels_FHWC: Tensor, size_hw: tuple[int, int], settings: PatchSettings, out: Tensor | None = None
) -> Tensor:
    """Patch rows of one image (H, W, 3) or one video (F, H, W, 3) of bytes, resized to `size_hw`.

    Rows are ordered by time, then by merge x merge group, then within the group. Columns are ordered by channel, frame
    within the temporal patch, y, x. The last frame is repeated to fill the last temporal patch; so is the only frame of
    an image. With merge = temporal_patch = 1 the rows are in raster order, as a convolution would visit them.
    """
    frames_FHWC = pixels_FHWC.unsqueeze(0) if pixels_FHWC.dim() == 3 else pixels_FHWC
    patch, temporal_patch, merge = settings.patch, settings.temporal_patch, settings.merge
    _check_request(frames_FHWC, size_hw, patch * merge, settings.resample)
    height, width = size_hw
    resized_F3HW = functional.interpolate(
        frames_FHWC.permute(0, 3, 1, 2), size=size_hw, mode=settings.resample, antialias=True, align_corners=False
    )
    shift, scale = (torch.tensor(x, dtype=torch.float32)[:, None, None] for x in (settings.mean, settings.std))
    values_F3HW = (resized_F3HW.float() / 255 - shift) / scale
    num_steps = -(-values_F3HW.shape[0] // temporal_patch)
    missing = num_steps * temporal_patch - values_F3HW.shape[0]
    values_F3HW = torch.cat([values_F3HW, values_F3HW[-1:].expand(missing, -1, -1, -1)])
    cells = values_F3HW.reshape(
        num_steps, temporal_patch, 3, height // patch // merge, merge, patch, width // patch // merge, merge, patch
    )
    patches_PC = cells.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(
        num_steps * (height // patch) * (width // patch), 3 * temporal_patch * patch * patch
    )
    return patches_PC if out is None else out.copy_(patches_PC)


def _check_request(frames_FHWC: Tensor, size_hw: tuple[int, int], multiple: int, resample: str) -> None:
    if resample not in RESAMPLING:
        raise ConfigError(f"unknown resampling {resample!r}; allowed: {', '.join(RESAMPLING)}")
    if frames_FHWC.dtype != torch.uint8 or frames_FHWC.dim() != 4 or frames_FHWC.shape[-1] != 3:
        raise ConfigError(
            f"pixels are {frames_FHWC.dtype} of shape {tuple(frames_FHWC.shape)}; expected RGB bytes, (F, H, W, 3)"
        )
    if min(frames_FHWC.shape) == 0 or min(size_hw) < multiple or size_hw[0] % multiple or size_hw[1] % multiple:
        raise ConfigError(
            f"cannot resize {tuple(frames_FHWC.shape)} to {size_hw}; sides must be positive multiples of {multiple}"
        )
