"""Real weights through the engine: SmolLM2-135M as Llama, and grafted as Qwen2 and as Qwen2.5-VL text.

Golden tokens come from transformers in float32, for questions whose answers do not depend on rounding. Takes some
minutes: `make accuracy` runs it.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from saccade import LLM, SamplingParams
from saccade.eval.choices import ChoiceQuestion, read_choices, score_choices
from saccade.inputs.text.tokenizer import Tokenizer
from tests.accuracy.checkpoints import checkpoint
from tests.models.test_smollm2 import DATA, golden

__all__ = ["golden"]

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
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights as three families."""
    return {family: checkpoint(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


@pytest.fixture(scope="module")
def choices() -> list[ChoiceQuestion]:
    return read_choices(DATA / "eval_general_knowledge.json")[:NUM_CHOICES]


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path], choices: list[ChoiceQuestion]) -> list[list[float]]:
    """Log-likelihoods from transformers, one choice at a time."""
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
def test_golden_tokens_and_picks_match_transformers(
    checkpoints: dict[str, Path],
    golden: list[tuple[list[int], list[int]]],
    choices: list[ChoiceQuestion],
    expected: list[list[float]],
    family: str,
    way: str,
) -> None:
    assert len(golden) >= 8
    params = [SamplingParams(temperature=0, max_tokens=len(tokens), ignore_eos=True) for _, tokens in golden]
    with LLM(checkpoints[family], **SETTINGS, graphs=WAYS[way]) as llm:
        outputs = llm.generate([prompt for prompt, _ in golden], params, progress=False)
        found = score_choices(llm, choices, PROMPT)
    assert [output.outputs[0].token_ids for output in outputs] == [tokens for _, tokens in golden]
    for choice, ours, theirs in zip(choices, found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=5e-3), choice.question
        assert ours.index(max(ours)) == theirs.index(max(theirs)), choice.question
