"""Builds a model and streams in its weights, renamed, fused and sharded; missing or extra tensors are errors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from saccade.errors import ConfigError
from saccade.kernels.dispatch import Kernels, kernels_for, require_e4m3
from saccade.layers.formats import PlainFormats, Slot
from saccade.layers.layer import Placement
from saccade.layers.parallel import Groups
from saccade.models.checkpoint import Checkpoint, SafetensorsFolder
from saccade.models.dummy import fill_with_noise
from saccade.models.folder import find_folder
from saccade.models.gguf import GGUFFile
from saccade.models.model_config import Config
from saccade.models.quantization import AS_STORED, Quantize, read_formats
from saccade.models.registry import read_spec
from saccade.models.rename import Renames, Rule
from saccade.models.vlm import EncoderMode, Model

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
OnProgress = Callable[[int, int, str], None]  # bytes done, bytes in total, name of the tensor just placed
DTYPES = {
    **dict.fromkeys(("float32", "float", "fp32"), torch.float32),
    **dict.fromkeys(("float16", "half", "fp16"), torch.float16),
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
}
NAMES_SHOWN = 8
ONE_RANK = Groups()

# Some checkpoints of tied models also store the head. If it differs from the embedding, the config is wrong.
HEAD = "decoder.head.weight"
TIED = ("decoder.embedding.weight", HEAD)
HEADLESS = "layers."  # prefix of names in checkpoints saved without a head, such as Qwen3-Embedding-8B


def load_model(  # noqa: PLR0913
    folder_or_id: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    load_format: LoadFormat = "auto",
    groups: Groups = ONE_RANK,
    encoder_mode: EncoderMode = "weights",
    quantize: Quantize = AS_STORED,
    kernels: Kernels | None = None,
    progress: OnProgress = lambda *news: None,
) -> Model:
    """A model with its weights; if `groups` has several ranks, with this rank's shards.

    `folder_or_id` is a folder, a .gguf file or a hub id; `dtype` defaults to the checkpoint's. "auto" reads a file as
    GGUF and a folder as safetensors; "gguf" also reads a folder with a config.json and one .gguf file; "dummy" needs
    only a config.json. For `encoder_mode` see `Model`. Weights are quantised as the checkpoint says, or to "fp8" while
    they are loaded.
    """
    config, checkpoint = _open(folder_or_id, load_format, share=(groups.language.rank, groups.language.size))
    family, spec = read_spec(config)
    device = torch.device(device)
    dtype = dtype or checkpoint_dtype(config)
    formats = read_formats(config, family.renames, quantize, is_dummy=checkpoint is None)
    if device.type == "cuda" and not isinstance(formats, PlainFormats):
        require_e4m3(device, dtype)
    place = Placement(
        kernels=kernels or kernels_for(device, dtype),
        device=device,
        dtype=dtype,
        group=groups.language,
        formats=formats,
    )
    model = Model(place, spec, vision_group=groups.vision, encoder_mode=encoder_mode)
    if checkpoint is None:
        fill_with_noise(model)
    else:
        fill(model, family.renames, checkpoint, progress=progress)
    return model


def fill(model: Model, renames: Renames, checkpoint: Checkpoint, *, progress: OnProgress = lambda *news: None) -> None:
    """Copies a checkpoint's tensors to a model's slots; missing, extra and misshapen tensors are errors."""
    slots = dict(model.slots())
    findings = Findings(renames=renames, missing=dict.fromkeys(slots))
    bytes_done, bytes_total = 0, checkpoint.total_bytes
    for name, tensor in checkpoint.tensors():
        _place(name, tensor, slots, findings)
        bytes_done += tensor.nbytes
        progress(min(bytes_done, bytes_total), bytes_total, name)
    if HEAD in findings.missing and any(name.startswith(HEADLESS) for name in findings.seen):
        del findings.missing[HEAD]
        model.drop_head()
    findings.raise_if_any(checkpoint.where)
    progress(bytes_total, bytes_total, "")


def checkpoint_dtype(config: Config) -> torch.dtype:
    """The dtype of a config.json, at either level and under either key; bfloat16 by default."""
    text = config.sub("text_config") if config.has("text_config") else config
    named = next((str(c.values[k]) for c in (config, text) for k in ("dtype", "torch_dtype") if c.has(k)), "bfloat16")
    if named not in DTYPES:
        raise ConfigError(f"{config.where}: dtype is {named!r}; allowed: {', '.join(DTYPES)} (--dtype)")
    return DTYPES[named]


def _open(
    folder_or_id: str | Path, load_format: LoadFormat, share: tuple[int, int]
) -> tuple[Config, Checkpoint | None]:
    if load_format not in get_args(LoadFormat):
        raise ConfigError(f"load format {load_format!r} is not known; allowed: {', '.join(get_args(LoadFormat))}")
    if load_format == "gguf" and Path(folder_or_id).is_dir():
        return _open_gguf_folder(Path(folder_or_id))
    if load_format == "gguf" or (load_format == "auto" and str(folder_or_id).endswith(".gguf")):
        file = GGUFFile.open(Path(folder_or_id))
        return file.config(), file
    is_dummy = load_format == "dummy"
    folder = find_folder(folder_or_id, with_weights=not is_dummy)
    checkpoint = None if is_dummy else SafetensorsFolder.open(folder, share)
    return Config.read(folder / "config.json"), checkpoint


def _open_gguf_folder(folder: Path) -> tuple[Config, Checkpoint]:
    """The folder's config.json describes the model; the GGUF metadata is only checked for unsupported values."""
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(f"{folder} has {len(files)} .gguf files; keep exactly one, next to config.json")
    file = GGUFFile.open(files[0])
    file.config()
    return Config.read(folder / "config.json"), file


@dataclass(slots=True)
class Findings:
    """What did not fit. `missing` is a dict to keep the model's order. `tied` holds the embedding and the stored head
    of a model that ties them, in the order in which they were read."""

    renames: Renames
    missing: dict[str, None]
    seen: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    tied: dict[str, Tensor] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)

    def raise_if_any(self, where: str) -> None:
        # Names differ in how they begin and end, and experts make them many.
        kinds_seen = {(*name.split(".")[:3], name.rpartition(".")[2]): name for name in self.seen}
        missing = [self.renames.backwards(name, kinds_seen.values()) for name in self.missing]
        kinds = (
            ("missing", missing),
            ("unexpected", self.unexpected),
            ("repeated", self.repeated),
            ("misshapen", self.misshapen),
        )
        texts = [f"{len(set(names))} {kind}: {_listed(names)}" for kind, names in kinds if names]
        if texts:
            raise ConfigError(
                f"{where}: the weights do not fit config.json: {'; '.join(texts)}. "
                f"Download the checkpoint again, or use the config.json that belongs to these weights"
            )
        if len(self.tied) == 2 and not torch.equal(*self.tied.values()):
            raise ConfigError(
                f"{where}: config.json ties the head to the embedding, but {' and '.join(self.tied)} differ; "
                f"set tie_word_embeddings to false in config.json"
            )


def _place(name: str, tensor: Tensor, slots: dict[str, Slot], findings: Findings) -> None:
    renames = findings.renames
    findings.seen.append(name)
    if renames.is_ignored(name):
        return
    found = renames.find(name)
    if found is None:
        findings.unexpected.append(name)
        return
    rule, words = found
    for slot_name, part in _spread(rule, words, tensor, slots).items():
        if slot_name in TIED and HEAD not in slots:
            embedding = slots[TIED[0]]
            findings.tied[name] = embedding.shard_of(part) if part.shape == embedding.shape else part
        slot = slots.get(slot_name)
        if slot is None:
            if slot_name != HEAD:
                findings.unexpected.append(name)
            continue
        if slot_name not in findings.missing:
            findings.repeated.append(name)
        findings.missing.pop(slot_name, None)
        if fault := _fault_of_kind(tensor, rule) or slot.fault(part):
            findings.misshapen.append(f"{name} {fault}")
            continue
        slot.fill(part)


def _fault_of_kind(tensor: Tensor, rule: Rule) -> str | None:
    """Flattened, a convolution with its channels last would have the right shape. Patches are square."""
    if tensor.dtype in (torch.int16, torch.int32, torch.int64):
        return f"is {str(tensor.dtype).removeprefix('torch.')}; a float is needed"
    if rule.flatten and tensor.ndim > 3 and tensor.shape[-1] != tensor.shape[-2]:
        size = "x".join(map(str, tensor.shape))
        return f"is {size}, with channels last, as MLX has them; use the checkpoint from which it was converted"
    return None


def _spread(rule: Rule, words: dict[str, str], tensor: Tensor, slots: Mapping[str, Slot]) -> dict[str, Tensor]:
    """The tensor for each slot that a rule fills."""
    pieces = tensor.unbind(0) if rule.unbind else (tensor,)
    spread: dict[str, Tensor] = {}
    for i, piece in enumerate(pieces):
        names = [target.format(**({"i": str(i)} | words)) for target in rule.targets]
        matrix = piece.flatten(1) if rule.flatten else piece
        is_other = matrix.shape != _joined_shape(names, slots)
        if matrix.ndim > 1 and (rule.transpose == "always" or (rule.transpose == "if_needed" and is_other)):
            matrix = matrix.transpose(-1, -2)
        parts = (matrix,) if len(names) == 1 else _split(matrix, names, slots)
        spread |= zip(names, parts, strict=True)
    return spread


def _joined_shape(names: list[str], slots: Mapping[str, Slot]) -> tuple[int, ...] | None:
    """The shape of the slots' tensors stacked along the first axis; None if a slot does not exist or is a scalar."""
    shapes = [slots[name].shape for name in names if name in slots]
    is_whole = len(shapes) == len(names) and all(shapes)
    return (sum(shape[0] for shape in shapes), *shapes[0][1:]) if is_whole else None


def _split(matrix: Tensor, names: list[str], slots: Mapping[str, Slot]) -> tuple[Tensor, ...]:
    """Splits a matrix among slots. One that does not fit is returned whole for each name, so that its shape is
    reported. Scales of rows may have one dimension."""
    joined = _joined_shape(names, slots)
    is_column = joined is not None and joined[1:] == (1,) and matrix.shape == joined[:1]
    if matrix.shape != joined and not is_column:
        return (matrix,) * len(names)
    sizes = [slots[name].shape[0] for name in names]
    parts: tuple[Tensor, ...] = matrix.split(sizes, dim=0)
    return parts


def _listed(names: list[str]) -> str:
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - NAMES_SHOWN} more" if len(unique) > NAMES_SHOWN else ""
    return ", ".join(unique[:NAMES_SHOWN]) + more
