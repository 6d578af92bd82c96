"""Prompts of a call are read in threads before the first runs: in order, in bounded memory, and errors lose no work."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from threading import Event
from threading import enumerate as threads
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from saccade.errors import RequestError
from saccade.inputs.placeholders import Prompt, text_prompt
from saccade.machine import usable_cores
from saccade.offline import prompt_reader
from saccade.offline.llm import LLM
from saccade.offline.prompt_reader import PromptReader
from saccade.terminal import progress_bar
from saccade.wire.sampling_params import SamplingParams
from tests.engine.conftest import made as made  # a fixture
from tests.models import tiny

LIMIT_S = 60


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threads() if thread.name.startswith("prompts")]


def with_pixels(number: int, nbytes: int) -> Prompt:
    media: Any = SimpleNamespace(pixels=np.zeros(nbytes, np.uint8))
    return replace(text_prompt([number]), media=(media,) if nbytes else ())


def read_with(read: Callable[[int], Prompt], num_items: int) -> list[int]:
    with PromptReader(range(num_items), read) as reader, progress_bar(None) as bar:
        reader.read_all(bar)
        return [int(prompt.token_ids[0]) for prompt in reader]


def test_prompts_come_in_order() -> None:
    assert read_with(lambda item: text_prompt([item]), 100) == list(range(100))
    assert read_with(lambda item: text_prompt([item]), 0) == []


def test_the_error_of_the_first_bad_prompt_is_raised() -> None:
    last_has_failed = Event()

    def read(item: int) -> Prompt:
        if item == 1:
            last_has_failed.wait(LIMIT_S if threads_at_once() > 1 else 0)
            raise RequestError("one")
        if item == 2:
            last_has_failed.set()
            raise RequestError("two")
        return text_prompt([item])

    with pytest.raises(RequestError, match=r"^prompts\[1\]: one$"):
        read_with(read, 3)


def threads_at_once() -> int:
    return min(prompt_reader.MAX_THREADS, usable_cores())


def test_pixels_beyond_a_bound_are_read_again_when_their_turn_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_reader, "KEPT_BYTES", 25)
    reads: Counter[int] = Counter()

    def read(item: int) -> Prompt:
        reads[item] += 1
        return with_pixels(item, 0 if item == 39 else 10)

    with PromptReader(range(40), read) as reader, progress_bar(None) as bar:
        reader.read_all(bar)
        assert sum(reads.values()) == 40
        found = []
        for prompt in reader:
            found.append(int(prompt.token_ids[0]))
            ahead = sum(reads.values()) - 40
            assert ahead <= len(found) + threads_at_once(), "too many are read ahead"
    assert found == list(range(40))
    assert sum(reads.values()) == 40 + 37, "two prompts with pixels fit, and the text does"
    assert reads[39] == 1


def test_an_error_of_the_second_reading_names_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_reader, "KEPT_BYTES", 0)
    reads: Counter[int] = Counter()

    def read(item: int) -> Prompt:
        reads[item] += 1
        if item == 2 and reads[item] == 2:
            raise RequestError("the file has changed")
        return with_pixels(item, 1)

    with pytest.raises(RequestError, match=r"^prompts\[2\]: the file has changed$"):
        read_with(read, 4)


@pytest.fixture(scope="module")
def llm(made: tiny.Tiny) -> Iterator[LLM]:
    with LLM(made.folder, max_model_len=64, kv_cache_tokens=256, block_size=4, enforce_eager=True) as opened:
        yield opened


def talk(image: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What"}]}]


def ask(llm: LLM, images: list[Any]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    found = llm.chat([talk(image) for image in images], params, progress=False)
    return [request.outputs[0].token_ids for request in found]


def test_answers_are_the_same_if_pixels_are_read_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (32, 32, 3), dtype=np.uint8) for _ in range(6)]
    expected = ask(llm, images)
    monkeypatch.setattr(prompt_reader, "KEPT_BYTES", 0)
    assert ask(llm, images) == expected


def test_several_prompts_may_share_a_pillow_image_that_is_not_decoded_yet(llm: LLM, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (400, 400, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    expected = ask(llm, [noise] * 8)
    assert ask(llm, [Image.open(BytesIO(file.getvalue()))] * 8) == expected
    assert ask(llm, [Image.open(BytesIO(file.getvalue())) for _ in range(8)]) == expected
