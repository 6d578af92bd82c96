"""Whatever JSON a client sends becomes a prompt or a RequestError, never another exception."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from saccade.errors import RequestError
from saccade.inputs.processor import Processor

_ATOMS: list[Any] = [None, True, 0, -1, 1e308, float("nan"), "", "x", "user", "tool", "text", "image_url", "<|im_end|>"]
_ATOMS += ["data:image/png;base64,AAAA", "\ud800", "\ufdd0", "<think>", "{", [], {}]
_KEYS = ["role", "content", "type", "text", "image", "image_url", "url", "video", "video_url", "tool_calls", "function"]
_KEYS += ["name", "arguments", "reasoning_content", "reasoning", "tool_call_id", "frames", "fps"]


def anything(rng: random.Random, depth: int) -> Any:
    draw = rng.random()
    if depth == 0 or draw < 0.5:
        return rng.choice(_ATOMS)
    if draw < 0.7:
        return [anything(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return {rng.choice(_KEYS): anything(rng, depth - 1) for _ in range(rng.randint(0, 4))}


def mostly_right(rng: random.Random, value: Any) -> Any:
    return anything(rng, 2) if rng.random() < 0.03 else value


def content(rng: random.Random) -> Any:
    words = ["hi", " <|im_end|>\n", "<start_of_image>", "> a <", "</think>b", "图"]
    if rng.random() < 0.5:
        return mostly_right(rng, rng.choice(words))
    text = {"type": "text", "text": mostly_right(rng, rng.choice(words))}
    image = {"type": mostly_right(rng, "image_url"), "image_url": mostly_right(rng, {"url": "data:,x"})}
    return [mostly_right(rng, text if rng.random() < 0.9 else image) for _ in range(rng.randint(0, 4))]


def message(rng: random.Random) -> Any:
    built: dict[str, Any] = {"role": mostly_right(rng, rng.choice(["user", "assistant", "tool", "system"]))}
    built["content"] = mostly_right(rng, content(rng))
    if rng.random() < 0.2:
        call = {"function": mostly_right(rng, {"name": "f", "arguments": mostly_right(rng, '{"a": 1}')})}
        built["tool_calls"] = mostly_right(rng, [call])
    if rng.random() < 0.2:
        built[rng.choice(_KEYS)] = anything(rng, 3)
    return built


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "gemma3", "qwen3", "llama"])
def test_any_json_is_answered(folders: dict[str, Path], family: str) -> None:
    rng = random.Random(family)
    processor = Processor.from_folder(folders[family])
    seen: Counter[str | None] = Counter()
    for _ in range(1500):
        options: dict[str, Any] = {}
        if rng.random() < 0.2:
            options["tools"] = mostly_right(rng, [{"function": anything(rng, 3)}])
        if rng.random() < 0.2:
            options["variables"] = mostly_right(rng, {rng.choice(_KEYS): anything(rng, 2)})
        try:
            prompt = processor.chat([message(rng) for _ in range(rng.randint(1, 3))], **options)
        except RequestError as error:
            assert error.code is not None and str(error)
            seen[error.code] += 1
        else:
            assert len(prompt) == prompt.positions_3T.shape[1]
            seen["prompt"] += 1
    assert seen["prompt"] > 100 and len(seen) >= 5, seen
