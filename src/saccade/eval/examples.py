"""One question with its answer, and how an answer is compared."""

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from PIL import Image

Kind = Literal["image", "video"]


@dataclass(frozen=True, slots=True)
class Example:
    """`media` are images, or one list of frames for a video. `label` is what the confusion table calls the answer."""

    question: str
    answer: str
    media: tuple[Image.Image | list[Image.Image], ...] = field(default=(), repr=False)
    kind: Kind = "image"

    def messages(self) -> list[dict[str, Any]]:
        """The conversation to send."""
        parts: list[dict[str, Any]] = [{"type": self.kind, self.kind: item} for item in self.media]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": self.question}]}]


def normalise(text: str) -> str:
    """Case, outer punctuation and runs of spaces do not make an answer wrong."""
    return re.sub(r"\s+", " ", text).strip(" \n.!?\"'").casefold()
