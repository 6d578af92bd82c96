"""What is run on the stand-in: models with the widths of Qwen3-VL-8B and few layers, on one kind of GPU each."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CAPABILITIES = ("8.0", "8.9", "9.0", "10.0", "12.0")
NUM_LAYERS = 4
TEXT = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rope_theta": 5e6,
    "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]},
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
VISION = {
    "hidden_size": 1152,
    "out_hidden_size": 4096,
    "depth": 4,
    "num_heads": 16,
    "intermediate_size": 4304,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [1, 2, 3],
}
MOE = {
    "model_type": "qwen3_vl_moe_text",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
BLOCKS = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
    "modules_to_not_convert": ["lm_head", "model.visual"],
}
SETTINGS = {
    "device": "cuda",
    "load_format": "dummy",
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "encoder_budget_tokens": 512,
    "encoder_cache_tokens": 2048,
    "kv_cache_tokens": 16384,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    capability: str
    dtype: str = "bfloat16"
    quantization: str = "auto"
    mm_encoder_quantization: str = "auto"
    has_blocks: bool = False  # the checkpoint is stored in FP8, with a scale for each 128 x 128 weights
    has_experts: bool = False

    def settings(self) -> dict[str, Any]:
        names = ("dtype", "quantization", "mm_encoder_quantization")
        return SETTINGS | {name: getattr(self, name) for name in names}


CASES = (
    Case(name="hopper", capability="9.0"),
    Case(name="hopper-fp8", capability="9.0", quantization="fp8", mm_encoder_quantization="fp8"),
    Case(name="ampere", capability="8.0"),
    Case(name="ada-fp8", capability="8.9", quantization="fp8"),
    Case(name="blackwell-blocks", capability="12.0", has_blocks=True),
    Case(name="hopper-moe", capability="9.0", has_experts=True),
)


def write_model(case: Case, folder: Path) -> None:
    """The bundled model's files but its weights, with another config.json."""
    from saccade import bundled

    for file in bundled.path().iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= TEXT
    config["vision_config"] |= VISION
    config["tie_word_embeddings"] = False
    if case.has_experts:
        config |= {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe"}
        config["text_config"] |= MOE
    if case.has_blocks:
        config["quantization_config"] = BLOCKS
    (folder / "config.json").write_text(json.dumps(config))
