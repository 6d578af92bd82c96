"""Requests from a file: messages, prompts with images, or conversations."""

import json
import mimetypes
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pybase64

from saccade.bench.serving_settings import CHAT, WorkloadSettings
from saccade.bench.workload_wording import Part, Sample, Wording
from saccade.errors import ConfigError

OUTPUT_NAMES = ("output_tokens", "output_len", "max_tokens", "max_completion_tokens")
LINKS = ("http://", "https://", "data:", "file://")


def read_entries(settings: WorkloadSettings) -> Iterator[dict[str, Any]]:
    """Those of the file, from the top again where it has too few."""
    path = Path(settings.dataset_path)
    try:
        text = path.read_text(encoding="utf-8").strip()
        is_list = text.startswith("[")
        lines = json.loads(text) if is_list else [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON lines or a JSON list: {error} (--dataset-path)") from None
    if not lines or not all(isinstance(line, dict) for line in lines):
        raise ConfigError(f"{path} has no requests; every line is a JSON object (--dataset-path)")
    return islice(cycle(lines), settings.num_prompts)


def sample_of(entry: dict[str, Any], settings: WorkloadSettings, wording: Wording) -> Sample:
    """An entry has messages, a prompt (and images), or conversations as ShareGPT has them."""
    most = next((entry[name] for name in OUTPUT_NAMES if entry.get(name)), settings.random_output_len)
    if not isinstance(most, int) or most < 1:
        raise ConfigError(f"an entry asks for {most!r} output tokens; want a whole number from 1 on (--dataset-path)")
    if isinstance(entry.get("messages"), list) and wording.kind == CHAT:
        return Sample(wording.body("", most, entry["messages"]), most)
    prompt = entry.get("prompt")
    if prompt is None:
        prompt = next((turn.get("value") for turn in entry.get("conversations", ())), None)
    if not isinstance(prompt, str):
        raise ConfigError("an entry needs messages (chat backends), a prompt or conversations (--dataset-path)")
    images = [_link(name, Path(settings.dataset_path).parent) for name in entry.get("images", ())]
    if not images:
        return Sample(wording.body(prompt, most), most)
    if wording.kind != CHAT:
        raise ConfigError("entries with images need a chat backend, such as openai-chat (--backend)")
    parts: list[Part] = [{"type": "image_url", "image_url": {"url": link}} for link in images]
    return Sample(wording.body([*parts, {"type": "text", "text": prompt}], most), most)


def _link(name: str, folder: Path) -> str:
    if name.startswith(LINKS):
        return name
    kind = mimetypes.guess_type(name)[0] or "image/jpeg"
    try:
        return f"data:{kind};base64,{pybase64.b64encode_as_string((folder / name).read_bytes())}"
    except OSError as error:
        raise ConfigError(f"image {name!r} of an entry cannot be read: {error.strerror} (--dataset-path)") from None
