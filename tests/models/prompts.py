"""Prompts with media, for Saccade and for transformers."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.models.vlm import Model
from saccade.scheduling.geometries import Grid
from tests.models import tiny
from tests.models.packing import Request, text_positions
from tests.models.steps import vision_step

Part = int | tuple[str, Grid]


@dataclass(frozen=True)
class Prompt:
    """Text, given as a number of tokens, and media in any order. Patches are random unless replaced."""

    ids_T: Tensor
    images: list[Grid]
    videos: list[Grid]
    image_patches: Tensor
    video_patches: Tensor

    @property
    def kinds(self) -> Tensor:
        return (self.ids_T == tiny.IMAGE).int() + 2 * (self.ids_T == tiny.VIDEO).int()


def write(model: Model, parts: list[Part], seed: int = 0) -> Prompt:
    generator = torch.Generator().manual_seed(seed)
    vision = model.spec.vision
    merge = vision.merge if vision else 1
    splits_frames = model.spec.decoder.deepstack_levels > 0
    ids: list[int] = []
    grids: dict[str, list[Grid]] = {"image": [], "video": []}
    for part in parts:
        if isinstance(part, int):
            ids += torch.randint(3, 100, (part,), generator=generator).tolist()
            continue
        kind, (t, h, w) = part
        grids[kind].append((t, h, w))
        token, count = (tiny.IMAGE if kind == "image" else tiny.VIDEO), h * w // merge**2
        # Qwen3-VL writes a timestamp in front of each frame of a video, so its placeholders are not contiguous.
        frames = [[token] * count for _ in range(t)] if splits_frames else [[token] * count * t]
        for frame in frames:
            ids += [5, tiny.START, *frame, tiny.END]
    values = vision.patch_values if vision else 1
    patches = [tiny.pixels(grids[kind], values, seed + i) for i, kind in enumerate(("image", "video"))]
    return Prompt(torch.tensor(ids), grids["image"], grids["video"], *patches)


def encode(model: Model, prompt: Prompt) -> Tensor:
    """Rows of all media, images first, from one packed pass with poisoned padding."""
    assert model.spec.vision is not None
    patches = torch.cat([prompt.image_patches, prompt.video_patches])
    padding = 3 * model.spec.vision.unit
    poison = torch.full((padding, patches.shape[1]), float("nan"))
    rows = model.encode(vision_step(model.spec.vision, prompt.images + prompt.videos, torch.cat([patches, poison])))
    return rows[:, : len(patches) // model.spec.vision.unit]


def request(model: Model, prompt: Prompt, positions_3T: Tensor) -> Request:
    rows_LUD = encode(model, prompt) if prompt.images or prompt.videos else None
    sources_T = torch.full_like(prompt.ids_T, -1)
    is_image, is_video = prompt.ids_T == tiny.IMAGE, prompt.ids_T == tiny.VIDEO
    num_images = int(is_image.sum())
    sources_T[is_image] = torch.arange(num_images)
    sources_T[is_video] = torch.arange(int(is_video.sum())) + num_images
    embeds_TD, deepstack_LTD = model.embed(prompt.ids_T, rows_LUD, sources_T)
    limits_T = image_limits(is_image) if model.spec.sees_whole_image else None
    return Request(embeds_TD, positions_3T, deepstack_LTD, limits_T)


def image_limits(is_image_T: Tensor) -> Tensor:
    """For each image row the position after the image's last row; 0 for text."""
    limits = torch.zeros(len(is_image_T), dtype=torch.int32)
    end = 0
    for i in range(len(is_image_T) - 1, -1, -1):
        if is_image_T[i]:
            end = end or i + 1
            limits[i] = end
        else:
            end = 0
    return limits


def oracle_inputs(oracle: Any, prompt: Prompt) -> dict[str, Any]:
    """Keyword arguments of the transformers model, positions included where it has M-RoPE."""
    inputs: dict[str, Any] = {"input_ids": prompt.ids_T[None]}
    if hasattr(oracle, "model") and hasattr(oracle.model, "get_rope_index"):
        grids: dict[str, Any] = {"image_grid_thw": None, "video_grid_thw": None}
        if prompt.images:
            grids["image_grid_thw"] = torch.tensor(prompt.images)
            inputs["pixel_values"] = prompt.image_patches
        if prompt.videos:
            grids["video_grid_thw"] = torch.tensor(prompt.videos)
            inputs["pixel_values_videos"] = prompt.video_patches
        kinds = prompt.kinds[None]
        positions, _ = oracle.model.get_rope_index(prompt.ids_T[None], mm_token_type_ids=kinds, **grids)
        return inputs | grids | {"position_ids": positions, "mm_token_type_ids": kinds}
    if prompt.images:
        inputs["pixel_values"] = _whole_images(oracle, prompt)
        inputs["token_type_ids"] = prompt.kinds[None]
    return inputs


def positions(inputs: dict[str, Any]) -> Tensor:
    if "position_ids" in inputs:
        return inputs["position_ids"][:, 0].int()  # type: ignore[no-any-return]
    return text_positions(inputs["input_ids"].shape[1])


def _whole_images(oracle: Any, prompt: Prompt) -> Tensor:
    """(images, channels, height, width) from patches in merge-block order."""
    config = oracle.config
    patch, side = config.vision_config.patch_size, config.vision_config.image_size // config.vision_config.patch_size
    merge = side // int(config.mm_tokens_per_image**0.5)
    units = side // merge
    blocks = prompt.image_patches.view(-1, units, units, merge, merge, 3, patch, patch)
    return blocks.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(-1, 3, side * patch, side * patch)
