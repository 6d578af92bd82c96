"""The cost of a prompt is checked before the work is done."""

import io
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from saccade.errors import CapacityError, RequestError
from saccade.inputs import decoding
from saccade.inputs.allowance import Allowance, StopWorkError
from saccade.inputs.measuring import MAX_VALUES, size_media
from saccade.inputs.media import images
from saccade.inputs.media.images import ImageLimits, MeasuredImage, load_image, measure_image
from saccade.inputs.media.videos import Video
from saccade.inputs.plans import plan_image
from saccade.inputs.processor import Processor
from saccade.inputs.text import tokenizer
from saccade.inputs.text.chat_messages import MediaRef
from tests.inputs.texts import fuzz_texts


@pytest.fixture(scope="module")
def made(folders: dict[str, Path]) -> Processor:
    return Processor.from_folder(folders["qwen3_vl"], limits=ImageLimits(max_request_pixels=10_000))


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if anything is decoded or encoded."""

    def refuse(*args: Any, **more: Any) -> Any:
        raise AssertionError("work was done")

    monkeypatch.setattr(decoding, "decode_image", refuse)
    monkeypatch.setattr(decoding, "load_video", refuse)
    monkeypatch.setattr(tokenizer, "_encode", refuse)


def png(width: int, height: int, mode: str = "RGB", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (width, height)).save(buffer, "PNG", **options)
    return buffer.getvalue()


def image_messages(*sources: Any) -> list[Any]:
    return [{"role": "user", "content": [{"type": "image", "image": source} for source in sources]}]


def refused(call: Callable[[], Any]) -> RequestError:
    with pytest.raises(RequestError) as error:
        call()
    return error.value


@pytest.mark.usefixtures("no_work")
def test_images_that_are_too_large_together_are_not_decoded(made: Processor) -> None:
    error = refused(lambda: made.chat(image_messages(*[png(60, 60)] * 3)))
    assert (error.code, error.status, error.param) == ("image_too_large", 413, "messages[0].content[2].image")
    assert "10800 pixels" in str(error) and "10000" in str(error)


@pytest.mark.usefixtures("no_work")
def test_images_with_too_many_tokens_are_not_decoded(made: Processor) -> None:
    num_tokens = made.images is not None and plan_image(64, 64, made.images).num_tokens
    allowance = Allowance(max_tokens=2 * num_tokens - 1)
    error = refused(lambda: made.chat(image_messages(png(64, 64), png(64, 64)), allowance=allowance))
    assert (error.code, error.status, error.param) == ("context_length_exceeded", 400, "messages")
    frames = Video([png(64, 64)] * 4, fps=2.0)
    video = [{"role": "user", "content": [{"type": "video", "video": frames}]}]
    assert refused(lambda: made.chat(video, allowance=Allowance(max_tokens=1))).code == "context_length_exceeded"


def test_memory_is_held_before_it_is_used(made: Processor, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    decoded: list[int] = []

    def hold(num_bytes: int) -> None:
        held.append(num_bytes)
        if len(held) > 1:
            raise CapacityError("full")

    def decode(item: MeasuredImage, **more: Any) -> Any:
        decoded.append(len(held))
        return images.decode_image(item, **more)

    monkeypatch.setattr(decoding, "decode_image", decode)
    sources = [png(50, 40), png(30, 20, "1")]
    assert made.chat(image_messages(*sources), allowance=Allowance(hold=hold)).media[0].pixels.shape == (40, 50, 3)
    assert held == [3 * 2600 + 8 * 2000] and decoded == [1, 1]
    with pytest.raises(CapacityError):
        made.chat(image_messages(*sources), allowance=Allowance(hold=hold))
    assert decoded == [1, 1]


def test_decoding_stops_when_the_client_leaves(made: Processor, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[MeasuredImage] = []

    def decode(item: MeasuredImage, **more: Any) -> Any:
        decoded.append(item)
        return images.decode_image(item, **more)

    monkeypatch.setattr(decoding, "decode_image", decode)

    def check_cancelled() -> None:
        if len(decoded) == 2:
            raise StopWorkError

    with pytest.raises(StopWorkError):
        made.chat(image_messages(*[png(20, 20)] * 4), allowance=Allowance(check_cancelled=check_cancelled))
    assert len(decoded) == 2


def test_memory_for_a_files_frames_is_held_as_they_are_decoded(made: Processor) -> None:
    frames = [Image.new("RGB", (32, 32), (i, 0, 0)) for i in range(5)]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    held: list[int] = []
    video = [{"role": "user", "content": [{"type": "video", "video": buffer.getvalue()}]}]
    made.chat(video, allowance=Allowance(hold=held.append))
    assert sum(held) == (8 + 5 * 6) * 32 * 32

    def full(num_bytes: int) -> None:
        if num_bytes:
            raise CapacityError("full")

    with pytest.raises(CapacityError):
        made.chat(video, allowance=Allowance(hold=full))


def test_a_rotated_image_has_as_many_tokens_as_its_header_says(made: Processor) -> None:
    rng = np.random.default_rng(3)
    assert made.images is not None
    for _ in range(30):
        width, height = rng.integers(8, 90, 2).tolist()
        exif = Image.Exif()
        exif[0x0112] = int(rng.integers(1, 9))
        buffer = io.BytesIO()
        Image.new("RGB", (width, height)).save(buffer, "JPEG", exif=exif)
        sized = size_media(MediaRef("image", buffer.getvalue(), "i"), made.images, ImageLimits())
        [media] = made.chat(image_messages(buffer.getvalue())).media
        assert sized.num_tokens == media.plan.num_tokens and sized.num_pixels == media.pixels[..., 0].size


def test_a_second_header_cannot_evade_the_limits() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 48)).save(buffer, "JPEG")
    data = buffer.getvalue()
    small = b"\xff\xc0" + struct.pack(">HBHHB", 17, 8, 8, 8, 3) + b"\x01\x22\x00\x02\x11\x01\x03\x11\x01"
    two = data[:2] + small + data[2:]
    assert measure_image(two, ImageLimits()).num_pixels == 64
    assert refused(lambda: load_image(two, ImageLimits())).code == "image_invalid"


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA", "CMYK", "I;16", "keyed", "palette"])
def test_converting_in_bands_gives_the_same_pixels(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    noise = Image.fromarray(rng.integers(0, 256, (37, 23, 4), dtype=np.uint8))
    options: dict[str, Any] = {}
    if mode == "I;16":
        picture = Image.fromarray(rng.integers(0, 65536, (37, 23), dtype=np.uint16))
    elif mode == "keyed":
        picture, options = noise.convert("L"), {"transparency": 7}
    elif mode == "palette":
        picture, options = noise.convert("RGB").quantize(9), {"transparency": bytes([255, 0, 128])}
    else:
        picture = noise.convert(mode)
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG" if mode == "CMYK" else "PNG", **options)
    whole = load_image(buffer.getvalue(), ImageLimits())
    monkeypatch.setattr(images, "BAND_PIXELS", 23 * 5)
    assert np.array_equal(load_image(buffer.getvalue(), ImageLimits()), whole)


@pytest.mark.usefixtures("no_work")
def test_text_that_cannot_fit_is_not_encoded(made: Processor) -> None:
    allowance = Allowance(max_tokens=100)
    long = "x" * (100 * 32 + 1)  # no token of this vocabulary is longer than 32 characters
    for call, param in (
        (lambda: made.text(long, allowance=allowance), "prompt"),
        (lambda: made.chat([{"role": "user", "content": long}], allowance=allowance), "messages"),
        (lambda: made.chat([{"role": "user", "content": ""}], tools=[{"a": long}], allowance=allowance), "messages"),
        (lambda: made.chat([{"role": "user", "content": "a"}] * 101, allowance=allowance), "messages"),
        (lambda: made.chat([{"role": "user", "content": [""] * MAX_VALUES}], allowance=allowance), "messages"),
        (lambda: made.chat([{"role": "user", "content": [""] * (MAX_VALUES + 1)}], allowance=allowance), "messages"),
        (lambda: made.tokens([5] * 101, allowance=allowance), "prompt"),
    ):
        error = refused(call)
        assert (error.code, error.param) == ("context_length_exceeded", param) and "--max-model-len" in str(error)


def test_prompts_are_made_up_to_the_limit_and_counted_beyond_it(made: Processor) -> None:
    text = "the quick brown fox " * 20
    num_tokens = len(made.text(text))
    assert len(made.text(text, allowance=Allowance(max_tokens=num_tokens))) == num_tokens
    tight = Allowance(max_tokens=num_tokens - 1)
    assert str(num_tokens) in str(refused(lambda: made.text(text, allowance=tight)))
    assert len(made.text(text, allowance=Allowance(max_tokens=num_tokens - 1, is_count=True))) == num_tokens
    chat = [{"role": "user", "content": text}]
    longest = len(made.chat(chat))
    assert len(made.chat(chat, allowance=Allowance(max_tokens=longest))) == longest
    assert refused(lambda: made.chat(chat, allowance=Allowance(max_tokens=longest - 1))).param == "messages"


def test_no_text_that_fits_is_refused(made: Processor) -> None:
    for text in fuzz_texts(200, seed=9):
        assert made.tokenizer.could_fit(len(text), len(made.tokenizer.encode(text)))


def test_other_threads_run_while_a_text_is_encoded(made: Processor) -> None:
    """With an endless switch interval, this thread runs only if the other releases the GIL."""
    text = " ".join(fuzz_texts(50, seed=4)) * 100
    done = threading.Event()

    def encode() -> None:
        made.tokenizer.encode(text)
        done.set()

    thread = threading.Thread(target=encode)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        thread.start()
        was_done = done.is_set()
    finally:
        sys.setswitchinterval(interval)
    thread.join()
    assert not was_done, f"{len(text)} characters"
