import base64
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageCms, ImageFilter

from saccade.errors import RequestError
from saccade.inputs.media.headers import read_header
from saccade.inputs.media.images import ImageLimits, digest_file, digest_pixels, load_image, read_data_url
from saccade.inputs.text.chat_messages import MediaRef

LIMITS = ImageLimits()


def photo(rng: np.random.Generator, height: int, width: int) -> Image.Image:
    """Noise as soft as a photograph."""
    noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise).filter(ImageFilter.GaussianBlur(1))


def encode(image: Image.Image, format_: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format_, **options)
    return buffer.getvalue()


def levels(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8]) -> int:
    assert a.shape == b.shape
    return int(np.abs(a.astype(int) - b.astype(int)).max())


def refusal(data: Any, limits: ImageLimits = LIMITS) -> RequestError:
    with pytest.raises(RequestError) as caught, MediaRef("image", data, "messages[0].content[0]").named_in_errors():
        load_image(data, limits)
    assert caught.value.param == "messages[0].content[0]"
    return caught.value


@pytest.mark.parametrize("quality", [20, 75, 95])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
def test_fast_jpeg_decoder_equals_pillow(quality: int, subsampling: int, progressive: bool) -> None:
    rng = np.random.default_rng(quality + subsampling)
    for height, width in [(1, 1), (9, 17), (217, 333), (240, 241)]:
        data = encode(
            photo(rng, height, width), "JPEG", quality=quality, subsampling=subsampling, progressive=progressive
        )
        assert levels(load_image(data, LIMITS), np.asarray(Image.open(io.BytesIO(data)))) == 0


def test_grey_jpeg_equals_pillow() -> None:
    data = encode(photo(np.random.default_rng(0), 33, 47).convert("L"), "JPEG")
    assert levels(load_image(data, LIMITS), np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))) == 0


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_is_applied(orientation: int, format_: str) -> None:
    picture = photo(np.random.default_rng(1), 24, 40)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(picture, format_, exif=exif, **({"lossless": True} if format_ == "WEBP" else {}))
    opened = Image.open(io.BytesIO(data))
    upright = picture if orientation == 1 else _transpose(opened, orientation)
    found = load_image(data, LIMITS)
    assert found.shape[:2] == ((24, 40) if orientation < 5 else (40, 24))
    if orientation > 1:
        assert levels(found, np.asarray(upright.convert("RGB"))) == 0


def _transpose(image: Image.Image, orientation: int) -> Image.Image:
    methods = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    return image.transpose(methods[orientation])


def test_alpha_is_flattened_on_white() -> None:
    rng = np.random.default_rng(2)
    rgba = rng.integers(0, 256, (13, 11, 4), dtype=np.uint8)
    rgba[0, 0] = (10, 20, 30, 0)
    weight = rgba[..., 3:].astype(float) / 255
    expected = np.rint(rgba[..., :3] * weight + 255 * (1 - weight)).astype(np.uint8)
    for data in (encode(Image.fromarray(rgba), "PNG"), rgba, Image.fromarray(rgba)):
        assert levels(load_image(data, LIMITS), expected) <= 1
    lossless = encode(Image.fromarray(rgba), "WEBP", lossless=True, exact=True)
    assert levels(load_image(lossless, LIMITS), expected) <= 1


def test_transparent_grey_and_palette_images_are_flattened_on_white() -> None:
    rng = np.random.default_rng(3)
    grey = rng.integers(0, 200, (9, 8), dtype=np.uint8)
    grey[2, 3] = 7
    keyed = encode(Image.fromarray(grey), "PNG", transparency=7)
    found = load_image(keyed, LIMITS)
    assert (found[grey == 7] == 255).all() and (found[grey != 7] == grey[grey != 7][:, None]).all()

    grey_alpha = np.stack([grey, np.where(grey == 7, 0, 255).astype(np.uint8)], axis=2)
    assert levels(load_image(encode(Image.fromarray(grey_alpha, "LA"), "PNG"), LIMITS), found) == 0

    palette = Image.fromarray(rng.integers(0, 4, (9, 8), dtype=np.uint8), "P")
    palette.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255, 9, 9, 9])
    indices = np.asarray(palette)
    found = load_image(encode(palette, "PNG", transparency=bytes([255, 0, 128, 255])), LIMITS)
    assert (found[indices == 1] == 255).all(), "a transparent entry is white, not its palette colour"
    assert (found[indices == 0] == (255, 0, 0)).all() and (found[indices == 3] == 9).all()
    assert np.abs(found[indices == 2].astype(int) - (127, 127, 255)).max() <= 1
    assert (load_image(encode(palette, "GIF", transparency=1), LIMITS)[indices == 1] == 255).all()


def test_transparency_is_the_same_in_all_modes_of_a_pillow_image() -> None:
    """Pillow's own colour reduction keeps alpha in the palette, and says so nowhere else."""
    image = Image.new("RGBA", (9, 8), (200, 0, 0, 0))
    image.paste((0, 0, 255, 255), (2, 2, 5, 6))
    image.paste((0, 255, 0, 128), (5, 2, 7, 6))
    expected = load_image(image, LIMITS)
    reduced = image.quantize(16)
    for other in (reduced, reduced.convert("PA"), image.convert("RGBa")):
        assert levels(load_image(other, LIMITS), expected) <= 1
    grey = image.convert("LA")
    assert levels(load_image(grey.convert("La"), LIMITS), load_image(grey, LIMITS)) <= 1


def test_sixteen_bit_grey_is_scaled_with_rounding() -> None:
    values = np.array([[0, 1, 128, 129, 257, 300, 32767, 65279, 65407, 65534, 65535]], dtype=np.uint16)
    expected = np.rint(values / 257).astype(np.uint8)
    data = encode(Image.fromarray(np.repeat(values, 3, axis=0)), "PNG")
    found = load_image(data, LIMITS)
    assert (found == expected[:, :, None]).all()


def test_sixteen_bit_colour_is_read() -> None:
    rng = np.random.default_rng(4)
    values = rng.integers(0, 65536, (5, 6, 3), dtype=np.uint16)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    data = _png(6, 5, rows, depth=16, colour=2)
    assert np.abs(load_image(data, LIMITS).astype(int) - values / 257).max() <= 1


@pytest.mark.parametrize("depth", [1, 2, 4, 16])
def test_a_transparent_colour_of_any_depth_is_white(depth: int) -> None:
    most = 2**depth - 1
    values = np.random.default_rng(30).integers(0, most + 1, (9, 8)) & most
    for key in {0, 1, most - 1, most}:
        values[3, 4] = key
        packed = [np.unpackbits(row.astype(">u2").view(np.uint8)).reshape(8, 16)[:, 16 - depth :] for row in values]
        rows = b"".join(b"\0" + np.packbits(bits).tobytes() for bits in packed)
        found = load_image(_png(8, 9, rows, depth=depth, transparent=struct.pack(">H", key)), LIMITS)
        expected = np.where(values == key, 255, np.rint(values * (255 / most)))
        assert np.abs(found[..., 0] - expected).max() <= 1


def test_a_transparent_colour_of_48_bits_is_white() -> None:
    values = np.random.default_rng(31).integers(0, 65536, (5, 6, 3), dtype=np.uint16)
    values[0, 0], values[1, 1] = (1, 2, 300), (300, 2, 1)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    for place in ((0, 0), (3, 4)):
        key = struct.pack(">HHH", *values[place].tolist())
        found = load_image(_png(6, 5, rows, depth=16, colour=2, transparent=key), LIMITS).astype(int)
        expected = np.rint(values / 257)
        expected[place] = 255
        assert np.abs(found - expected).max() <= 1


def test_cmyk_and_bilevel_images_become_rgb() -> None:
    cmyk = photo(np.random.default_rng(5), 16, 24).convert("CMYK")
    data = encode(cmyk, "JPEG", quality=95)
    assert levels(load_image(data, LIMITS), np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))) == 0
    bilevel = Image.fromarray(np.random.default_rng(6).integers(0, 2, (6, 7), dtype=np.uint8) * 255).convert("1")
    found = load_image(encode(bilevel, "PNG"), LIMITS)
    assert (found[..., 0] == np.asarray(bilevel) * 255).all() and set(np.unique(found)) == {0, 255}


@pytest.mark.parametrize("format_", ["GIF", "WEBP", "PNG"])
def test_an_animation_gives_its_first_frame(format_: str) -> None:
    frames = [Image.new("RGB", (12, 10), colour) for colour in [(255, 0, 0), (0, 255, 0), (0, 0, 255)]]
    options: dict[str, Any] = {"lossless": True} if format_ == "WEBP" else {}
    data = encode(frames[0], format_, save_all=True, append_images=frames[1:], **options)
    assert (load_image(data, LIMITS) == (255, 0, 0)).all()


def test_bmp_and_small_images_are_read() -> None:
    picture = photo(np.random.default_rng(7), 7, 5)
    assert levels(load_image(encode(picture, "BMP"), LIMITS), np.asarray(picture)) == 0
    assert load_image(encode(Image.new("RGB", (1, 1), (1, 2, 3)), "PNG"), LIMITS).tolist() == [[[1, 2, 3]]]


@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_the_header_has_the_size(format_: str) -> None:
    for height, width in [(1, 1), (300, 17), (64, 1000)]:
        data = encode(photo(np.random.default_rng(8), height, width), format_)
        header = read_header(data)
        assert header is not None and (header.format, header.height, header.width) == (format_, height, width)
        assert read_header(data[:9]) is None
    lossless = read_header(encode(Image.new("RGBA", (33, 44), (1, 2, 3, 4)), "WEBP", lossless=True))
    assert lossless is not None and (lossless.height, lossless.width) == (44, 33)


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def _png(width: int, height: int, rows: bytes, *, depth: int = 8, colour: int = 0, transparent: bytes = b"") -> bytes:
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    key = _chunk(b"tRNS", transparent) if transparent else b""
    body = _chunk(b"IHDR", head) + key + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def test_a_bomb_is_refused_by_its_header() -> None:
    bomb = _png(32768, 32768, b"\0" * 2_000_000)
    assert len(bomb) < 20_000
    assert refusal(bomb).code == "image_too_large"
    giant = bytearray(encode(photo(np.random.default_rng(9), 16, 16), "JPEG"))
    at = giant.index(b"\xff\xc0")
    giant[at + 5 : at + 9] = struct.pack(">HH", 65000, 65000)
    assert refusal(bytes(giant)).code == "image_too_large"
    canvas = (
        b"RIFF" + struct.pack("<I", 100) + b"WEBPVP8X" + struct.pack("<II", 10, 0) + b"\xfe\x3f\0\xfe\x3f\0" + bytes(64)
    )
    assert refusal(canvas).code == "image_too_large"


def test_limits_are_checked() -> None:
    data = encode(photo(np.random.default_rng(10), 30, 40), "PNG")
    assert refusal(data, ImageLimits(max_bytes=len(data) - 1)).code == "image_too_large"
    assert refusal(data, ImageLimits(max_pixels=1199)).code == "image_too_large"
    assert refusal(_png(1, 20000, b"\0\1" * 20000)).code == "image_aspect_ratio"
    assert refusal(_png(0, 5, b"")).code == "image_too_small"
    assert refusal(np.zeros((1, 300, 3), np.uint8)).code == "image_aspect_ratio"
    assert refusal(Image.new("L", (1, 300))).code == "image_aspect_ratio"
    assert load_image(data, ImageLimits(max_bytes=len(data), max_pixels=1200)).shape == (30, 40, 3)


@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_truncated_files_are_refused_with_a_fixed_text(format_: str) -> None:
    data = encode(photo(np.random.default_rng(11), 64, 64), format_)
    for kept in (1, 2, 7, 40, len(data) // 2, len(data) - len(data) // 8):
        error = refusal(data[:kept])
        assert error.code in ("image_invalid", "image_unsupported")
        assert str(error) in (
            "the image is damaged or incomplete",
            "the image format is not known; JPEG, PNG, WebP, GIF and BMP are accepted",
        )


def test_other_content_is_refused() -> None:
    assert refusal(b"").code == "image_invalid"
    tiff = encode(photo(np.random.default_rng(12), 8, 8), "TIFF")
    for data in (b"hello", b"\x89PNG\r\n\x1a\n" + b"x" * 50, tiff, b"%!PS-Adobe-3.0 EPSF-3.0", b"<svg/>", bytes(1000)):
        assert refusal(data).code == "image_unsupported"
    assert refusal(5).code == "image_invalid"
    assert refusal({"url": "x"}).code == "image_invalid"
    assert refusal(np.zeros((4, 4), np.float32)).code == "image_unsupported"
    assert refusal(np.zeros((4, 4, 5), np.uint8)).code == "image_unsupported"
    assert refusal(Image.new("F", (4, 4))).code == "image_unsupported"


def test_random_damage_never_escapes_as_another_error() -> None:
    rng = np.random.default_rng(13)
    for format_ in ("JPEG", "PNG", "WEBP", "GIF", "BMP"):
        data = encode(photo(rng, 40, 30), format_)
        for _ in range(60):
            damaged = bytearray(data)
            for at in rng.integers(0, len(damaged), 4):
                damaged[at] = rng.integers(0, 256)
            try:
                pixels = load_image(bytes(damaged), ImageLimits(max_pixels=10**6))
            except RequestError as error:
                assert error.code is not None
            else:
                assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3


def test_data_urls() -> None:
    data = encode(photo(np.random.default_rng(14), 8, 9), "PNG")
    text = base64.b64encode(data).decode()
    for head in ("data:image/png;base64,", "DATA:image/png;charset=utf-8;BASE64,", "data:;base64,"):
        assert load_image(head + text, LIMITS).shape == (8, 9, 3)
    assert load_image("data:image/png;base64," + text.rstrip("="), LIMITS).shape == (8, 9, 3)
    assert load_image(
        "data:image/png;base64," + "\n".join(text[i : i + 76] for i in range(0, len(text), 76)), LIMITS
    ).any()
    expected = load_image(data, LIMITS)
    escaped = text.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D")
    wrapped = "\r\n".join(text[i : i + 60] for i in range(0, len(text), 60))
    both = "\n".join(escaped[i : i + 61] for i in range(0, len(escaped), 61))  # line breaks split escapes, too
    assert escaped != text and len({text, escaped, wrapped, both}) == 4
    lower = escaped.replace("%2B", "%2b").replace("%2F", "%2f").replace("%3D", "%3d")
    for body in (escaped, lower, wrapped, both, text + "\n", escaped + "\r\n"):
        assert np.array_equal(load_image("data:image/png;base64," + body, LIMITS), expected)
    for url in (
        "data:image/png," + text,
        "data:image/png;base64",
        "data:image/png;base64,@@@@",
        "data:",
        "",
        "/etc/passwd",
    ):
        assert refusal(url).code == "image_invalid"
    assert "base64 data URL" in str(refusal("https://example.com/cat.png"))
    assert refusal("data:image/png;base64," + "A" * 200, ImageLimits(max_bytes=100)).code == "image_too_large"


def test_the_limit_of_a_data_url_counts_decoded_bytes() -> None:
    data = encode(photo(np.random.default_rng(14), 40, 50), "PNG")
    text = base64.b64encode(data).decode()
    wrapped = "\r\n".join(text[i : i + 60] for i in range(0, len(text), 60))
    escaped = text.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D")
    for body in (text, text.rstrip("="), wrapped, escaped):
        url = f"data:image/png;base64,{body}"
        assert read_data_url(url, ImageLimits(max_bytes=len(data))) == data
        error = refusal(url, ImageLimits(max_bytes=len(data) - 1))
        assert error.code == "image_too_large" and f"has {len(data)} bytes" in str(error)
    mostly_breaks = "data:image/png;base64," + "\n" * 3000 + "QUJD"
    assert refusal(mostly_breaks, ImageLimits(max_bytes=1000)).status == 413


def test_a_string_never_opens_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encode(photo(np.random.default_rng(15), 8, 9), "PNG"))
    assert load_image(path, LIMITS).shape == (8, 9, 3)
    assert refusal(str(path)).code == "image_invalid"
    missing = refusal(tmp_path / "b.png")
    assert missing.code == "image_invalid" and str(tmp_path) not in str(missing)
    assert refusal(path, ImageLimits(max_bytes=20)).code == "image_too_large"


def test_colour_profile_and_broken_exif_do_not_matter() -> None:
    picture = photo(np.random.default_rng(16), 8, 9)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    broken = encode(picture, "PNG", icc_profile=profile, exif=b"Exif\0\0MM\0*\0\0\xff\xff\0\1")
    assert levels(load_image(broken, LIMITS), np.asarray(picture)) == 0


def test_pixels_are_read_only() -> None:
    pixels = load_image(encode(photo(np.random.default_rng(17), 8, 9), "JPEG"), LIMITS)
    with pytest.raises(ValueError):
        pixels[0, 0, 0] = 1


def test_digests_distinguish_shapes_values_and_settings() -> None:
    rng = np.random.default_rng(18)
    pixels = rng.integers(0, 256, (6, 4, 3), dtype=np.uint8)
    name = digest_pixels(pixels, b"settings")
    assert len(name) == 32 and name == digest_pixels(pixels.copy(), b"settings")
    other = pixels.copy()
    other[5, 3, 2] ^= 1
    variants = [
        digest_pixels(other, b"settings"),
        digest_pixels(pixels.reshape(4, 6, 3), b"settings"),
        digest_pixels(pixels.reshape(1, 6, 4, 3), b"settings"),
        digest_pixels(pixels, b"setting"),
        digest_pixels(pixels, b"settingS"),
        digest_pixels(pixels[::-1], b"settings"),
        digest_file(pixels.tobytes(), b"settings"),
        digest_file(other.tobytes(), b"settings"),
        digest_file(pixels.tobytes(), b"setting"),
        digest_file(pixels.tobytes()[1:], b"settings" + pixels.tobytes()[:1]),
    ]
    assert len({name, *variants}) == 11
    assert digest_file(pixels.tobytes(), b"settings") == variants[-4]
