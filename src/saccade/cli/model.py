"""Which model a command is about."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from saccade.errors import ConfigError

MODEL_WORD = "[MODEL]"
# Where nothing else was chosen, the bundled model gets what a CPU can do soon after the start: graphs recorded there
# hold every temporary, so few and small ones. Its images have at most 64 tokens.
BUNDLED_LIMITS = {
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "encoder_budget_tokens": 256,
    "encoder_cache_tokens": 2048,
}


def chosen_model(words: Sequence[str]) -> str:
    """The model that was named, or the bundled one."""
    return words[0] if words else str(bundled_model())


def bundled_model() -> Path:
    try:
        from saccade import bundled
    except ImportError:
        raise ConfigError("this installation has no bundled model; name a checkpoint folder or a hub id") from None
    return bundled.path()


def found_path(word: str) -> Path | None:
    """The file or folder that a word names; None where it names none, or cannot be a name."""
    with suppress(OSError, RuntimeError, ValueError):  # too long, somebody's who is unknown, with a zero byte
        path = Path(word).expanduser()
        return path if path.exists() else None
    return None


def looks_like_model(word: str) -> bool:
    """Whether a lone word names a model and is not a question: a folder, a path, or org/name."""
    path = found_path(word)
    if path is not None and path.is_dir():
        return True
    return " " not in word and (word.startswith((".", "/", "~")) or word.count("/") == 1)
