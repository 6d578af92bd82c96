"""What a config.json may leave to its architecture: the defaults that transformers fills in, as plain data.

One table per family, for the model and for what prepares its inputs, so that both read the same numbers. Nothing
here needs torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Table = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """`text` stands at the top of a text model's config, and of one that is written flat; `aliases` maps other names
    of a key to the name that is read."""

    text: Table
    vision: Table = field(default_factory=dict)
    top: Table = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    def complete(self, config: Table) -> dict[str, Any]:
        """A config with everything it leaves out. An explicit null stays: it says that there is none."""
        whole = dict(self.top) | self._renamed(config)
        if not isinstance(whole.get("text_config"), dict):
            whole = dict(self.text) | whole
        for key, table in (("text_config", self.text), ("vision_config", self.vision)):
            if isinstance(whole.get(key), dict):
                whole[key] = dict(table) | self._renamed(whole[key])
        return whole

    def _renamed(self, given: Table) -> dict[str, Any]:
        others = {self.aliases[key]: value for key, value in given.items() if key in self.aliases}
        return others | {key: value for key, value in given.items() if key not in self.aliases}


_QWEN = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
}
_SLIDING = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_MOE = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "decoder_sparse_step": 1,
}
_GEMMA = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_SIGLIP = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_QWEN_TOKENS = {
    "image_token_id": 151_655,
    "video_token_id": 151_656,
    "vision_start_token_id": 151_652,
    "vision_end_token_id": 151_653,
}
_QWEN3_VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_QWEN2_5_VISION = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "tokens_per_second": 4,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}

LLAMA = Defaults(
    text={
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    }
)
QWEN2 = Defaults(text=_QWEN | _SLIDING)
QWEN3 = Defaults(text=_QWEN | _SLIDING | {"head_dim": 128})
QWEN3_MOE = Defaults(
    text=_MOE
    | {
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
    },
    aliases={"num_local_experts": "num_experts"},
)
QWEN2_5_VL = Defaults(
    text={
        "vocab_size": 152_064,
        "hidden_size": 8192,
        "intermediate_size": 29_568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-5,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 80,
    },
    vision=_QWEN2_5_VISION,
    top=_QWEN_TOKENS,
)
QWEN3_VL = Defaults(
    text=_QWEN | {"head_dim": 128, "max_position_embeddings": 128_000}, vision=_QWEN3_VISION, top=_QWEN_TOKENS
)
QWEN3_VL_MOE = Defaults(
    text=_MOE
    | {
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 128_000,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 4,
        "num_experts": 60,
    },
    vision=_QWEN3_VISION,
    top=_QWEN_TOKENS,
    aliases={"num_local_experts": "num_experts"},
)
GEMMA3_TEXT = Defaults(text=_GEMMA)
GEMMA3 = Defaults(
    text=_GEMMA,
    vision=_SIGLIP,
    top={
        "mm_tokens_per_image": 256,
        "boi_token_index": 255_999,
        "eoi_token_index": 256_000,
        "image_token_index": 262_144,
        "tie_word_embeddings": True,
    },
    aliases={
        "image_token_id": "image_token_index",
        "boi_token_id": "boi_token_index",
        "eoi_token_id": "eoi_token_index",
    },
)
