"""Which layers of a checkpoint are quantised, and how: the `quantization_config` of Qwen's FP8 releases, AutoFP8,
compressed-tensors (llm-compressor) and NVIDIA ModelOpt."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Any

from saccade.errors import ConfigError
from saccade.kernels.weight import BLOCK, Layout
from saccade.layers.formats import WeightFormat, room_of_quantized
from saccade.models.model_config import Config
from saccade.models.rename import Renames

PLAIN = WeightFormat()
SUPPORTED = (
    "supported: FP8 (e4m3) weights with rounded inputs, by tensor, by channel or in blocks of 128 x 128, as "
    "compressed-tensors, fp8 and modelopt write them, and --quantization fp8 for bfloat16 weights"
)
LINEAR = "Linear"
_NO_LIST: list[Any] = []
_NO_OBJECT: dict[str, Any] = {}

# Paths of the layers that are `Linear` in transformers. A quantised router or head is refused: every release that
# servers load keeps them plain.
LANGUAGE = re.compile(r"decoder\.layers\.\d+\.(attention|mlp)\.(?!router)[\w.]+")
VISION = re.compile(r"tower\.blocks\.\d+\.(attention|mlp)\.[\w.]+")
_LINEAR = re.compile(rf"{LANGUAGE.pattern}|{VISION.pattern}|tower\.(projector|deepstack\.\d+)\.mlp\.[\w.]+")
_CLASS_NAME = re.compile(r"[A-Z]\w*")


@dataclass(frozen=True)
class Names:
    """Names of layers, whole or as patterns. A pattern comes after "re:" or has a "*"."""

    whole: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]

    @classmethod
    def read(cls, found: Config, words: Iterable[Any]) -> "Names":
        patterns = {word: _pattern(found, word) for word in map(str, words)}
        return cls(
            frozenset(word for word, pattern in patterns.items() if pattern is None),
            tuple(pattern for pattern in patterns.values() if pattern is not None),
        )

    def have(self, name: str) -> bool:
        return name in self.whole or any(pattern.match(name) for pattern in self.patterns)

    def have_part_of(self, name: str) -> bool:
        """Whether they have this name, its beginning or its end. Lists may be long, so parts are looked up in them."""
        words = name.split(".")
        parts = (".".join(part) for i in range(1, len(words)) for part in (words[:i], words[i:]))
        return self.have(name) or any(part in self.whole for part in parts)


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share a format. The target "Linear" is every layer that no other target names."""

    targets: Names
    form: WeightFormat


@dataclass(frozen=True)
class StoredFormats:
    """The formats of a checkpoint's weights. `skipped` layers are plain. Both it and the targets have the names that
    the checkpoint uses. `known` are the answers so far: models with many experts ask 36,000 times, and plans build
    several."""

    groups: tuple[LayerGroup, ...]
    skipped: Names
    renames: Renames
    known: dict[str, WeightFormat] = field(default_factory=dict, compare=False, repr=False)

    def of(self, path: str) -> WeightFormat:
        if path not in self.known:
            self.known[path] = self._find(path)
        return self.known[path]

    def _find(self, path: str) -> WeightFormat:
        if not _LINEAR.fullmatch(path):
            return PLAIN
        names = _names_of(self.renames, path)
        if any(self.skipped.have_part_of(name) for name in names):
            return PLAIN
        return next((group.form for group in self._by_precision(names)), PLAIN)

    @property
    def multiple(self) -> int:
        return BLOCK if any(group.form.layout is Layout.BLOCKS for group in self.groups) else 1

    def room(self, width: int) -> int:
        return room_of_quantized(width)

    def _by_precision(self, names: Sequence[str]) -> Iterator[LayerGroup]:
        """As in compressed-tensors, a whole name goes before a pattern, and a pattern before a class."""
        yield from (group for group in self.groups if not group.targets.whole.isdisjoint(names))
        yield from (group for group in self.groups if any(group.targets.have(name) for name in names))
        yield from (group for group in self.groups if LINEAR in group.targets.whole)


def quantization_of(config: Config) -> Config | None:
    """The object that describes the quantisation, wherever a release of a library has put it."""
    places = [(config, "quantization_config"), (config, "compression_config")]
    if isinstance(config.values.get("text_config"), dict):
        places.append((config.sub("text_config"), "quantization_config"))
    return next((place.sub(key) for place, key in places if place.has(key)), None)


def read_stored(found: Config, renames: Renames, *, is_dummy: bool) -> StoredFormats:
    """Dummy weights have no scales yet: they are rounded to the format."""
    # ModelOpt names itself as the producer instead.
    method = str(found.get("quant_method", str(_part(found, "producer").get("name", "unknown"))))
    reader = _READERS.get(method.lower().replace("_", "-"))  # some tools write compressed_tensors
    if reader is None:
        raise _refusal(found, f"quant_method {method!r}")
    groups, skipped = reader(found)
    if is_dummy:
        groups = [LayerGroup(group.targets, WeightFormat(layout=group.form.layout)) for group in groups]
    return StoredFormats(tuple(groups), Names.read(found, skipped), renames)


def _fp8(found: Config) -> tuple[list[LayerGroup], list[Any]]:
    """Qwen's releases have blocks, whose inputs are scaled dynamically; AutoFP8 has one scale for a tensor."""
    if (kind := found.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise _refusal(found, f"fmt {kind!r}")
    if (kind := found.get("scale_fmt", "float")) != "float":
        raise _refusal(found, f"scale_fmt {kind!r}")
    scheme, blocks = found.get("activation_scheme", "dynamic"), found.get("weight_block_size", _NO_LIST)
    if scheme not in ("dynamic", "static") or (blocks and scheme == "static"):
        raise _refusal(found, f"activation_scheme {scheme!r} and weight_block_size {blocks or 'null'}")
    if blocks and blocks != [BLOCK, BLOCK]:
        raise _refusal(found, f"weight_block_size {blocks}")
    layout = Layout.BLOCKS if blocks else Layout.ROWS
    form = WeightFormat(layout=layout, is_stored=True, has_input_scale=scheme == "static")
    lists = [found.get(key, _NO_LIST) for key in ("ignored_layers", "modules_to_not_convert")]
    return [LayerGroup(Names(frozenset({LINEAR}), ()), form)], [word for words in lists for word in words]


def _modelopt(found: Config) -> tuple[list[LayerGroup], list[Any]]:
    """ModelOpt's export, in config.json or in hf_quant_config.json. "FP8" has one scale for a tensor, and one for its
    inputs."""
    inner = found.sub("quantization") if found.has("quantization") else found
    if (kind := inner.get("quant_algo", "none")) not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        raise _refusal(found, f"modelopt's quant_algo {kind!r}")
    form = WeightFormat(layout=Layout.ROWS, is_stored=True, has_input_scale=kind == "FP8")
    lists = [inner.get(key, _NO_LIST) for key in ("ignore", "exclude_modules")]
    return [LayerGroup(Names(frozenset({LINEAR}), ()), form)], [word for words in lists for word in words]


def _compressed(found: Config) -> tuple[list[LayerGroup], list[Any]]:
    """compressed-tensors. The scales of a quantised KV cache are not used: keys and values keep the model's dtype."""
    if (status := found.get("quantization_status", "compressed")) not in ("compressed", "frozen"):
        raise _refusal(found, f"quantization_status {status!r}")
    if (sparsity := _part(found, "sparsity_config").get("format", "dense")) != "dense":
        raise _refusal(found, f"sparsity ({sparsity!r} in sparsity_config)")
    if _part(found, "transform_config").get("config_groups", _NO_OBJECT):
        raise _refusal(found, "rotations of inputs (transform_config)")
    names = list(found.get("config_groups", _NO_OBJECT))
    if not names and not found.has("kv_cache_scheme"):
        raise _refusal(found, "0 config_groups")
    groups = [_group(found, found.sub("config_groups").sub(name)) for name in names]
    return groups, found.get("ignore", _NO_LIST)


def _group(found: Config, group: Config) -> LayerGroup:
    targets = Names.read(found, group.get("targets", _NO_LIST))
    for target in sorted(targets.whole):
        if _CLASS_NAME.fullmatch(target) and target != LINEAR:
            raise _refusal(found, f"target {target!r}, a class other than {LINEAR}")
    if group.has("output_activations"):
        raise _refusal(found, "quantised output_activations")
    has_weights, has_inputs = group.has("weights"), group.has("input_activations")
    if not has_weights and not has_inputs:
        return LayerGroup(targets, PLAIN)
    if not has_inputs:
        weights = group.sub("weights")
        raise _refusal(found, f"{_kind(weights)} for weights alone (input_activations is null)")
    if not has_weights:
        raise _refusal(found, "quantised inputs alone (weights is null)")
    return LayerGroup(targets, _scheme(found, group.sub("weights"), group.sub("input_activations")))


def _scheme(found: Config, weights: Config, inputs: Config) -> WeightFormat:
    for what, scheme in (("weights", weights), ("input_activations", inputs)):
        if _kind(scheme) != "float of 8 bits" or not scheme.get("symmetric", True):
            raise _refusal(found, f"{what} in {_kind(scheme)}, symmetric {scheme.get('symmetric', True)}")
    strategy, blocks = weights.get("strategy", "none"), _block_size(weights)
    if strategy not in ("channel", "tensor", "block"):
        raise _refusal(found, f"weights by {strategy}")
    if strategy == "block" and blocks != [BLOCK, BLOCK]:
        raise _refusal(found, f"weights by block of {blocks}")
    is_dynamic, way = inputs.get("dynamic", False), inputs.get("strategy", "none")
    if way == "group":
        way = f"group of {inputs.get('group_size', 0)}"
    if strategy == "block":
        allowed: tuple[str, ...] = (f"group of {BLOCK}",) if is_dynamic else ()
    else:
        allowed = ("token", "tensor") if is_dynamic else ("tensor",)
    if way not in allowed:
        raise _refusal(found, f"weights by {strategy} and inputs by {way}, {'dynamic' if is_dynamic else 'static'}")
    layout = Layout.BLOCKS if strategy == "block" else Layout.ROWS
    return WeightFormat(layout=layout, is_stored=True, has_input_scale=not is_dynamic)


def _kind(scheme: Config) -> str:
    return f"{scheme.get('type', 'int')} of {scheme.get('num_bits', 0)} bits"


def _block_size(weights: Config) -> Any:
    """Early releases of compressed-tensors wrote "128x128"."""
    given = weights.values.get("block_structure")
    return [BLOCK, BLOCK] if given == f"{BLOCK}x{BLOCK}" else given


def _part(found: Config, key: str) -> Config:
    return found.sub(key) if found.has(key) else Config({}, f"{found.where}: {key}")


_READERS = {"fp8": _fp8, "modelopt": _modelopt, "compressed-tensors": _compressed}


def _refusal(found: Config, what: str) -> ConfigError:
    return ConfigError(f"{found.where}: weights quantised with {what} are not supported; {SUPPORTED}")


def _pattern(found: Config, word: str) -> re.Pattern[str] | None:
    """With "*" it matches whole names like a file pattern (ModelOpt) or a regular expression (transformers)."""
    if word.startswith("re:"):
        try:
            return re.compile(word.removeprefix("re:"))
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError(f"{found.where}: {word!r} is not a regular expression ({error})") from None
    if "*" not in word:
        return None
    try:
        return re.compile(rf"{translate(word)}|(?:{word})\Z")
    except (re.error, OverflowError, RecursionError):
        return re.compile(translate(word))


def _names_of(renames: Renames, path: str) -> Sequence[str]:
    """The names of a layer in checkpoints of all ages: the list of layers is often older or newer than the tensors."""
    return [name.removesuffix(".weight") for name in renames.names_of(f"{path}.weight")]
