"""Ranks in separate processes that each encode whole images."""

from typing import Any

import pytest

import saccade.bundled
from saccade import LLM, SamplingParams
from saccade.eval.eval_settings import EvalSettings
from saccade.eval.evaluation import make_examples
from tests.execution import rank_images, rank_images_of_four
from tests.ranks import run_cases

SIZES: dict[str, Any] = {
    "device": "cpu",
    "kv_cache_tokens": 2048,
    "encoder_cache_tokens": 512,
    "encoder_budget_tokens": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "max_model_len": 256,
    "verify": "off",
}


@pytest.fixture(scope="module")
def two() -> dict[str, str]:
    return run_cases(2, rank_images.__name__)


@pytest.mark.parametrize("case", list(rank_images.CASES))
def test_two_ranks_answer_like_one(two: dict[str, str], case: str) -> None:
    assert not two[case], two[case]


def test_four_ranks_answer_like_one() -> None:
    for found in run_cases(4, rank_images_of_four.__name__).values():
        assert not found, found


def test_the_bundled_model_runs_on_two_ranks_despite_its_five_vision_heads() -> None:
    """Orders go through the channel. The encoder mode is chosen automatically, because its heads cannot be split."""
    asked = [one.messages() for name in ("colors", "counts") for one in make_examples(name, EvalSettings(limit=3))]
    params, found = SamplingParams(temperature=0, max_tokens=8, logprobs=20), []
    for size in (1, 2):
        with LLM(saccade.bundled.path(), tensor_parallel_size=size, **SIZES) as llm:
            found.append([output.outputs[0] for output in llm.chat(asked, params, progress=False)])
            ranks, vision = llm._open.tensor_parallel, llm.executor.vision
            assert vision is not None and vision.graphs and not vision.stats.fallbacks
    for one, other in zip(*found, strict=True):
        assert (other.token_ids, other.text) == (one.token_ids, one.text) and one.logprobs
        for ours, theirs in zip(other.logprobs or (), one.logprobs or (), strict=True):
            shared = ours.keys() & theirs.keys()
            assert len(shared) >= 19 and all(abs(ours[t].logprob - theirs[t].logprob) < 1e-4 for t in shared)
    assert ranks.encoder_mode == "data" and "num_heads = 5 cannot be split evenly over 2 ranks" in ranks.encoder_reason
