"""The small vision-language model that ships with Saccade: an ordinary checkpoint folder inside the package."""

from pathlib import Path


def path() -> Path:
    """The folder of the bundled checkpoint."""
    return Path(__file__).parent / "checkpoint"
