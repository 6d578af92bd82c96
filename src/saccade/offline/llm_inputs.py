"""Converts what callers of `LLM` pass into what a processor takes. Here strings may name files, because callers can
read them anyway. The server never uses this module, so no text of a request opens a file."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import numpy as np
import torch
from PIL import Image

from saccade.errors import ConfigError, RequestError
from saccade.inputs.media.images import ImageLimits
from saccade.inputs.media.videos import Video
from saccade.inputs.placeholders import Prompt
from saccade.inputs.processor import Processor
from saccade.inputs.text.chat_messages import find_sources, with_sources
from saccade.wire.sampling_params import SamplingParams

MAX_SHOWN = 80  # characters of a missing file's name
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "multi_modal_data")
_HARMLESS_KEYS = ("cache_salt", "multi_modal_uuids")  # of vLLM; they only decide what its caches share
_TEMPLATE_OPTIONS = {  # by their names in `Processor.chat`
    "tools": "tools",
    "add_generation_prompt": "add_generation_prompt",
    "continue_final_message": "continue_final_message",
    "chat_template_kwargs": "variables",
    "media": "media",
    "images": "images",
}


def read_media_limits(given: Any) -> ImageLimits:
    """`given` is as in vLLM, such as {"image": 4, "video": 0}. Kinds that it leaves out keep their limit."""
    names = {"image": "max_images", "video": "max_videos"}
    limits = {} if given is None else given
    is_read = isinstance(limits, Mapping) and all(
        kind in names and isinstance(count, int) and not isinstance(count, bool) and count >= 0
        for kind, count in limits.items()
    )
    if not is_read:
        allowed = 'it must be a mapping such as {"image": 16, "video": 0}'
        raise ConfigError(f"limit_mm_per_prompt is {given!r}; {allowed} (--limit-mm-per-prompt)")
    return ImageLimits(**{names[kind]: count for kind, count in limits.items()})


def list_prompts(prompts: Any) -> list[Any]:
    if isinstance(prompts, str | Mapping) or _is_ids(prompts):
        return [prompts]
    if not isinstance(prompts, Iterable) or getattr(prompts, "ndim", 1) == 0:
        raise _not_a_prompt(prompts)
    return list(prompts)


def list_conversations(messages: Any) -> list[Any]:
    """Lists the conversations of a call, which may be a single one. Files that they name become paths."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        message = f"a conversation is a list of messages; got a {type(messages).__name__}"
        raise RequestError(message, param="messages")
    conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
    return [with_files(conversation) for conversation in conversations]


def list_params(params: Any, num_prompts: int) -> list[SamplingParams]:
    """Sampling parameters of each prompt. A single one applies to all."""
    chosen = [SamplingParams() if params is None else params] * num_prompts
    if isinstance(params, Sequence):
        chosen = list(params)
    if wrong := [each for each in chosen if not isinstance(each, SamplingParams)]:
        message = f"sampling_params must be SamplingParams; got a {type(wrong[0]).__name__}"
        raise RequestError(message, param="sampling_params")
    if len(chosen) != num_prompts:
        raise RequestError(f"{num_prompts} prompts and {len(chosen)} sampling_params; give one for each, or just one")
    return chosen


@contextmanager
def naming_prompt(index: int, total: int) -> Iterator[None]:
    """Says in errors which of several prompts is meant."""
    try:
        yield
    except RequestError as error:
        if total > 1:
            error.args = (f"prompts[{index}]: {error}",)
        raise


def read_prompt(prompt: Any, processor: Processor) -> Prompt:
    """Reads text, token ids, or a mapping with either and, for text, the media of its placeholders."""
    if isinstance(prompt, str):
        return processor.text(prompt)
    if _is_ids(prompt):
        return processor.tokens(_ids(prompt))
    if not isinstance(prompt, Mapping):
        raise _not_a_prompt(prompt)
    _check_keys(prompt)
    given = prompt.get("multi_modal_data")
    if "prompt_token_ids" in prompt:
        if given:
            raise RequestError("token ids cannot be combined with images; give the prompt as text", param="prompt")
        return processor.tokens(_ids(prompt["prompt_token_ids"]))
    text = prompt.get("prompt")
    if not isinstance(text, str):
        raise RequestError("a prompt given as a mapping needs text in prompt, or prompt_token_ids", param="prompt")
    media = _list_media(given, text, processor) if given is not None else []
    opened = [(kind, _with_path(source)) for kind, source in media]
    with _naming_files({f"media[{i}]": source for i, (_, source) in enumerate(opened)}):
        return processor.text(text, media=opened)


def _check_keys(prompt: Mapping[Any, Any]) -> None:
    """A misspelt key would leave out the images, and vLLM's mm_processor_kwargs would change their sizes."""
    for key, value in prompt.items():
        is_empty = value is None or (isinstance(value, Mapping) and not value)
        if key not in (*_PROMPT_KEYS, *_HARMLESS_KEYS) and not is_empty:
            known = ", ".join(_PROMPT_KEYS)
            raise RequestError(f"a prompt given as a mapping has {key!r}; it takes {known}", param="prompt")


def read_template_options(given: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Keywords of a method of `LLM` as keywords of `Processor.chat`."""
    if unknown := sorted(given.keys() - _TEMPLATE_OPTIONS.keys()):
        known = ", ".join(_TEMPLATE_OPTIONS)
        raise TypeError(f"LLM.{method}() got an unexpected keyword argument {unknown[0]!r}; for chats it takes {known}")
    return {_TEMPLATE_OPTIONS[name]: value for name, value in given.items()}


def read_conversation(conversation: Any, processor: Processor, **template: Any) -> Prompt:
    """Reads a conversation whose files are paths. Errors name the file."""
    with _naming_files({ref.param: ref.source for _, _, ref in find_sources(conversation)}):
        return processor.chat(conversation, **template)


@contextmanager
def _naming_files(sources: Mapping[str, Any]) -> Iterator[None]:
    """Names the file in errors. Unlike a server's clients, callers of `LLM` may see file names."""
    try:
        yield
    except RequestError as error:
        if isinstance(source := sources.get(error.param or ""), PathLike):
            error.args = (f"{source}: {error}",)
        raise


def _list_media(given: Any, text: str, processor: Processor) -> list[tuple[str, Any]]:
    """Kinds and sources in the order of the prompt's placeholders. A mapping such as {"image": [...], "video": [...]}
    only orders each kind; the placeholders decide how the kinds interleave."""
    if isinstance(given, Mapping):
        by_kind = {kind: _items(kind, items) for kind, items in given.items()}
        kinds = [kind for kind, items in by_kind.items() for _ in items]
        wanted = processor.marker_kinds(text)
        if Counter(wanted) == Counter(kinds):
            kinds = list(wanted)
        left = {kind: iter(items) for kind, items in by_kind.items()}
        return [(kind, next(left[kind])) for kind in kinds]
    pairs = [_pair(item) for item in given] if isinstance(given, list | tuple) else [None]
    found = [pair for pair in pairs if pair is not None]
    if len(found) < len(pairs):
        message = 'multi_modal_data is {"image": [...], "video": [...]}, or in order [{"image": ...}, {"video": ...}]'
        raise RequestError(message, param="multi_modal_data")
    return found


def _items(kind: Any, items: Any) -> list[Any]:
    """Lists a kind's images or videos. A plain list of frames is one video."""
    if not isinstance(items, list | tuple):
        return [] if items is None else [items]
    return [items] if kind == "video" and items and all(map(_is_frame, items)) else list(items)


def _is_frame(item: Any) -> bool:
    return isinstance(item, Image.Image) or (isinstance(item, np.ndarray) and item.ndim == 3)


def _pair(item: Any) -> tuple[str, Any] | None:
    if isinstance(item, Mapping) and len(item) == 1:
        [item] = item.items()
    is_pair = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)
    return item if is_pair else None


def with_files(messages: Any) -> Any:
    """Messages in which media given as file names become paths."""
    found = find_sources(messages)
    return with_sources(messages, found, [_with_path(ref.source) for _, _, ref in found])


def _with_path(source: Any) -> Any:
    if isinstance(source, str):
        return source if source[:5].lower() == "data:" else _file(source)
    if isinstance(source, list | tuple):
        return [_with_path(frame) for frame in source]
    if isinstance(source, Video):
        return replace(source, frames=_with_path(source.frames))
    return source


def _file(text: str) -> Path:
    is_url = text[:5].lower() == "file:"
    path = Path(url2pathname(urlsplit(text).path)) if is_url else Path(text).expanduser()
    try:
        is_there = path.is_file()
    except (OSError, ValueError):  # the name is too long, or has a zero byte
        is_there = False
    if not is_there:
        shown = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
        raise RequestError(
            f"{shown!r} is neither an existing file nor a data URL; remote media must be downloaded first",
            param="multi_modal_data",
            code="media_not_found",
        )
    return path


def _is_ids(prompt: Any) -> bool:
    if isinstance(prompt, np.ndarray | torch.Tensor):
        return prompt.ndim == 1
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) > 0
    return is_list and all(isinstance(token, int | np.integer) for token in prompt)


def _ids(tokens: Any) -> Any:
    return tokens.tolist() if isinstance(tokens, torch.Tensor) else tokens


def _not_a_prompt(found: Any) -> RequestError:
    return RequestError(f"a prompt is text, token ids or a mapping; got a {type(found).__name__}", param="prompt")
