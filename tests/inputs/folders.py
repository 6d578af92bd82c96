"""Writes tiny checkpoint folders: settings files, and freshly trained tokenizers with the real special tokens."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from saccade.models.registry import MODEL_TYPES

DATA = Path(__file__).parent.parent / "data"

QWEN_SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
QWEN_TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GEMMA_SPECIALS = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
GEMMA_IMAGE = ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]
LLAMA_SPECIALS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]

CORPUS = [
    "The quick brown fox jumps over the lazy dog. What is in this picture? Describe the image in detail.",
    "user assistant system model You are a helpful assistant. <0.3 seconds> <1.5 seconds> seconds\n\n\n\n",
    "def f(x):\n    return {'a': [1, 2, 3], \"b\": x ** 2}  # a comment\n",
    "Zażółć gęślą jaźń, naïve café, 图片里有什么? これは何ですか 🙂🎉 <b>bold</b> | a | b |>",
] * 3


def train_byte_level(specials: list[str], tags: list[str]) -> Tokenizer:
    """A byte-level BPE like Qwen's: added tokens follow the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in specials])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in tags])
    return tokenizer


def train_sentencepiece_like() -> Tokenizer:
    """A BPE with byte fallback like Gemma's: special tokens are part of the vocabulary."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    specials = [*GEMMA_SPECIALS, *GEMMA_IMAGE]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[*specials, *fallback], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    definition = json.loads(tokenizer.to_str())
    definition["added_tokens"] = [token for token in definition["added_tokens"] if token["content"] in specials]
    tokenizer = Tokenizer.from_str(json.dumps(definition))
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in ("\n\n", "\n\n\n")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
    )
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer, files: dict[str, dict[str, Any]], template: str | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    if template is not None:
        (folder / "chat_template.jinja").write_text((DATA / template).read_text())
    return folder


def write_qwen(folder: Path, model_type: str = "qwen3_vl") -> Path:
    """The settings of real checkpoints, with small pixel budgets."""
    tokenizer = train_byte_level(QWEN_SPECIALS, QWEN_TAGS)
    token_ids = {
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
    }
    named = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "add_bos_token": False}
    files: dict[str, dict[str, Any]] = {
        "tokenizer_config.json": {**named, "tokenizer_class": "Qwen2Tokenizer", "model_max_length": 4096}
    }
    if model_type in ("qwen2_vl", "qwen2_5_vl"):
        times = {"tokens_per_second": 2} if model_type == "qwen2_5_vl" else {}
        vision = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, **times}
        files["preprocessor_config.json"] = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 64, "patch_size": 14}
        template = "inputs_qwen2_5_vl.jinja"
    else:
        vision = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
        half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 16}
        files["preprocessor_config.json"] = {"size": {"shortest_edge": 64 * 64, "longest_edge": 256 * 256}, **half}
        video_size = {"shortest_edge": 64 * 64, "longest_edge": 8 * 128 * 128}
        files["video_preprocessor_config.json"] = {"size": video_size, **half}
        template = "inputs_qwen3_vl.jinja"
    text = {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128}
    parts = {"text_config": text, "vision_config": vision}
    files["config.json"] = {
        "architectures": [MODEL_TYPES[model_type].architecture],
        "model_type": model_type,
        **parts,
        **token_ids,
    }
    return write_folder(folder, tokenizer, files, template)


def write_gemma(folder: Path) -> Path:
    tokenizer = train_sentencepiece_like()
    image = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    named = {"bos_token": "<bos>", "eos_token": "<end_of_turn>", "pad_token": "<pad>", "unk_token": "<unk>"}
    files: dict[str, dict[str, Any]] = {
        "tokenizer_config.json": {
            **named,
            **image,
            "add_bos_token": True,
            "extra_special_tokens": image,
            "tokenizer_class": "GemmaTokenizer",
        },
        "preprocessor_config.json": {
            "size": {"height": 56, "width": 56},
            "resample": 2,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "do_pan_and_scan": None,
        },
        "config.json": {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "mm_tokens_per_image": 4,
            "image_token_index": tokenizer.token_to_id("<image_soft_token>"),
            "boi_token_index": tokenizer.token_to_id("<start_of_image>"),
            "eoi_token_index": tokenizer.token_to_id("<end_of_image>"),
            "vision_config": {"patch_size": 14, "image_size": 56},
        },
    }
    return write_folder(folder, tokenizer, files, "inputs_gemma3.jinja")


def write_text_model(folder: Path, template: str, *, model_type: str = "qwen3") -> Path:
    tokenizer = train_byte_level([*QWEN_SPECIALS, *LLAMA_SPECIALS], QWEN_TAGS)
    files: dict[str, dict[str, Any]] = {
        "config.json": {"model_type": model_type},
        "tokenizer_config.json": {
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|im_end|>",
            "add_bos_token": False,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    }
    return write_folder(folder, tokenizer, files, template)
