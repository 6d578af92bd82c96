"""GGUF files of Llama-like models: their metadata as a config.json, their tensors dequantised and renamed.

llama.cpp stores queries and keys of Llama models with the two halves of a head interleaved, which is undone here, so
that what comes out is what a Hugging Face checkpoint holds. Whatever a file has beyond these tables is refused by the
strict loader: a tensor of scaled frequencies (Llama 3.1 and later), for one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.errors import ConfigError
from saccade.models.config import Config


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one architecture of llama.cpp is written."""

    architecture: str
    is_interleaved: bool = False


DIALECTS = {
    "llama": Dialect("LlamaForCausalLM", is_interleaved=True),
    "qwen2": Dialect("Qwen2ForCausalLM"),
    "qwen3": Dialect("Qwen3ForCausalLM"),
}

# GGUF key (after the architecture) -> config.json key.
KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class GGUFFile:
    path: Path
    reader: Any

    @classmethod
    def open(cls, path: Path) -> "GGUFFile":
        if not path.is_file():
            raise ConfigError(f"{path} is not a file; give the path of a .gguf file")
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise ConfigError(f"{path} needs the gguf package: pip install 'saccade[gguf]'") from error
        try:
            return cls(path, GGUFReader(path))
        except (ValueError, OSError) as error:
            raise ConfigError(f"{path} cannot be read as GGUF ({error}); download it again") from error

    @property
    def where(self) -> str:
        return str(self.path)

    @property
    def total_bytes(self) -> int:
        """Bytes after dequantisation to float32."""
        return sum(4 * int(tensor.n_elements) for tensor in self.reader.tensors)

    def config(self) -> Config:
        kind, dialect = self._dialect()
        values = {key: self._field(f"{kind}.{name}") for name, key in KEYS.items()}
        values |= {
            "architectures": [dialect.architecture],
            "hidden_act": "silu",
            "vocab_size": int(self._shape("token_embd.weight")[0]),
            "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in self.reader.tensors),
        }
        return Config({key: value for key, value in values.items() if value is not None}, self.where)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        from gguf import dequantize

        _, dialect = self._dialect()
        heads = {"attn_q": self.config().need("num_attention_heads", int)}
        heads |= {"attn_k": self.config().get("num_key_value_heads", heads["attn_q"])}
        for stored in self.reader.tensors:
            values = dequantize(stored.data, stored.tensor_type)
            values = values.reshape([int(n) for n in reversed(stored.shape)]).astype(np.float32)
            name, kind = _rename(stored.name)
            if dialect.is_interleaved and kind in heads:
                values = _halves(values, heads[kind])
            yield name, torch.from_numpy(np.ascontiguousarray(values))

    def _dialect(self) -> tuple[str, Dialect]:
        kind = str(self._field("general.architecture"))
        if kind not in DIALECTS:
            raise ConfigError(f"{self.path}: architecture {kind!r} is not known; supported: {', '.join(DIALECTS)}")
        return kind, DIALECTS[kind]

    def _field(self, name: str) -> Any:
        field = self.reader.get_field(name)
        return None if field is None else field.contents()

    def _shape(self, name: str) -> tuple[int, ...]:
        for tensor in self.reader.tensors:
            if tensor.name == name:
                return tuple(int(n) for n in reversed(tensor.shape))
        raise ConfigError(f"{self.path} has no tensor {name}; download it again")


def _rename(stored: str) -> tuple[str, str]:
    """The name in a Hugging Face checkpoint, and the part of the model the tensor belongs to."""
    stem, _, leaf = stored.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{leaf}", stem
    pieces = stem.split(".")
    if len(pieces) == 3 and pieces[0] == "blk" and pieces[2] in LAYER_NAMES:
        return f"model.layers.{pieces[1]}.{LAYER_NAMES[pieces[2]]}.{leaf}", pieces[2]
    return stored, stem


def _halves(rows: Any, num_heads: int) -> Any:
    """Rows of each head from pairs (0, 1), (2, 3), ... back to halves."""
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
