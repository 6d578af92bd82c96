"""Selects a command's model and engine settings."""

from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from saccade import bundled
from saccade.cli.aliases import add_aliases
from saccade.cli.parser import Parser, settings_from
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings

MODEL_WORD = "[MODEL]"


def engine_parser(name: str, about: str, own: type[Any]) -> Parser:
    """The parser of a command that runs a model: its own settings, the engine's, and other engines' flags."""
    return model_parser(name, about, own, EngineSettings, SchedulerSettings)


def model_parser(name: str, about: str, *settings: type[Any]) -> Parser:
    parser = Parser(name, words=MODEL_WORD, max_words=1, about=about)
    for one in settings:
        parser.add_settings(one)
    add_aliases(parser)
    return parser


def engine_settings(flags: Namespace) -> tuple[str, EngineSettings, SchedulerSettings]:
    """The named model, or the bundled one with its own limits, and the settings to run it with."""
    own = {} if flags.words else bundled.LIMITS
    engine, limits = settings_from(flags, EngineSettings, own), settings_from(flags, SchedulerSettings, own)
    return chosen_model(flags.words), engine, limits


def chosen_model(words: Sequence[str]) -> str:
    return words[0] if words else str(bundled.path())


def found_path(word: str) -> Path | None:
    """The file or folder of this name; None if it does not exist or the word cannot be a path."""
    with suppress(OSError, RuntimeError, ValueError):  # too long, unknown user in ~user, zero byte
        path = Path(word).expanduser()
        return path if path.exists() else None
    return None


def looks_like_model(word: str) -> bool:
    """Whether a single word is a model (a folder, a path, or org/name) rather than a question."""
    path = found_path(word)
    if path is not None and path.is_dir():
        return True
    return " " not in word and (word.startswith((".", "/", "~")) or word.count("/") == 1)
