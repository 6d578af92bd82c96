"""GGUF files written here from tiny checkpoints load like the checkpoints."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from saccade.errors import ConfigError
from saccade.models.folder import find_folder
from saccade.models.gguf import LAYER_NAMES, NAMES, GGUFFile
from saccade.models.registry import read_spec
from saccade.models.weights import load_model
from tests.models import tiny
from tests.models.conftest import Loaded

Load = Callable[[str], Loaded]
HEADS = {"q_proj": 4, "k_proj": 2}


def interleaved(rows: Any, num_heads: int) -> Any:
    """Interleaves the halves of each head, as llama.cpp's converter does."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write(
    made: tiny.Tiny, path: Path, kind: str, *, drop: str = "", extra: str = "", more: dict[str, Any] | None = None
) -> None:
    config = tiny.config_of(made.folder)
    writer = gguf.GGUFWriter(path, kind)
    for key, value in (more or {}).items():
        add: dict[type, Any] = {
            str: writer.add_string,
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
        }
        add[type(value)](f"{kind}.{key}", value)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
    backwards = {value: key for key, value in (NAMES | LAYER_NAMES).items()}
    for name, tensor in load_file(made.folder / "model.safetensors").items():
        if name == drop:
            continue
        stem, leaf = name.rsplit(".", 1)
        layer = stem.removeprefix("model.layers.").split(".", 1) if stem.startswith("model.layers.") else None
        stored = f"blk.{layer[0]}.{backwards[layer[1]]}.{leaf}" if layer else f"{backwards[stem]}.{leaf}"
        values = tensor.numpy()
        projection = stem.rsplit(".", 1)[-1]
        if kind == "llama" and projection in HEADS:
            values = interleaved(values, HEADS[projection])
        writer.add_tensor(stored, np.ascontiguousarray(values))
    if extra:
        writer.add_tensor(extra, np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(("name", "kind"), [("llama_plain", "llama"), ("qwen2_plain", "qwen2"), ("qwen3", "qwen3")])
def test_a_gguf_file_loads_as_the_checkpoint_does(loaded: Load, tmp_path: Path, name: str, kind: str) -> None:
    made, model = loaded(name)
    path = tmp_path / "model.gguf"
    write(made, path, kind)
    read = load_model(path, dtype=torch.float32)
    ours, theirs = dict(model.slots()), dict(read.slots())
    assert ours.keys() == theirs.keys()
    for slot_name, slot in ours.items():
        assert torch.equal(slot.view, theirs[slot_name].view), slot_name
    for mine, other in zip(model.decoder.rotaries, read.decoder.rotaries, strict=True):
        torch.testing.assert_close(mine.frequencies_F, other.frequencies_F)
    assert model.spec.decoder.attention.head_dim == read.spec.decoder.attention.head_dim
    assert model.spec.decoder.tied_head == read.spec.decoder.tied_head


def test_missing_and_unexpected_tensors_are_named(loaded: Load, tmp_path: Path) -> None:
    made, _ = loaded("llama_plain")
    path = tmp_path / "model.gguf"
    write(made, path, "llama", drop="model.norm.weight", extra="rope_freqs.weight")
    with pytest.raises(ConfigError, match=r"1 missing: model\.norm\.weight; 1 unexpected: rope_freqs\.weight"):
        load_model(path, dtype=torch.float32)


def test_unsupported_files_are_refused(loaded: Load, tmp_path: Path) -> None:
    made, _ = loaded("llama_plain")
    path = tmp_path / "model.gguf"
    write(made, path, "mamba")
    with pytest.raises(ConfigError, match="architecture 'mamba' is not known; supported: llama"):
        load_model(path)
    path.write_bytes(b"GGUX" + bytes(100))
    with pytest.raises(ConfigError, match="cannot be read as GGUF"):
        load_model(path)
    with pytest.raises(ConfigError, match="is not a file"):
        load_model(tmp_path / "none.gguf")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scaling.type", "yarn"),
        ("rope.scaling.factor", 4.0),
        ("rope.scale_linear", 4.0),
        ("rope.dimension_count", 6),
        ("rope.freq_base_swa", 1000.0),
        ("attention.sliding_window", 4),
        ("attention.scale", 0.5),
        ("attention.value_length", 16),
        ("attention.causal", False),
        ("logit_scale", 0.5),
    ],
)
def test_metadata_that_would_change_the_answers_is_refused(loaded: Load, tmp_path: Path, key: str, value: Any) -> None:
    made, _ = loaded("llama_plain")
    write(made, tmp_path / "model.gguf", "llama", more={key: value})
    with pytest.raises(ConfigError, match=rf"llama\.{key} is {value!r}, which is not supported"):
        load_model(tmp_path / "model.gguf")


def test_metadata_without_effect_is_ignored(loaded: Load, tmp_path: Path) -> None:
    made, _ = loaded("llama_plain")
    neutral = {"rope.dimension_count": 12, "rope.scaling.type": "none", "rope.scaling.factor": 1.0, "logit_scale": 1.0}
    more = {"attention.causal": True, "rope.scaling.original_context_length": 64, "vocab_size": 120}
    write(made, tmp_path / "model.gguf", "llama", more=neutral | more)
    load_model(tmp_path / "model.gguf")


def test_missing_metadata_does_not_get_the_defaults_of_a_config_json(loaded: Load, tmp_path: Path) -> None:
    """Qwen3 without head_dim has heads of 128 in a config.json, and of width over heads in llama.cpp."""
    config = GGUFFile.open(_written(loaded, tmp_path, "llama_plain", "qwen3")).config()
    assert read_spec(config)[1].decoder.attention.head_dim == 12


def test_a_folder_with_one_gguf_file_loads_as_its_checkpoint(loaded: Load, tmp_path: Path) -> None:
    made, model = loaded("qwen3")
    _written(loaded, tmp_path, "qwen3", "qwen3")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_model(tmp_path, load_format="gguf")
    shutil.copy(made.folder / "config.json", tmp_path)
    read = load_model(tmp_path, load_format="gguf")
    assert read.spec == model.spec
    for (_, ours), (_, theirs) in zip(model.slots(), read.slots(), strict=True):
        assert torch.equal(ours.view, theirs.view)
    shutil.copy(tmp_path / "model.gguf", tmp_path / "other.gguf")
    with pytest.raises(ConfigError, match=r"has 2 \.gguf files; keep exactly one"):
        load_model(tmp_path, load_format="gguf")
    with pytest.raises(ConfigError, match=r"give the folder, with --load-format gguf"):
        find_folder(tmp_path / "model.gguf")


def _written(loaded: Load, folder: Path, name: str, kind: str) -> Path:
    write(loaded(name)[0], folder / "model.gguf", kind)
    return folder / "model.gguf"
