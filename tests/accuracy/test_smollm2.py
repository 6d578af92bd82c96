"""Real weights through the engine: SmolLM2-135M as Llama, and grafted as Qwen2 and as Qwen2.5-VL text.

Golden tokens were made by other code (transformers, float32); only questions whose answer does not hang on rounding
are asked. Takes some minutes: `make accuracy` runs it.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from saccade import LLM, SamplingParams
from saccade.eval.choices import Choice, read_choices, score_choices
from saccade.inputs.tokenizer import Tokenizer
from tests.models.test_smollm2 import CACHE, DATA, folder, gguf, golden

__all__ = ["folder", "gguf", "golden"]

FAMILIES = ("llama", "qwen2", "qwen2_5_vl")
WAYS = {
    "full": "prefill=full,decode=full",
    "piecewise": "prefill=piecewise,decode=piecewise",
    "off": "prefill=off,decode=off",
}
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "kv_cache_tokens": 1024,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "encoder_budget_tokens": 16,
    "encoder_cache_tokens": 64,
}
PROMPT = "Question: {input}\nAnswer:"
NUM_CHOICES = 12


@pytest.fixture(scope="module")
def checkpoints(gguf: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights as three families, each a folder with links to one file."""
    tokenizer = _tokenizer(gguf)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    biases = {
        name.replace(".weight", ".bias"): torch.zeros(tensor.shape[0])
        for name, tensor in tensors.items()
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    }
    made = {}
    for family in FAMILIES:
        made[family] = tmp_path_factory.mktemp(family)
        extra = {} if family == "llama" else biases | (_eye(config) if family == "qwen2_5_vl" else {})
        _write(made[family], folder, _config(family, config), extra, tokenizer)
    return made


def _tokenizer(gguf: Path) -> Path:
    """Converted once; other processes may be at it, too."""
    kept = CACHE / "tokenizer-1.json"
    if not kept.is_file():
        tokenizer = hf.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        part = kept.with_suffix(f".{os.getpid()}")
        part.write_text(tokenizer.backend_tokenizer.to_str())
        part.replace(kept)
    return kept


def _write(target: Path, source: Path, config: dict[str, Any], extra: dict[str, Any], tokenizer: Path) -> None:
    (target / "config.json").write_text(json.dumps(config))
    weights = "model-00001-of-00002.safetensors" if extra else "model.safetensors"
    for name, path in ((weights, source / "model.safetensors"), ("tokenizer.json", tokenizer)):
        (target / name).symlink_to(path)
    (target / "tokenizer_config.json").write_text('{"add_bos_token": false, "eos_token": "<|im_end|>"}')
    (target / "generation_config.json").write_text('{"eos_token_id": 2}')
    (target / "preprocessor_config.json").write_text('{"patch_size": 4, "min_pixels": 64, "max_pixels": 1024}')
    if extra:
        save_file(extra, target / "model-00002-of-00002.safetensors", {"format": "pt"})


def _config(family: str, config: dict[str, Any]) -> dict[str, Any]:
    if family == "llama":
        return config
    if family == "qwen2":
        return config | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "text_config": config | {"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}},
        "vision_config": EYE | {"out_hidden_size": config["hidden_size"]},
        "tie_word_embeddings": True,
        "image_token_id": 4,
        "video_token_id": 5,
        "vision_start_token_id": 6,
        "vision_end_token_id": 7,
    }


EYE = {
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


def _eye(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A random tower: text must not notice it."""
    torch.manual_seed(0)
    vision = EYE | {"out_hidden_size": config["hidden_size"]}
    shell = hf.Qwen2_5_VLConfig(vision_config=vision, text_config={"num_hidden_layers": 0, "vocab_size": 8})
    visual = hf.Qwen2_5_VLForConditionalGeneration(shell).model.visual.state_dict()
    return {f"model.visual.{name}": value.contiguous() for name, value in visual.items()}


@pytest.fixture(scope="module")
def choices() -> list[Choice]:
    return read_choices(DATA / "eval_general_knowledge.json")[:NUM_CHOICES]


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path], choices: list[Choice]) -> list[list[float]]:
    """Log-likelihoods by transformers, one choice at a time."""
    oracle = hf.LlamaForCausalLM.from_pretrained(checkpoints["llama"], dtype=torch.float32).eval()
    encode = Tokenizer.from_folder(checkpoints["llama"]).encode
    found = []
    for choice in choices:
        context = PROMPT.replace("{input}", choice.question)
        rows = [encode(f"{context} {text}") for text in choice.choices]
        found.append([_score(oracle, row, len(encode(context))) for row in rows])
    return found


@torch.no_grad()
def _score(oracle: Any, ids: list[int], start: int) -> float:
    scores = oracle(torch.tensor([ids])).logits[0].log_softmax(-1)
    return sum(float(scores[i - 1, ids[i]]) for i in range(start, len(ids)))


@pytest.mark.parametrize(
    ("family", "way"),
    [("llama", "full"), ("llama", "piecewise"), ("llama", "off"), ("qwen2", "full"), ("qwen2_5_vl", "full")],
)
def test_golden_tokens_come_out_and_picks_are_those_of_transformers(
    checkpoints: dict[str, Path],
    golden: list[tuple[list[int], list[int]]],
    choices: list[Choice],
    expected: list[list[float]],
    family: str,
    way: str,
) -> None:
    assert len(golden) >= 8
    params = [SamplingParams(temperature=0, max_tokens=len(tokens), ignore_eos=True) for _, tokens in golden]
    with LLM(checkpoints[family], **SETTINGS, graphs=WAYS[way]) as llm:
        outputs = llm.generate([prompt for prompt, _ in golden], params, progress=False)
        found = score_choices(llm, choices, PROMPT, progress=False)
    assert [output.outputs[0].token_ids for output in outputs] == [tokens for _, tokens in golden]
    for choice, ours, theirs in zip(choices, found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=5e-3), choice.question
        assert ours.index(max(ours)) == theirs.index(max(theirs)), choice.question
