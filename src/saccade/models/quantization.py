"""How weights are quantised: as the checkpoint stores them, or as the user asks while they are loaded."""

from dataclasses import dataclass
from typing import Protocol

from saccade.errors import ConfigError
from saccade.kernels.weight import Layout
from saccade.layers.formats import Formats, PlainFormats, WeightFormat, room_of_quantized
from saccade.models.model_config import Config
from saccade.models.rename import Renames
from saccade.models.stored_formats import LANGUAGE, PLAIN, VISION, quantization_of, read_stored

ROUNDED = WeightFormat(layout=Layout.ROWS)
WORDS = ("auto", "fp8")


class QuantizeSettings(Protocol):
    @property
    def quantization(self) -> str: ...

    @property
    def mm_encoder_quantization(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantize:
    """What the user asks for: weights as stored ("auto"), or rounded to "fp8" while they are loaded."""

    language: str = "auto"
    vision: str = "auto"

    def __post_init__(self) -> None:
        for flag, word in (("--quantization", self.language), ("--mm-encoder-quantization", self.vision)):
            if word not in WORDS:
                raise ConfigError(f"{flag} is {word!r}; allowed: {', '.join(WORDS)}")

    @classmethod
    def asked_by(cls, settings: QuantizeSettings) -> "Quantize":
        return cls(language=settings.quantization, vision=settings.mm_encoder_quantization)


AS_STORED = Quantize()


@dataclass(frozen=True)
class RoundedFormats:
    """The formats of plain weights that are rounded while they are loaded. Embedding, head, router, patches and
    projectors stay plain: they affect quality too much, or are too small to matter."""

    language: WeightFormat
    vision: WeightFormat

    multiple = 1

    def of(self, path: str) -> WeightFormat:
        return self.language if LANGUAGE.fullmatch(path) else self.vision if VISION.fullmatch(path) else PLAIN

    def room(self, width: int) -> int:
        return room_of_quantized(width)


def read_formats(config: Config, renames: Renames, asked: Quantize = AS_STORED, *, is_dummy: bool = False) -> Formats:
    """The formats that a config.json names, else those that the user asks for."""
    found = quantization_of(config)
    if found is not None and (stored := read_stored(found, renames, is_dummy=is_dummy)).groups:
        return stored
    if asked == AS_STORED:
        return PlainFormats()
    return RoundedFormats(*(ROUNDED if word == "fp8" else PLAIN for word in (asked.language, asked.vision)))
