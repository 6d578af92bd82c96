"""How weights are quantised, in the checkpoint or while they are loaded: which layers, in which format."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from saccade.errors import ConfigError
from saccade.kernels.weight import BLOCK, Layout
from saccade.layers.formats import Formats, PlainFormats, WeightFormat
from saccade.models.model_config import Config
from saccade.models.rename import Renames

PLAIN = WeightFormat()
ROUNDED = WeightFormat(layout=Layout.ROWS)
WORDS = ("auto", "fp8")
SUPPORTED = (
    "supported: fp8 with e4m3 weights in blocks of 128 x 128, compressed-tensors with FP8 weights by channel or "
    "tensor, and --quantization fp8 for bfloat16 weights"
)
_ROOM = 128
_NO_LIST: list[Any] = []
_NO_OBJECT: dict[str, Any] = {}

# Paths of the layers that are quantised. The others (embedding, head, router, patches, projectors) affect quality too
# much or are too small to matter.
_LANGUAGE = re.compile(r"decoder\.layers\.\d+\.(attention|mlp)\.(?!router)[\w.]+")
_VISION = re.compile(r"tower\.blocks\.\d+\.(attention|mlp)\.[\w.]+")


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
class QuantizedFormats:
    """The weight formats of the decoder's and the tower's layers. `skipped` layers are plain; they have the names that
    the checkpoint uses."""

    language: WeightFormat
    vision: WeightFormat
    renames: Renames
    skipped: tuple[str, ...] = ()

    def of(self, path: str) -> WeightFormat:
        form = self.language if _LANGUAGE.fullmatch(path) else self.vision if _VISION.fullmatch(path) else PLAIN
        return PLAIN if form is not PLAIN and self._is_skipped(path) else form

    @property
    def multiple(self) -> int:
        return BLOCK if Layout.BLOCKS in (self.language.layout, self.vision.layout) else 1

    def room(self, width: int) -> int:
        return -(-width // _ROOM) * _ROOM

    def _is_skipped(self, path: str) -> bool:
        names = _names_of(self.renames, path)
        return any(_is_named(name, word) for word in self.skipped for name in names)


def read_formats(config: Config, renames: Renames, asked: Quantize = AS_STORED, *, is_dummy: bool = False) -> Formats:
    """The formats that a config.json names, else those that the user asks for. Dummy weights have no scales yet: they
    are rounded to the format of the config."""
    if config.has("quantization_config"):
        return _stored(config, renames, is_dummy=is_dummy)
    if asked == AS_STORED:
        return PlainFormats()
    language, vision = (ROUNDED if word == "fp8" else PLAIN for word in (asked.language, asked.vision))
    return QuantizedFormats(language, vision, renames)


def _stored(config: Config, renames: Renames, *, is_dummy: bool) -> QuantizedFormats:
    found = config.sub("quantization_config")
    method = str(found.get("quant_method", "unknown"))
    if method == "fp8":
        form, skipped = _fp8(found), found.get("modules_to_not_convert", _NO_LIST)
    elif method == "compressed-tensors":
        form, skipped = _compressed(found), found.get("ignore", _NO_LIST)
    else:
        raise _refusal(found, f"quant_method {method!r}")
    if is_dummy:
        form = WeightFormat(layout=form.layout)
    words = tuple(map(str, skipped))
    for word in words:
        _check_pattern(found, word)
    return QuantizedFormats(form, form, renames, words)


def _check_pattern(found: Config, word: str) -> None:
    try:
        re.compile(word.removeprefix("re:") if word.startswith("re:") else "")
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"{found.where}: {word!r} is not a regular expression ({error})") from None


def _fp8(found: Config) -> WeightFormat:
    """The format of Qwen's releases: e4m3 in blocks, inputs scaled dynamically."""
    if (scheme := found.get("activation_scheme", "dynamic")) != "dynamic":
        raise _refusal(found, f"activation_scheme {scheme!r}")
    if (kind := found.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise _refusal(found, f"fmt {kind!r}")
    if (blocks := found.get("weight_block_size", _NO_LIST)) != [BLOCK, BLOCK]:
        raise _refusal(found, f"weight_block_size {blocks or 'null'}")
    return WeightFormat(layout=Layout.BLOCKS, scale_name="weight_scale_inv")


def _compressed(found: Config) -> WeightFormat:
    """compressed-tensors: one group of linear layers, with 8-bit floats."""
    if (status := found.get("quantization_status", "compressed")) not in ("compressed", "frozen"):
        raise _refusal(found, f"quantization_status {status!r}")
    names = list(found.get("config_groups", _NO_OBJECT))
    if len(names) != 1:
        raise _refusal(found, f"{len(names)} config_groups")
    group = found.sub("config_groups").sub(names[0])
    if (targets := group.get("targets", _NO_LIST)) != ["Linear"]:
        raise _refusal(found, f"targets {targets}")
    if group.has("output_activations"):
        raise _refusal(found, "quantised output_activations")
    if found.has("kv_cache_scheme"):
        raise _refusal(found, "a quantised KV cache (kv_cache_scheme)")
    if not (group.has("weights") and group.has("input_activations")):
        raise _refusal(found, "only weights or only inputs")
    return _by_channel_or_tensor(found, group.sub("weights"), group.sub("input_activations"))


def _by_channel_or_tensor(found: Config, weights: Config, inputs: Config) -> WeightFormat:
    for what, scheme in (("weights", weights), ("input_activations", inputs)):
        kind = (scheme.get("type", "int"), scheme.get("num_bits", 0), scheme.get("symmetric", True))
        if kind != ("float", 8, True):
            raise _refusal(found, f"{what} of type {kind[0]}, {kind[1]} bits, symmetric {kind[2]}")
    if (strategy := weights.get("strategy", "none")) not in ("channel", "tensor"):
        raise _refusal(found, f"weights by {strategy}")
    is_dynamic, way = inputs.get("dynamic", False), inputs.get("strategy", "none")
    if way not in (("token", "tensor") if is_dynamic else ("tensor",)):
        raise _refusal(found, f"inputs by {way}, {'dynamic' if is_dynamic else 'static'}")
    return WeightFormat(
        layout=Layout.ROWS,
        scale_name="weight_scale",
        is_one_scale=strategy == "tensor",
        has_input_scale=not is_dynamic,
    )


def _refusal(found: Config, what: str) -> ConfigError:
    return ConfigError(f"{found.where}: weights quantised with {what} are not supported; {SUPPORTED}")


@lru_cache(maxsize=4096)
def _names_of(renames: Renames, path: str) -> Sequence[str]:
    """The names of a layer in checkpoints of all ages."""
    return [name.removesuffix(".weight") for name in renames.names_of(f"{path}.weight")]


def _is_named(name: str, word: str) -> bool:
    """Whether an entry in a list of layers matches this one. An entry is a whole name, a prefix or a suffix of it, or a
    regular expression after "re:"."""
    if word.startswith("re:"):
        return re.match(word.removeprefix("re:"), name) is not None
    return name == word or name.startswith(f"{word}.") or name.endswith(f".{word}")
