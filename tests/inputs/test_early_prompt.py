"""A prompt made while its images are decoded equals one made afterwards."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from saccade.errors import RequestError
from saccade.inputs.allowance import Allowance
from saccade.inputs.media.images import decode_image
from saccade.inputs.placeholders import Prompt
from saccade.inputs.processor import Processor
from saccade.inputs.text.tokenizer import Tokenizer
from tests.inputs.test_images import encode

HANG_S = 60.0
Submit = Callable[[Callable[[], Any]], Future[Any]]


@pytest.fixture(scope="module")
def processors(folders: dict[str, Path]) -> dict[str, Processor]:
    return {name: Processor.from_folder(folders[name]) for name in ("qwen3_vl", "gemma3")}


@pytest.fixture
def submit() -> Iterator[Submit]:
    with ThreadPoolExecutor(2) as threads:
        yield threads.submit


def at_once(work: Callable[[], Any]) -> Future[Any]:
    """Acts as a thread that finishes first."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future


def never(work: Callable[[], Any]) -> Future[Any]:
    """Acts as a pool whose threads are all busy."""
    return Future()


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def turned(width: int, height: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encode(picture(width, height), "JPEG", exif=exif)


def chat(processor: Processor, media: list[Any], submit: Submit | None, text: str = "What is it?") -> Prompt:
    content = [{"type": "text", "text": text}, *({"type": "image"} for _ in media)]
    return processor.chat([{"role": "user", "content": content}], media=media, allowance=Allowance(submit=submit))


def assert_same(found: Prompt, wanted: Prompt) -> None:
    assert found.token_ids.tolist() == wanted.token_ids.tolist() and found.spans == wanted.spans
    assert found.positions_3T.tolist() == wanted.positions_3T.tolist() and found.rope_delta == wanted.rope_delta
    assert (found.limits_T is None) is (wanted.limits_T is None)
    for one, other in zip(found.media, wanted.media, strict=True):
        assert (one.kind, one.plan, one.digest) == (other.kind, other.plan, other.digest) and one.digest
        assert np.array_equal(one.pixels, other.pixels) and not one.pixels.flags.writeable


MEDIA: dict[str, list[Any]] = {
    "a JPEG": [encode(picture(120, 60), "JPEG")],
    "several": [encode(picture(60, 90, 1), "PNG"), encode(picture(120, 60), "JPEG"), encode(picture(60, 90, 1), "PNG")],
    "turned by its metadata": [turned(120, 60)],
    "one of two turned": [encode(picture(60, 60), "JPEG"), turned(64, 200)],
    "no file": [picture(64, 96)],
    "a file and none": [encode(picture(60, 60), "JPEG"), np.asarray(picture(70, 40))],
}


@pytest.mark.parametrize("submit", [at_once, never])
@pytest.mark.parametrize("name", MEDIA)
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_prompts_are_the_same(family: str, name: str, submit: Submit, processors: dict[str, Processor]) -> None:
    processor = processors[family]
    assert_same(chat(processor, MEDIA[name], submit), chat(processor, MEDIA[name], None))


def test_a_prompt_is_made_in_another_thread_while_its_image_is_decoded(
    processors: dict[str, Processor], submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_encoded = threading.Event()
    tokenize = Tokenizer.encode

    def slow_decode(*args: Any) -> Any:
        assert has_encoded.wait(HANG_S), "the text waits for the image"
        return decode_image(*args)

    def note(self: Tokenizer, *args: Any, **kwargs: Any) -> list[int]:
        ids = tokenize(self, *args, **kwargs)
        threads.append(threading.current_thread())
        has_encoded.set()
        return ids

    threads: list[threading.Thread] = []
    monkeypatch.setattr("saccade.inputs.decoding.decode_image", slow_decode)
    monkeypatch.setattr(Tokenizer, "encode", note)
    prompt = chat(processors["qwen3_vl"], MEDIA["a JPEG"], submit)
    assert len(prompt.media) == 1 and len(threads) == 1 and threads[0] is not threading.current_thread()


def test_a_damaged_image_is_reported_before_text_that_cannot_be_encoded(
    processors: dict[str, Processor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Tokenizer, *args: Any, **kwargs: Any) -> list[int]:
        raise RequestError("no such text", code="invalid_text")

    monkeypatch.setattr(Tokenizer, "encode", refuse)
    whole = encode(picture(64, 64), "PNG")
    for data, code in ((whole[:-200], "image_invalid"), (whole, "invalid_text")):
        for submit in (at_once, never, None):
            with pytest.raises(RequestError) as error:
                chat(processors["qwen3_vl"], [data], submit)
            assert error.value.code == code


def test_early_work_has_ended_when_a_request_is_refused(
    processors: dict[str, Processor], submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Because its memory counts as free from then on."""
    has_begun, may_end, ended = threading.Event(), threading.Event(), list[bool]()

    def slow(self: Tokenizer, *args: Any, **kwargs: Any) -> list[int]:
        has_begun.set()
        assert may_end.wait(HANG_S)
        ended.append(True)
        return []

    def fail(*args: Any) -> Any:
        assert has_begun.wait(HANG_S)
        threading.Timer(0.05, may_end.set).start()
        raise RequestError("damaged", code="image_invalid")

    monkeypatch.setattr(Tokenizer, "encode", slow)
    monkeypatch.setattr("saccade.inputs.decoding.decode_image", fail)
    with pytest.raises(RequestError, match="damaged"):
        chat(processors["qwen3_vl"], MEDIA["a JPEG"], submit)
    assert ended
