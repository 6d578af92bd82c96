"""Tiny random checkpoints of every family, written by transformers, and the models that were written."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from tests.models import markers

IMAGE, VIDEO, START, END = markers.IMAGE, markers.VIDEO, markers.START, markers.END

_TEXT = {
    "vocab_size": 120,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_QWEN3_VISION = {
    "depth": 4,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 40,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
}
_QWEN2_VISION = {
    "depth": 4,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 40,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 48,
    "window_size": 16,
    "fullatt_block_indexes": [1, 3],
    "tokens_per_second": 2,
}
_QWEN2_VL_VISION = {
    "depth": 3,
    "embed_dim": 32,
    "hidden_size": 48,
    "mlp_ratio": 2,
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 4,
    "vision_use_head": False,
}
_GEMMA = _TEXT | {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "sliding_window": 5,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 24,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    },
}
# transformers uses only the second, and only in text models.
_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _mrope(sections: list[int], **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": sections} | more


def _qwen3_vl(text: Any, vision: Any, config: Any, model: Any, **more: Any) -> Any:
    rope = _mrope([3, 3, 2], mrope_interleaved=True)
    texts = text(**(_TEXT | {"head_dim": 16, "rope_parameters": rope} | more)).to_dict()
    tied = more.get("tie_word_embeddings", False)
    visions = vision(**_QWEN3_VISION).to_dict()
    return model(config(text_config=texts, vision_config=visions, tie_word_embeddings=tied, **_TOKENS))


def _qwen2_5_vl() -> Any:
    text = _TEXT | {"rope_parameters": _mrope([2, 2, 2])}
    config = hf.Qwen2_5_VLConfig(text_config=text, vision_config=_QWEN2_VISION, **_TOKENS)
    return hf.Qwen2_5_VLForConditionalGeneration(config)


def _qwen2_vl() -> Any:
    text = _TEXT | {"rope_parameters": _mrope([2, 2, 2])}
    config = hf.Qwen2VLConfig(text_config=text, vision_config=_QWEN2_VL_VISION, **_TOKENS)
    return hf.Qwen2VLForConditionalGeneration(config)


def _gemma3_vl() -> Any:
    tokens = {"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END}
    config = hf.Gemma3Config(text_config=_GEMMA | _CAPS, vision_config=_SIGLIP, mm_tokens_per_image=16, **tokens)
    return hf.Gemma3ForConditionalGeneration(config)


def _gemma3() -> Any:
    return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**_GEMMA, **_CAPS))


MAKERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_TEXT, rope_parameters=_LLAMA3, tie_word_embeddings=True)),
    "llama_bias": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(**(_TEXT | {"vocab_size": 121}), attention_bias=True, mlp_bias=True, head_dim=8)
    ),
    "qwen2": lambda: hf.Qwen2ForCausalLM(
        hf.Qwen2Config(**_TEXT, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    ),
    "llama_plain": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_TEXT, tie_word_embeddings=True)),
    "qwen2_plain": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_TEXT)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**_TEXT, head_dim=16, sliding_window=6)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_TEXT, head_dim=16)),
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**_TEXT, **_EXPERTS, head_dim=16, norm_topk_prob=False, mlp_only_layers=[1])
    ),
    "gemma3": _gemma3,
    "gemma3_vl": _gemma3_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen2_vl": _qwen2_vl,
    "qwen3_vl": lambda: _qwen3_vl(
        hf.Qwen3VLTextConfig, hf.Qwen3VLVisionConfig, hf.Qwen3VLConfig, hf.Qwen3VLForConditionalGeneration
    ),
    "qwen3_vl_moe": lambda: _qwen3_vl(
        hf.Qwen3VLMoeTextConfig,
        hf.Qwen3VLMoeVisionConfig,
        hf.Qwen3VLMoeConfig,
        hf.Qwen3VLMoeForConditionalGeneration,
        **_EXPERTS,
        tie_word_embeddings=True,
    ),
}
VARIANTS = ("llama_bias", "llama_plain", "qwen2_plain")
QWEN_VL = ("qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "qwen2_vl")  # images of any size, videos, M-RoPE
VISION = (*QWEN_VL, "gemma3_vl")
TEXT = tuple(name for name in MAKERS if name not in VISION)
FAMILIES = tuple(name for name in MAKERS if name not in VARIANTS)


@dataclass(frozen=True)
class Tiny:
    name: str
    oracle: Any
    folder: Path


def make(name: str, folder: Path, seed: int = 0) -> Tiny:
    """A model in which every parameter matters: those that transformers initialises to zero or one are changed."""
    torch.manual_seed(seed)
    model = MAKERS[name]().eval().float()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.add_(torch.randn_like(parameter) * scale)
    hf.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    return Tiny(name, model, folder)


def config_of(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values


def pixels(grids: list[tuple[int, int, int]], values: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = sum(t * h * w for t, h, w in grids)
    return torch.randn(rows, values, generator=generator)
