"""Reads GGUF files of Llama-like models: metadata as a config.json, tensors dequantised and named as in Hugging Face.

llama.cpp interleaves the two halves of each query and key head of Llama models; this is undone here. Whatever these
tables do not cover is refused: this module refuses unknown metadata that changes attention or logits, and the strict
loader refuses unknown tensors, such as the scaled frequencies of Llama 3.1 and later.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.errors import ConfigError
from saccade.models.model_config import Config

# What llama.cpp calls an architecture, and those whose heads it interleaves.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
INTERLEAVED = ("llama",)

# GGUF key without the architecture's prefix -> config.json key.
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

# Keys that change attention or logits, with the values that have no effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scale_linear": (0.0, 1.0),
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
}

# Keys that have no effect without a scaling.
SILENT = ("rope.scaling.original_context_length", "rope.scaling.finetuned")

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
            raise ConfigError(f"{path} is not a file; give the path of a .gguf file, or a folder that holds one")
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise ConfigError(f"{path} needs the gguf package: pip install 'saccade-vlm[gguf]'") from error

        class StrictReader(GGUFReader):
            """The package's reader treats data beyond the end of the file as empty. It would loop over an array of any
            claimed length and allocate memory for each element."""

            def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
                if offset + int(count) * np.dtype(dtype).itemsize > len(self.data):
                    raise ValueError("it ends too early")
                return super()._get(offset, dtype, count, override_order)

        with _readable(path):
            return cls(path, StrictReader(path))

    @property
    def where(self) -> str:
        return str(self.path)

    @property
    def total_bytes(self) -> int:
        """Bytes after dequantisation to float32."""
        return sum(4 * int(tensor.n_elements) for tensor in self.reader.tensors)

    def config(self) -> Config:
        with _readable(self.path):
            return self._read_config()

    def _read_config(self) -> Config:
        kind = self._kind()
        # Missing keys are null rather than absent: llama.cpp's defaults differ from those for a config.json.
        values = {key: self._field(f"{kind}.{name}") for name, key in KEYS.items()}
        values |= {
            "architectures": [ARCHITECTURES[kind]],
            "hidden_act": "silu",
            "vocab_size": int(self._shape("token_embd.weight")[0]),
            "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in self.reader.tensors),
        }
        config = Config(values, self.where)
        self._refuse_unknown(kind, config)
        return config

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        from gguf import dequantize

        is_interleaved = self._kind() in INTERLEAVED
        heads = {"attn_q": self.config().need("num_attention_heads", int)}
        heads |= {"attn_k": self.config().get("num_key_value_heads", heads["attn_q"])}
        for stored in self.reader.tensors:
            with _readable(self.path):
                values = dequantize(stored.data, stored.tensor_type)
                values = values.reshape([int(n) for n in reversed(stored.shape)]).astype(np.float32)
                name, part = _rename(stored.name)
                if is_interleaved and part in heads:
                    values = _halves(values, heads[part])
            yield name, torch.from_numpy(np.ascontiguousarray(values))

    def _refuse_unknown(self, kind: str, config: Config) -> None:
        """Refuses metadata that would change attention or logits in a way that is not supported."""
        width, num_heads = config.need("hidden_size", int), config.need("num_attention_heads", int)
        head_dim = config.get("head_dim", width // num_heads)
        neutral = NEUTRAL | dict.fromkeys(("rope.dimension_count", "attention.value_length"), (head_dim,))
        for field in self.reader.fields:
            name = str(field).removeprefix(f"{kind}.")
            if name == field or name in KEYS or name in SILENT:
                continue
            is_felt = name.startswith(("rope.", "attention.")) or name.endswith("scale")
            value, allowed = self._field(field), neutral.get(name, ())
            if is_felt and value not in allowed:
                only = f"; allowed: {' or '.join(map(repr, allowed))}" if allowed else ""
                raise ConfigError(
                    f"{self.path}: {field} is {value!r}, which is not supported{only}; "
                    f"use the checkpoint with .safetensors weights"
                )

    def _kind(self) -> str:
        kind = str(self._field("general.architecture"))
        if kind not in ARCHITECTURES:
            raise ConfigError(f"{self.path}: architecture {kind!r} is not known; supported: {', '.join(ARCHITECTURES)}")
        return kind

    def _field(self, name: str) -> Any:
        field = self.reader.get_field(name)
        return None if field is None else field.contents()

    def _shape(self, name: str) -> tuple[int, ...]:
        for tensor in self.reader.tensors:
            if tensor.name == name:
                return tuple(int(n) for n in reversed(tensor.shape))
        raise ConfigError(f"{self.path} has no tensor {name}; download it again")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns the package's errors about a broken file into a ConfigError that names the file."""
    try:
        yield
    except (ValueError, OSError, LookupError, ArithmeticError, TypeError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{path} cannot be read as GGUF ({error}); download it again") from error


def _rename(stored: str) -> tuple[str, str]:
    """The Hugging Face name, and llama.cpp's name of the part that the tensor belongs to."""
    stem, _, leaf = stored.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{leaf}", stem
    pieces = stem.split(".")
    if len(pieces) == 3 and pieces[0] == "blk" and pieces[2] in LAYER_NAMES:
        return f"model.layers.{pieces[1]}.{LAYER_NAMES[pieces[2]]}.{leaf}", pieces[2]
    return stored, stem


def _halves(rows: Any, num_heads: int) -> Any:
    """Undoes the interleaving of each head's rows: pairs (0, 1), (2, 3), ... back to halves."""
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
