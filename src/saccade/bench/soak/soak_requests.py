"""The requests of a soak: their kinds, how frequent each is, and which answers are expected."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from saccade.bench.load.load_settings import CHAT, COMPLETIONS
from saccade.bench.soak import soak_files

Manner = Literal["whole", "leave", "leave at once", "slow"]
WORDS = ("red", "circle", "blue", "square", "count", "the", "left", "of", "seven", "digit", "what", "is", "green", "a")
NUM_SCHEMAS = 96  # fewer than an engine caches, so that its memory stops growing
ENDLESS = "start: A\nA: /.*a.{16}.*/ & /.*b.{16}.*/ & ~/.*c.{16}.*/"
MAX_WORDS, LONG_TOKENS = 60, 64
OK, REFUSED = frozenset({200}), frozenset({400, 413})


@dataclass(frozen=True, slots=True)
class SoakTarget:
    """What the requests depend on."""

    model: str
    has_images: bool
    max_model_len: int
    sizes: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SoakRequest:
    """`manner` is how the client behaves; `expected` has the allowed statuses."""

    index: int
    kind: str
    body: bytes
    expected: frozenset[int] = OK
    manner: Manner = "whole"
    path: str = CHAT
    sizes: tuple[tuple[int, int], ...] = ()  # of its images


@dataclass(frozen=True, slots=True)
class Kind:
    """`weight` is the relative frequency. `make` returns the fields that differ from a short chat request, or a whole
    body as bytes."""

    name: str
    weight: float
    make: Callable[[Random, SoakTarget, int], dict[str, Any] | bytes] = field(repr=False)
    expected: frozenset[int] = OK
    manner: Manner = "whole"
    path: str = CHAT
    has_images: bool = False
    num_sizes: int = 0  # number of images of the soak's sizes


def make_request(seed: int, index: int, target: SoakTarget) -> SoakRequest:
    """Makes request `index` of a seed. Takes some milliseconds, to encode images."""
    random = Random(f"{seed}:{index}")
    kinds = [kind for kind in KINDS if target.has_images or not kind.has_images]
    [kind] = random.choices(kinds, [kind.weight for kind in kinds])
    made = kind.make(random, target, index)
    if isinstance(made, dict):
        usual: dict[str, Any] = {"model": target.model, "max_tokens": random.randint(1, 12)}
        if kind.path == CHAT:
            usual["messages"] = [{"role": "user", "content": _text(random, target)}]
        made = json.dumps(usual | made).encode()
    sizes = tuple(_sizes(target, index, kind.num_sizes))
    return SoakRequest(index, kind.name, made, kind.expected, kind.manner, kind.path, sizes)


def _text(random: Random, target: SoakTarget) -> str:
    most = max(1, min(MAX_WORDS, target.max_model_len // 16))
    return " ".join(random.choices(WORDS, k=random.randint(1, most)))


def _ask(random: Random, *parts: dict[str, object]) -> dict[str, Any]:
    text = {"type": "text", "text": random.choice(WORDS)}
    return {"messages": [{"role": "user", "content": [*parts, text]}]}


def _images(random: Random, target: SoakTarget, index: int, count: int = 1) -> dict[str, Any]:
    pictures = (soak_files.picture(size, random) for size in _sizes(target, index, count))
    return _ask(random, *(soak_files.part("image", data) for data in pictures))


def _sizes(target: SoakTarget, index: int, count: int) -> list[tuple[int, int]]:
    return [target.sizes[(index + i) % len(target.sizes)] for i in range(count)]


def _long_stream(random: Random, target: SoakTarget, index: int) -> dict[str, Any]:
    return {"stream": True, "ignore_eos": True, "max_tokens": max(1, min(LONG_TOKENS, target.max_model_len // 4))}


def _schema(random: Random, target: SoakTarget, index: int) -> dict[str, Any]:
    number = random.randrange(NUM_SCHEMAS)
    schema = {"type": "object", "properties": {f"p{number}": {"type": "integer"}}, "required": [f"p{number}"]}
    shape = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    return {"response_format": shape, "stream": random.random() < 0.5}


def _grammar(random: Random, target: SoakTarget, index: int) -> dict[str, Any]:
    number = random.randrange(NUM_SCHEMAS // 3)
    return random.choice(
        (
            {"guided_regex": f"a{{{number + 1}}}b?"},
            {"guided_choice": ["yes", "no", f"perhaps {number}"]},
            {"guided_grammar": f'start: "x" "y"~1..{number + 1}'},
        )
    )


def _bad_grammar(random: Random, target: SoakTarget, index: int) -> dict[str, Any]:
    return random.choice(
        (
            {"guided_regex": "("},
            {"guided_regex": "a{1,100000}{1,100000}"},
            {"guided_grammar": f"start: missing{index}"},
            {"guided_json": {"type": f"nothing {index}"}},
            {"guided_json": {"$ref": "http://127.0.0.1:1/schema"}},
        )
    )


def _tools(random: Random, target: SoakTarget, index: int) -> dict[str, Any]:
    named = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": f"weather_{i}", "parameters": named}} for i in range(2)]
    choice: Any = random.choice(("auto", "required", {"type": "function", "function": {"name": "weather_1"}}))
    return {"tools": tools, "tool_choice": choice, "stream": random.random() < 0.5, "max_tokens": 40}


def _sampling(random: Random, target: SoakTarget, index: int) -> dict[str, Any]:
    return {
        "temperature": random.choice((0, 0.5, 2)),
        "seed": random.randrange(2**31),
        "top_p": random.uniform(0.1, 1),
        "top_k": random.randint(1, 50),
        "presence_penalty": random.uniform(-2, 2),
        "repetition_penalty": random.uniform(0.5, 2),
        "n": random.randint(1, 3),
        "stop": random.sample(WORDS, 2),
    }


def _bad_body(random: Random, target: SoakTarget, index: int) -> bytes:
    return random.choice(
        (
            b"{",
            b"[]",
            b"\xff\xfe",
            b'{"messages": ' + b"[" * 1000,
            b'{"messages": []}',
            b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}',
            b'{"prompt": "hi", "x": [' + b"[]," * 200_000 + b"[]]}",
        )
    )


def _bad_number(random: Random, target: SoakTarget, index: int) -> dict[str, Any]:
    name = random.choice(("temperature", "top_p", "n", "seed", "max_tokens", "presence_penalty"))
    return {name: random.choice((-(10**30), 10**30, "1", [], {}))}


def _bad_url(random: Random, target: SoakTarget, index: int) -> dict[str, Any]:
    urls = ("data:image/png;base64,@@@@", "data:image/png;base64,QUJD", "data:,", "file:///etc/hostname", "http://[::1")
    return _ask(random, soak_files.url_part("image", random.choice(urls)))


KINDS = (
    Kind("text", 14, lambda random, target, index: {}),
    Kind("text stream", 12, lambda random, target, index: {"stream": True, "stream_options": {"include_usage": True}}),
    Kind(
        "completion",
        4,
        lambda random, target, index: {"prompt": _text(random, target), "echo": True, "logprobs": 2},
        path=COMPLETIONS,
    ),
    Kind("image", 18, _images, has_images=True, num_sizes=1),
    Kind("image stream", 8, lambda r, t, i: {**_images(r, t, i), "stream": True}, has_images=True, num_sizes=1),
    Kind("two images", 4, lambda r, t, i: _images(r, t, i, 2), has_images=True, num_sizes=2),
    Kind("animation", 2, lambda r, t, i: _ask(r, soak_files.part("video", soak_files.animation(r))), has_images=True),
    Kind("left in a stream", 10, _long_stream, manner="leave"),
    Kind("left at once", 3, _long_stream, manner="leave at once"),
    Kind("left with an image", 4, _images, manner="leave at once", has_images=True),
    Kind("slow reader", 4, _long_stream, manner="slow"),
    Kind("log-probabilities", 4, lambda r, t, i: {"logprobs": True, "top_logprobs": r.randint(0, 5)}),
    Kind("seeds and penalties", 5, _sampling),
    Kind("schema", 6, _schema),
    Kind("grammar", 4, _grammar),
    Kind("tools", 4, _tools),
    Kind("timeout", 3, lambda r, t, i: {"timeout": r.uniform(0.001, 0.1), "max_tokens": 60}, frozenset({200, 408})),
    Kind(
        "endless grammar",
        0.5,
        lambda r, t, i: {"guided_grammar": f"{ENDLESS}\nB: /x{i}/", "timeout": r.choice((0.5, 60))},
        frozenset({400, 408}),
    ),
    Kind("bad grammar", 2, _bad_grammar, REFUSED),
    Kind("bad body", 2, _bad_body, REFUSED),
    Kind("bad number", 2, _bad_number, REFUSED),
    Kind("unknown model", 1, lambda random, target, index: {"model": "there is no such model"}, frozenset({404})),
    Kind("bad address", 2, _bad_url, REFUSED, has_images=True),
    Kind(
        "truncated image",
        2,
        lambda r, t, i: _ask(r, soak_files.part("image", soak_files.truncated_picture(r))),
        REFUSED,
        has_images=True,
    ),
    Kind("hostile JPEG", 1, lambda r, t, i: _ask(r, soak_files.part("image", soak_files.scans(r))), REFUSED,
         has_images=True),
    Kind(
        "hostile GIF",
        1,
        lambda r, t, i: _ask(r, soak_files.part("video", soak_files.growing_animation(r))),
        REFUSED,
        has_images=True,
    ),
)  # fmt: skip
