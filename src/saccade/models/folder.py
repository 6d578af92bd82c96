"""Finds the folder of a checkpoint, local or from the hub."""

import os
from functools import partial
from pathlib import Path

from saccade.errors import ConfigError
from saccade.models.model_config import Config
from saccade.models.registry import read_spec

# Files that the model, tokenizer, templates and image processor read. Code and pickles are never fetched.
SETTINGS = ["*.json", "*.jinja", "*.model", "*.txt"]
WEIGHTS = ["*.safetensors"]
IN_FOLDERS = ["*/*.safetensors"]  # of other formats, or from the middle of a training


def find_folder(
    folder_or_id: str | Path, *, revision: str = "", download_dir: str = "", with_weights: bool = True
) -> Path:
    """Returns a local folder unchanged. Anything else is a hub id, which is fetched or found in the hub's cache."""
    path = Path(folder_or_id).expanduser()
    if _is_folder(path):
        if revision:
            raise ConfigError(
                f"revision is {revision}, but {folder_or_id} is a local folder, which has none; leave --revision out, "
                "or give a hub id such as org/name"
            )
        return path
    if path.is_file() and path.suffix == ".gguf":
        raise ConfigError(
            f"{folder_or_id} is a file; put config.json and tokenizer.json next to it and give the folder, "
            f"with --load-format gguf"
        )
    if path.is_file() or str(folder_or_id).count("/") > 1 or str(folder_or_id).startswith((".", "~", "/")):
        raise ConfigError(f"{folder_or_id} is not a folder; give a checkpoint folder or a hub id such as org/name")
    return _fetch(str(folder_or_id), revision, download_dir, SETTINGS + WEIGHTS * with_weights)


def find_model(folder_or_id: str | Path, *, revision: str = "", download_dir: str = "") -> Path:
    """The folder of a model. An unsupported one is refused before its weights are fetched."""
    find = partial(find_folder, folder_or_id, revision=revision, download_dir=download_dir)
    read_spec(Config.read(find(with_weights=False) / "config.json"))
    return find()


def _is_folder(path: Path) -> bool:
    """Raises if this user may not read the files: a server often runs as a different user than the one who fetched
    the model."""
    try:
        files = [file for file in path.iterdir() if any(map(file.match, SETTINGS + WEIGHTS)) and file.exists()]
    except PermissionError as error:
        raise _forbidden(error.filename) from None
    except (OSError, ValueError):
        return False
    for file in files:
        if not os.access(file, os.R_OK):
            raise _forbidden(file)
    return True


def _forbidden(path: str | Path) -> ConfigError:
    return ConfigError(f"user {os.getuid()} may not read {path}; let that user read it and enter the folders above it")


def _fetch(name: str, revision: str, download_dir: str, wanted: list[str]) -> Path:
    """Imports the hub's package only when needed: it takes a quarter of a second."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        found = huggingface_hub.snapshot_download(
            name,
            revision=revision or None,
            cache_dir=download_dir or None,
            allow_patterns=wanted,
            ignore_patterns=IN_FOLDERS,
        )
        return Path(found)
    except (HfHubHTTPError, HFValidationError, OSError, RuntimeError) as error:
        named = f"{name} at revision {revision}" if revision else name
        raise ConfigError(
            f"{named} is neither a folder nor a hub repository that can be fetched: {_reason(error)}"
        ) from error


def _reason(error: Exception) -> str:
    from huggingface_hub import errors

    match error:
        case errors.GatedRepoError():
            return "it is gated; accept its terms on its page and set HF_TOKEN"
        case errors.RevisionNotFoundError():
            return "it has no such revision (--revision)"
        case errors.RepositoryNotFoundError():
            return "the hub has no repository of this name, or it needs a token (HF_TOKEN)"
        case errors.LocalEntryNotFoundError():
            cause = type(error.__cause__ or error).__name__
            return f"the hub cannot be reached ({cause}); check the network, or give a local folder"
        case RuntimeError() if "home directory" in str(error):  # pathlib's, for a user without one
            return f"{error} Set HF_HOME to a folder that this user can write to"
    return f"{type(error).__name__}; check the name, the network and the disk, or give a local folder"
