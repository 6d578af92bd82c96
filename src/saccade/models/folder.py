"""Finds a checkpoint's folder, local or on the hub."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from saccade.errors import ConfigError

# Read by the model, tokenizer, templates and image processor. Code and pickles are never fetched.
SETTINGS = ["*.json", "*.jinja", "*.model", "*.txt"]
WEIGHTS = ["*.safetensors"]


def find_folder(
    folder_or_id: str | Path, *, revision: str = "", download_dir: str = "", with_weights: bool = True
) -> Path:
    """A local folder is returned unchanged; anything else is a hub id, which is fetched or found in the hub's cache."""
    path = Path(folder_or_id).expanduser()
    if path.is_dir():
        if revision:
            raise ConfigError(
                f"revision is {revision}, but {folder_or_id} is a local folder, which has none; leave --revision out, "
                "or give a hub id such as org/name"
            )
        return path
    if path.is_file() and path.suffix == ".gguf":
        raise ConfigError(
            f"{folder_or_id} is a file; put config.json and tokenizer.json beside it and give the folder, "
            f"with --load-format gguf"
        )
    if path.is_file() or str(folder_or_id).count("/") > 1 or str(folder_or_id).startswith((".", "~", "/")):
        raise ConfigError(f"{folder_or_id} is not a folder; give a checkpoint folder or a hub id such as org/name")
    try:
        wanted = SETTINGS + WEIGHTS * with_weights
        where = download_dir or None
        found = snapshot_download(str(folder_or_id), revision=revision or None, cache_dir=where, allow_patterns=wanted)
        return Path(found)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        named = f"{folder_or_id} at revision {revision}" if revision else f"{folder_or_id}"
        raise ConfigError(
            f"{named} is neither a folder nor a hub repository that can be fetched "
            f"({type(error).__name__}); check the name and the network, or give a local folder"
        ) from error
