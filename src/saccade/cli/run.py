"""`saccade run`: one question, with a streamed answer. Without a question, a conversation."""

import re
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from saccade.cli.aliases import add_aliases
from saccade.cli.model import bundled_model, found_path, looks_like_model
from saccade.cli.parser import Parser, settings_from
from saccade.config import AnswerSettings
from saccade.errors import ConfigError, RequestError
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings

if TYPE_CHECKING:
    from saccade.offline.llm import LLM
    from saccade.wire.sampling_params import SamplingParams

EXIT_FAILED = 1
REQUEST_ID = "run"
# A path with an image suffix, bare, or quoted if it has blanks; whether the file exists decides what it is.
_ENDING = r"\.(?:jpe?g|png|webp|gif|bmp)"
_PATH = re.compile(
    rf"""(?:(?<!\w)(['"])(?P<quoted>[^'"\n]+?{_ENDING})\1|(?P<bare>(?:[^\s'"]|\\ )+?{_ENDING}))"""
    r"(?=[\s,;:?!)]|\.?$|\.\s)",
    re.IGNORECASE,
)

Part = dict[str, Any]


def new_parser(name: str) -> Parser:
    about = (
        "Ask a model once. Paths of images inside the prompt count as images; without MODEL, the model that comes with "
        "the package answers. Without PROMPT it is read from a pipe, or asked for. For a single answer no graphs are "
        "captured: --no-enforce-eager captures them."
    )
    parser = Parser(name, words="[MODEL] [PROMPT]", max_words=2, about=about)
    media = parser.new_group("media", "what the prompt is about")
    shared: dict[str, Any] = {"dest": "media", "action": "append", "metavar": "FILE"}  # one list keeps their order
    media.add("--image", type=partial(_part, "image"), help="an image; repeatable", **shared)
    media.add("--video", type=partial(_part, "video"), help="a video; repeatable", **shared)
    parser.add_settings(AnswerSettings)
    parser.add_settings(EngineSettings, enforce_eager=True)
    parser.add_settings(SchedulerSettings, max_num_seqs=1)
    add_aliases(parser)
    return parser


def run(flags: Namespace) -> int:
    model, prompt = _model_and_prompt(flags.words)
    content: list[Part] = getattr(flags, "media", [])
    first = content + parts_of(prompt) if prompt else None
    if first is None and not sys.stdin.isatty():
        raise ConfigError("there is no prompt; give one: saccade run [MODEL] PROMPT")
    answer = settings_from(flags, AnswerSettings)
    llm = _load(model, flags)
    from saccade import SamplingParams

    params = SamplingParams(max_tokens=answer.max_tokens, temperature=answer.temperature)
    with llm:
        if not first:
            return _talk(llm, content, params)
        _, is_right = _stream(llm, [{"role": "user", "content": first}], params)
        return 0 if is_right else EXIT_FAILED


def parts_of(prompt: str) -> list[Part]:
    """The prompt as text and image parts: a path in it becomes an image at that place."""
    parts: list[Part] = []
    at = 0
    for match in _PATH.finditer(prompt):
        name = match["quoted"] or match["bare"].replace("\\ ", " ")
        path = found_path(name)
        if path is None or not path.is_file():
            if name.startswith(("/", "./", "../", "~")):
                raise ConfigError(f"the prompt names {name}, which is not there")
            continue
        parts += [*_text(prompt[at : match.start()]), {"type": "image", "image": path}]
        at = match.end()
    return [*parts, *_text(prompt[at:])]


def _text(text: str) -> list[Part]:
    return [{"type": "text", "text": text.strip()}] if text.strip() else []


def _model_and_prompt(words: list[str]) -> tuple[str, str]:
    if len(words) == 2:
        return words[0], words[1]
    if words and not looks_like_model(words[0]):
        return str(bundled_model()), words[0]
    piped = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read().strip()
    return (words[0] if words else str(bundled_model())), piped


def _part(kind: str, path: str) -> Part:
    found = Path(path).expanduser()
    if not found.is_file():
        raise ConfigError(f"{path} is not a file (--image, --video)")
    return {"type": kind, kind: found}


def _load(model: str, flags: Namespace) -> "LLM":
    from saccade import LLM  # imports torch

    chosen = {**asdict(settings_from(flags, EngineSettings)), **asdict(settings_from(flags, SchedulerSettings))}
    with Console(stderr=True).status(f"loading {model}"):
        return LLM(model, **chosen)


def _talk(llm: "LLM", content: list[Part], params: "SamplingParams") -> int:
    """A conversation until input ends. Given images belong to its first question; refused questions are dropped."""
    messages: list[dict[str, Any]] = []
    for line in _lines():
        try:
            asked = [*messages, {"role": "user", "content": content + parts_of(line)}]
            text, _ = _stream(llm, asked, params)
        except (ConfigError, RequestError) as refused:
            sys.stderr.write(f"saccade: {refused}\n")
            continue
        messages, content = [*asked, {"role": "assistant", "content": text}], []
    return 0


def _lines() -> Iterator[str]:
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return
        if line:
            yield line


def _stream(llm: "LLM", messages: list[dict[str, Any]], params: "SamplingParams") -> tuple[str, bool]:
    """Writes an answer as it is generated, and any error. Returns the text and whether it succeeded."""
    from saccade.client.output import OutputStream

    engine, tokenizer = llm.engine, llm.processor.tokenizer
    engine.add(REQUEST_ID, llm.processor.chat(messages), params)
    stream = OutputStream(0, tokenizer.detokenizer(skip_special_tokens=True), params)
    while engine.has_work:
        for update in engine.step():
            text, _ = stream.take(update)
            sys.stdout.write(text)
            sys.stdout.flush()
    sys.stdout.write("\n")
    is_right = stream.output.finish_reason != "error"
    if not is_right:
        sys.stderr.write(f"saccade: {stream.output.stop_reason}\n")
    return stream.output.text, is_right
