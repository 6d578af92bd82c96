"""Dummy weights: random tensors with the scale of trained ones, generated on the model's device."""

import zlib

import torch

from saccade.layers.formats import RoundingSlot, Slot
from saccade.layers.layer import Layer


def fill_with_noise(model: Layer, *, seed: int = 0) -> None:
    """The values depend only on seed, slot name and device; the shards of all ranks come from the same tensor."""
    for name, slot in model.slots():
        _fill(slot, seed ^ zlib.crc32(name.encode()))


def _fill(slot: Slot, seed: int) -> None:
    generator = torch.Generator(slot.view.device).manual_seed(seed)
    dtype = slot.weight.dtype if isinstance(slot, RoundingSlot) else slot.view.dtype
    whole = torch.empty(slot.shape, device=slot.view.device, dtype=dtype)
    slot.fill(whole.normal_(slot.mean, slot.std, generator=generator))
