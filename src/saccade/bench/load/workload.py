"""The requests of a serving benchmark. All are complete, to the last byte, before the first is sent."""

import json
import mimetypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import cycle, islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import orjson
import pybase64

from saccade.bench.load.load_settings import (
    CHAT,
    COMPLETIONS,
    DATASETS,
    GENERATE,
    Size,
    TargetSettings,
    WorkloadSettings,
    parse_sizes,
)
from saccade.bench.load.workload_images import draw_size, make_images
from saccade.bench.load.workload_text import WordList
from saccade.errors import ConfigError

T = TypeVar("T")
Part = dict[str, Any]
OUTPUT_NAMES = ("output_tokens", "output_len", "max_tokens", "max_completion_tokens")
LINKS = ("http://", "https://", "data:", "file://")


@dataclass(frozen=True, slots=True)
class WorkloadPrompt:
    """The content of one request, in no server's format. `messages`, if a file has them, replace `content`. `images`
    numbers the images; copies have the same number."""

    content: str | list[Part]
    max_tokens: int
    text_tokens: int | None = None
    sizes: tuple[Size, ...] = ()
    images: tuple[int, ...] = ()
    messages: list[Part] | None = None


@dataclass(frozen=True, slots=True)
class Wording:
    """Formats requests for a server. `is_timed` asks it to report where each request's time went."""

    target: TargetSettings
    model: str
    ignore_eos: bool
    is_timed: bool = False

    def body(self, prompt: WorkloadPrompt) -> bytes:
        kind, is_streamed, max_tokens = self.target.kind, not self.target.disable_stream, prompt.max_tokens
        if kind != CHAT and not isinstance(prompt.content, str):
            raise ConfigError("requests with media or messages need a chat backend, such as openai-chat (--backend)")
        extra = ({"timings": True} if self.is_timed else {}) | self.target.extra_fields()
        if kind == GENERATE:
            sampling = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": self.ignore_eos}
            return orjson.dumps({"text": prompt.content, "sampling_params": sampling, "stream": is_streamed, **extra})
        fields: dict[str, Any] = {"model": self.model, "temperature": 0, "stream": is_streamed}
        if is_streamed:
            fields["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if kind == COMPLETIONS:
            fields |= {"prompt": prompt.content, "max_tokens": max_tokens}
        else:
            turns = prompt.messages or [{"role": "user", "content": prompt.content}]
            fields |= {"messages": turns, "max_completion_tokens": max_tokens}
        return orjson.dumps(fields | extra)


def make_prompts(settings: WorkloadSettings, words: WordList, *, skip: int = 0) -> list[WorkloadPrompt]:
    """Draws the prompts, which are the same for every server. `skip` leaves out the first entries of a file."""
    kind = DATASETS[settings.dataset_name]
    if kind == "file":
        return [_prompt_of(entry, settings) for entry in _read_entries(settings, skip)]
    rng = np.random.default_rng(settings.seed)
    inputs = draw_lengths(settings.random_input_len, settings, rng)
    outputs = draw_lengths(settings.random_output_len, settings, rng)
    texts = [words.text(length, rng) for length in inputs]
    counts = inputs if words.is_counted else [None] * len(inputs)
    prompts = [WorkloadPrompt(text, most, count) for text, count, most in zip(texts, counts, outputs, strict=True)]
    return prompts if kind == "text" else _with_media(prompts, kind, settings, rng)


def digest_of(prompts: Iterable[WorkloadPrompt]) -> str:
    """Identifies a workload: equal for equal prompts in equal order."""
    found = blake2b(digest_size=8)
    for prompt in prompts:
        found.update(orjson.dumps([prompt.messages or prompt.content, prompt.max_tokens]))
    return found.hexdigest()


def draw_lengths(longest: int, settings: WorkloadSettings, rng: np.random.Generator) -> list[int]:
    """Draws lengths uniformly from range ratio * longest to longest, at least 1."""
    low = max(int(longest * settings.random_range_ratio), 1)
    return [int(length) for length in rng.integers(low, longest + 1, settings.num_prompts)]


def _with_media(
    prompts: Sequence[WorkloadPrompt], kind: str, settings: WorkloadSettings, rng: np.random.Generator
) -> list[WorkloadPrompt]:
    ranges, num_frames = parse_sizes(settings.image_resolution), settings.video_frames if kind == "video" else 1
    units: list[int] = []  # an image, or all frames of a video
    made: list[Size] = []
    for _ in range(settings.num_prompts * settings.image_count):
        if made and rng.random() < settings.image_repeat_ratio:
            units.append(int(rng.integers(len(made))))
        else:
            units.append(len(made))
            made.append(draw_size(ranges, rng))
    images = make_images([size for size in made for _ in range(num_frames)], settings)
    found = []
    for number, prompt in enumerate(prompts):
        group = tuple(units[number * settings.image_count : (number + 1) * settings.image_count])
        frames = [",".join(images[unit * num_frames : (unit + 1) * num_frames]) for unit in group]
        links = [f"data:{kind}/{settings.image_format};base64,{data}" for data in frames]
        parts: list[Part] = [{"type": f"{kind}_url", f"{kind}_url": {"url": link}} for link in links]
        sizes = tuple(made[unit] for unit in group for _ in range(num_frames))
        content = [*parts, {"type": "text", "text": prompt.content}]
        found.append(replace(prompt, content=content, sizes=sizes, images=group))
    return found


def _read_entries(settings: WorkloadSettings, skip: int) -> Iterator[dict[str, Any]]:
    """Reads `num_prompts` entries after the first `skip`, starting over when the file ends. ShareGPT's file has
    conversations without a turn, which are left out."""
    path = Path(settings.dataset_path)
    try:
        text = path.read_text(encoding="utf-8").strip()
        is_list = text.startswith("[")
        lines = json.loads(text) if is_list else [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON lines or a JSON list: {error} (--dataset-path)") from None
    if not lines or not all(isinstance(line, dict) for line in lines):
        raise ConfigError(f"{path} has no requests; every line is a JSON object (--dataset-path)")
    asked = [line for line in lines if line.get("conversations") != [] or "prompt" in line or "messages" in line]
    if not asked:
        raise ConfigError(f"{path} has no requests; all of its conversations are empty (--dataset-path)")
    return islice(cycle(asked), skip % len(asked), skip % len(asked) + settings.num_prompts)


def _prompt_of(entry: dict[str, Any], settings: WorkloadSettings) -> WorkloadPrompt:
    """An entry has messages, or a prompt (and images), or conversations as in ShareGPT."""
    most = next((entry[name] for name in OUTPUT_NAMES if entry.get(name)), settings.random_output_len)
    if not isinstance(most, int) or most < 1:
        raise ConfigError(
            f"an entry asks for {most!r} output tokens; it must be a whole number of at least 1 (--dataset-path)"
        )
    prompt = entry.get("prompt")
    if prompt is None:
        prompt = next((turn.get("value") for turn in _listed(entry, "conversations", dict)), None)
    if isinstance(entry.get("messages"), list):
        return WorkloadPrompt(prompt if isinstance(prompt, str) else [], most, messages=entry["messages"])
    if not isinstance(prompt, str):
        raise ConfigError("an entry needs messages (chat backends), a prompt or conversations (--dataset-path)")
    links = [_link(name, Path(settings.dataset_path).parent) for name in _listed(entry, "images", str)]
    parts: list[Part] = [{"type": "image_url", "image_url": {"url": link}} for link in links]
    return WorkloadPrompt([*parts, {"type": "text", "text": prompt}] if parts else prompt, most)


def _listed(entry: dict[str, Any], name: str, kind: type[T]) -> list[T]:
    found = entry.get(name) or []
    if not isinstance(found, list) or not all(isinstance(item, kind) for item in found):
        wanted = "names" if kind is str else "objects"
        raise ConfigError(f"{name} of an entry must be a list of {wanted} (--dataset-path)")
    return found


def _link(name: str, folder: Path) -> str:
    if name.startswith(LINKS):
        return name
    kind = mimetypes.guess_type(name)[0] or "image/jpeg"
    try:
        return f"data:{kind};base64,{pybase64.b64encode_as_string((folder / name).read_bytes())}"
    except OSError as error:
        raise ConfigError(f"image {name!r} of an entry cannot be read: {error.strerror} (--dataset-path)") from None
