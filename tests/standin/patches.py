"""The only change to Saccade in a process that runs on the stand-in: quack and flash-attn-4 are replaced by functions
that are only counted, because they ask the GPU for more than the stand-in knows. They need not be installed."""

import importlib
from typing import Any

import torch
from torch import Tensor

from tests.standin.device import Device


def replace_packages(device: Device) -> None:
    products, adapters = (importlib.import_module(f"saccade.kernels.{name}") for name in ("products", "adapters"))

    def product(*args: Any, **options: Any) -> None:
        device.work("quack product")

    def attention(q: Tensor, *args: Any, **options: Any) -> Tensor:
        device.work("flash-attn-4 attention")
        return torch.empty_like(q)

    tiles = {tile: tile for _, tile in products.EVERY_TILE}
    vars(products)["load_products"] = lambda: products.HopperProducts(product, product, tiles)
    vars(adapters)["load_flash_attention"] = lambda: adapters.FlashAttention(attention)
