"""Decodes the images of a request into RGB pixels: uint8 numpy arrays of shape (height, width, 3).

The model sees what a person sees: EXIF orientation is applied, transparency (alpha channels, palette and colour-key
transparency) is flattened on white, greyscale, CMYK and 16-bit images become 8-bit RGB, and an animation gives its
first frame. Before a decoder runs, limits are checked on the file's header and on the cost of a JPEG's scans. Error
texts are fixed: they never contain a decoder's message, a path or part of the data.

Pillow is the reference. simplejpeg decodes grey and three-channel JPEGs. Both use libjpeg-turbo, and with the accurate
DCT and "fancy" chroma upsampling (fastdct=False, fastupsample=False) their pixels are bit-identical.
"""

import binascii
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import pybase64
import simplejpeg
from PIL import BmpImagePlugin, GifImagePlugin, Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from saccade.errors import RequestError
from saccade.inputs.media.headers import Format, Header, read_header
from saccade.inputs.media.jpeg import count_visits, is_plain
from saccade.inputs.text.chat_messages import MediaRef

Pixels = npt.NDArray[np.uint8]
NewPixels = Callable[[tuple[int, ...]], Pixels]
ImageSource = bytes | bytearray | memoryview | str | os.PathLike[str] | npt.NDArray[Any] | Image.Image

BAND_PIXELS = 2 * 2**20
PIXEL_BYTES = 3
SCRATCH_BYTES = 8  # per pixel while decoding, besides the result: a decoder's buffer and a rotated copy
_ORIENTATION = 0x0112
_ALPHA_MODES = frozenset({"RGBA", "LA", "PA", "RGBa", "La"})
_PLAIN_MODES = frozenset({"1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """The largest image or video that is decoded, and how many of each a prompt may have. The aspect limit is that of
    Qwen's processors. Frame limits apply to a video as sent, `max_video_bytes` to a video file, `max_request_pixels` to
    all images together."""

    max_bytes: int = 32 * 2**20
    max_pixels: int = 64 * 2**20
    max_aspect: float = 200.0
    max_frames: int = 768
    max_video_bytes: int = 2**30
    max_video_pixels: int = 256 * 2**20
    max_images: int = 128
    max_videos: int = 16
    max_request_pixels: int | None = None


@dataclass(frozen=True, slots=True)
class MeasuredImage:
    """An image that is not decoded yet, with a size within the limits. It is the size before EXIF rotation, which
    changes neither the area nor the number of tokens."""

    source: bytes | npt.NDArray[Any] | Image.Image
    height: int
    width: int
    header: Header | None = None

    @property
    def num_pixels(self) -> int:
        return self.height * self.width


def new_pixels(shape: tuple[int, ...]) -> Pixels:
    return np.empty(shape, dtype=np.uint8)


def load_image(source: ImageSource | object, limits: ImageLimits) -> Pixels:
    return decode_image(measure_image(source, limits))


def measure_image(source: ImageSource | object, limits: ImageLimits) -> MeasuredImage:
    """Measures an image in any accepted form without a decoder. A string can only be a data URL, so that request text
    never opens a file: files are given as `pathlib.Path`."""
    if isinstance(source, str):
        return _measure_encoded(read_data_url(source, limits), limits)
    if isinstance(source, bytes | bytearray | memoryview):
        return _measure_encoded(bytes(source), limits)
    if isinstance(source, Image.Image):
        check_size(source.height, source.width, limits)
        return MeasuredImage(source, source.height, source.width)
    if isinstance(source, np.ndarray):
        return _measure_array(source, limits)
    if isinstance(source, os.PathLike):
        return _measure_encoded(_read_file(Path(source), limits), limits)
    raise _invalid("an image must be a data URL, bytes, a file, a Pillow image or an array")


def decode_image(measured: MeasuredImage, new: NewPixels = new_pixels) -> Pixels:
    """The result is the array that the last call of `new` returned."""
    source, header = measured.source, measured.header
    if isinstance(source, np.ndarray):
        return _finish(_from_array(source), new)
    if isinstance(source, Image.Image):
        with _PILLOW_OBJECTS:
            return _finish(source, new)
    assert header is not None, "encoded images are measured by their headers"
    if header.format == "JPEG" and not is_plain(source):
        count_visits(source)
    try:
        image = _OPEN[header.format](BytesIO(source))
    except MemoryError:  # says nothing about the file
        raise
    except Exception:  # decoders raise many types; their messages must not reach a client
        raise _invalid(_BROKEN) from None
    if image.height * image.width > measured.num_pixels:  # the file has two headers; limits were checked on the other
        raise _invalid(_BROKEN)
    if header.format == "PNG":
        _widen_key(image)
    return _finish(image, new, fast=lambda make: _decode_jpeg(source, header, make))


def _measure_encoded(data: bytes, limits: ImageLimits) -> MeasuredImage:
    if not data:
        raise _invalid("the image is empty (0 bytes)")
    check_bytes(len(data), limits)
    header = read_header(data)
    if header is None:
        message = "the image format is not known; JPEG, PNG, WebP, GIF and BMP are accepted"
        raise RequestError(message, code="image_unsupported")
    check_size(header.height, header.width, limits)
    return MeasuredImage(data, header.height, header.width, header)


def _measure_array(array: npt.NDArray[Any], limits: ImageLimits) -> MeasuredImage:
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        message = f"an image array must be uint8 of shape (height, width[, 1|3|4]); got {array.dtype} {array.shape}"
        raise RequestError(message, code="image_unsupported")
    check_size(array.shape[0], array.shape[1], limits)
    return MeasuredImage(array, array.shape[0], array.shape[1])


def read_data_url(url: str, limits: ImageLimits) -> bytes:
    """The bytes of a base64 data URL. The size limit is checked before decoding. Line breaks and percent escapes do not
    count, but may at most double the text."""
    head, comma, body = url.partition(",")
    if not head[:5].lower() == "data:":
        raise _invalid("an image URL must be a base64 data URL (data:image/...;base64,...)")
    if not comma or not head.rstrip().lower().endswith(";base64"):
        raise _invalid("a data URL must be base64 encoded (data:image/...;base64,...)")
    if len(body) * 3 // 4 - 2 > 2 * limits.max_bytes:
        check_bytes(len(body) * 3 // 4 - 2, limits)
    text = _unwrap(body)
    check_bytes(len(text) * 3 // 4 - text[-2:].count("="), limits)
    try:
        return pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _invalid("the data URL is not valid base64") from None


def digest_pixels(pixels: npt.NDArray[np.uint8], settings: bytes) -> bytes:
    """A SHA-256 of an image or video: its shape, its values and the settings that process it. Shape and settings come
    first, with their lengths, so that different inputs never hash the same bytes."""
    return _digest(settings, pixels.shape, np.ascontiguousarray(pixels).data)


def digest_file(data: bytes, settings: bytes) -> bytes:
    """A SHA-256 of an image's file, which is much smaller than its pixels: 0.1 ms instead of 0.5 for a 560x560 JPEG.
    Zero dimensions are hashed, so that it never equals a digest of pixels."""
    return _digest(settings, (), data)


def _digest(settings: bytes, shape: tuple[int, ...], data: bytes | memoryview) -> bytes:
    name = hashlib.sha256(len(settings).to_bytes(8, "little") + settings)
    name.update(np.asarray([len(shape), *shape], dtype="<i8").tobytes())
    name.update(data)
    return name.digest()


def check_bytes(num_bytes: int, limits: ImageLimits) -> None:
    if num_bytes > limits.max_bytes:
        message = f"the image has {num_bytes} bytes; the limit is {limits.max_bytes}"
        raise RequestError(message, code="image_too_large", status=413)


def too_large(what: str, limit: int, *, code: str = "media_too_large") -> RequestError:
    return RequestError(f"{what} has more than {limit} bytes, which is the limit", code=code, status=413)


def check_counts(media: Sequence[MediaRef], limits: ImageLimits) -> None:
    for kind, limit in (("image", limits.max_images), ("video", limits.max_videos)):
        same = [ref for ref in media if ref.kind == kind]
        if len(same) > limit:
            message = f"the request has {len(same)} {kind}s; the limit is {limit} (--limit-mm-per-prompt)"
            raise RequestError(message, param=same[limit].param, code=f"too_many_{kind}s")


def check_size(height: int, width: int, limits: ImageLimits) -> None:
    """Refuses an image that is too large, too small or too narrow."""
    if min(height, width) < 1:
        message = f"the image is {width}x{height} pixels; each side must have at least 1"
        raise RequestError(message, code="image_too_small")
    if height * width > limits.max_pixels:
        message = f"the image is {width}x{height} pixels; the limit is {limits.max_pixels} pixels"
        raise RequestError(message, code="image_too_large", status=413)
    if max(height, width) > limits.max_aspect * min(height, width):
        raise RequestError(
            f"the image is {width}x{height} pixels; "
            f"the longer side may be at most {limits.max_aspect:g} times the shorter",
            code="image_aspect_ratio",
        )


_BROKEN = "the image is damaged or incomplete"
_PILLOW_OBJECTS = Lock()  # Pillow decodes an object when it is first used, and several prompts may have the same one

# Plugin classes instead of Image.open: no guessing, and no size warning, which depends on process-wide filters.
_OPEN: dict[Format, Any] = {
    "JPEG": JpegImagePlugin.JpegImageFile,
    "PNG": PngImagePlugin.PngImageFile,
    "WEBP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
}


# The factors by which Pillow scales the pixel values of such files.
_DEPTHS = {"L;2": 85, "L;4": 17, "RGB;16B": 1 / 256}


def _widen_key(image: PngImagePlugin.PngImageFile) -> None:
    """Scales a PNG's transparent colour as Pillow scales its pixels, because Pillow leaves it at the file's value. Of
    16-bit values only the high byte can be compared."""
    key = image.info.get("transparency")
    times = _DEPTHS.get(str(image.tile[0].args)) if image.tile else None
    if key is None or times is None:
        return
    values = tuple(int(value * times) for value in (key if isinstance(key, tuple) else (key,)))
    image.info["transparency"] = values if len(values) > 1 else values[0]


def _decode_jpeg(data: bytes, header: Header, new: NewPixels) -> Pixels | None:
    """The fast path, or None where Pillow must decode (other formats, CMYK, anything libjpeg complains about)."""
    if header.format != "JPEG" or header.components not in (1, 3):
        return None
    shape = (header.height, header.width, 3)
    try:
        if simplejpeg.decode_jpeg_header(data)[:2] != shape[:2]:
            return None
        pixels: Pixels = simplejpeg.decode_jpeg(
            data, colorspace="RGB", fastdct=False, fastupsample=False, buffer=new(shape)
        )
    except ValueError:
        return None
    return pixels if pixels.shape == shape else None


def _finish(
    image: Image.Image, new: NewPixels, fast: Callable[[NewPixels], Pixels | None] = lambda make: None
) -> Pixels:
    """Upright RGB pixels. `fast` is another decoder, tried first. A rotated image is decoded into a scratch array and
    turned while it is copied into the result."""
    try:
        orientation = _orientation(image)
        make = new if orientation not in _TURNED else new_pixels
        pixels = fast(make)
        if pixels is None:
            pixels = _in_bands(image, make)
        if orientation in _TURNED:
            turned = _upright(pixels, orientation)
            pixels = new(turned.shape)
            pixels[:] = turned
    except (RequestError, MemoryError):
        raise
    except Exception:  # see decode_image
        raise _invalid(_BROKEN) from None
    pixels.flags.writeable = False
    return pixels


def _in_bands(image: Image.Image, new: NewPixels) -> Pixels:
    """Converts large images in bands: Pillow's conversions hold the GIL and copy their whole input."""
    num_rows = max(1, BAND_PIXELS // image.width)
    image.load()
    pixels = new((image.height, image.width, 3))
    if num_rows >= image.height:
        pixels[:] = _to_rgb(image)
        return pixels
    for top in range(0, image.height, num_rows):
        bottom = min(top + num_rows, image.height)
        pixels[top:bottom] = _to_rgb(image.crop((0, top, image.width, bottom)))
    return pixels


def _to_rgb(image: Image.Image) -> Pixels:
    if image.mode.startswith("I"):
        return _from_16_bit(image)
    if image.mode in _ALPHA_MODES or (image.mode in ("1", "L", "P", "RGB") and image.has_transparency_data):
        image = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    elif image.mode not in _PLAIN_MODES:
        message = "the image's pixel type is not known; 8-bit and 16-bit images are accepted"
        raise RequestError(message, code="image_unsupported")
    return np.asarray(image.convert("RGB"), dtype=np.uint8)


def _from_16_bit(image: Image.Image) -> Pixels:
    """Scales 0..65535 to 0..255 with rounding; taking the high byte would darken every value."""
    image.load()
    values = np.asarray(image).astype(np.int64)
    grey = ((np.clip(values, 0, 65535) * 255 + 32767) // 65535).astype(np.uint8)
    key = image.info.get("transparency")
    if isinstance(key, int):
        grey[values == key] = 255
    return np.repeat(grey[:, :, None], 3, axis=2)


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # broken metadata does not make the pixels wrong
        return 1
    return value if isinstance(value, int) else 1


_TURNED = frozenset(range(2, 9))


def _upright(pixels: Pixels, orientation: int) -> Pixels:
    """A view that undoes the transformation of an EXIF orientation (1 to 8)."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


def _from_array(array: npt.NDArray[Any]) -> Image.Image:
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    return Image.fromarray(np.ascontiguousarray(array))


def _read_file(path: Path, limits: ImageLimits) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(limits.max_bytes + 1)
    except OSError:
        raise _invalid("the image file cannot be read") from None
    return data


def _unwrap(body: str) -> str:
    """Base64 text without line breaks and percent escapes, and with the padding some clients leave out."""
    if "\r" in body or "\n" in body:  # searching is 100 times faster than replacing, and line breaks are rare
        body = body.replace("\r", "").replace("\n", "")
    if "%" in body:
        for escape, char in (("%2B", "+"), ("%2F", "/"), ("%3D", "=")):
            body = body.replace(escape, char).replace(escape.lower(), char)
    return body + "=" * (-len(body) % 4)


def _invalid(message: str) -> RequestError:
    return RequestError(message, code="image_invalid")
