"""Images as data URLs."""

import base64
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image


def picture(seed: int = 0, size: tuple[int, int] = (32, 24)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def data_url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes, mime: str = "image/png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data, mime)}}


def asked(*parts: dict[str, Any], text: str = "what is it?") -> list[Any]:
    return [{"role": "user", "content": [{"type": "text", "text": text}, *parts]}]
