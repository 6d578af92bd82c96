"""GGUF files written here from tiny checkpoints read back as the checkpoints do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from saccade.errors import ConfigError
from saccade.models.gguf import LAYER_NAMES, NAMES
from saccade.models.weights import load_model
from tests.models import tiny
from tests.models.conftest import Loaded

Load = Callable[[str], Loaded]
HEADS = {"q_proj": 4, "k_proj": 2}


def interleaved(rows: Any, num_heads: int) -> Any:
    """As llama.cpp's converter does it: the halves of each head become pairs."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write(made: tiny.Tiny, path: Path, kind: str, *, drop: str = "", extra: str = "") -> None:
    config = tiny.config_of(made.folder)
    writer = gguf.GGUFWriter(path, kind)
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


def test_files_that_are_not_for_us_are_refused(loaded: Load, tmp_path: Path) -> None:
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
