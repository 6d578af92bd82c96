"""The bundled checkpoint is an ordinary one: transformers computes the same log-probabilities for its prompts."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import saccade.bundled
from saccade import LLM, SamplingParams
from saccade.eval.eval_settings import EvalSettings
from saccade.eval.evaluation import make_examples
from saccade.inputs.placeholders import Prompt
from saccade.kernels.reference_images import resize_patchify
from tests.eval.test_bundled import SIZES

TASKS = ("shapes", "words", "pairs", "motion", "text")


def oracle_inputs(llm: LLM, prompt: Prompt) -> dict[str, Any]:
    """A prompt as transformers takes it, with pixels prepared by the reference."""
    processor = llm.processor
    ids = prompt.token_ids.astype(np.int64)
    image_id, video_id = (processor.tokenizer.token_id(f"<|{kind}_pad|>") for kind in ("image", "video"))
    kinds = (ids == image_id) + 2 * (ids == video_id)
    inputs: dict[str, Any] = {
        "input_ids": torch.from_numpy(ids)[None],
        "mm_token_type_ids": torch.from_numpy(kinds.astype(np.int64))[None],
    }
    if not prompt.media:
        return inputs
    settings = processor.images
    assert settings is not None
    patches = [
        resize_patchify(torch.from_numpy(m.pixels.copy()), m.plan.size_hw, replace(settings, resample="bicubic"))
        for m in prompt.media
    ]
    suffix, name = ("_videos", "video") if prompt.media[0].kind == "video" else ("", "image")
    grids = torch.tensor([m.plan.grid_thw for m in prompt.media])
    return {**inputs, f"pixel_values{suffix}": torch.cat(patches), f"{name}_grid_thw": grids}


@torch.no_grad()
@pytest.mark.parametrize("graphs", ["", "vision=off,prefill=off,decode=off"])
def test_log_probabilities_match_transformers(graphs: str) -> None:
    hf.utils.logging.disable_progress_bar()
    oracle = hf.Qwen3VLForConditionalGeneration.from_pretrained(saccade.bundled.path(), dtype=torch.float32).eval()
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0, ignore_eos=True)
    with LLM(saccade.bundled.path(), **SIZES, graphs=graphs) as llm:
        for task in TASKS:
            example = make_examples(task, EvalSettings(task=task, limit=2, seed=3))[1]
            inputs = oracle_inputs(llm, llm.processor.chat(example.messages()))
            (output,) = llm.chat(example.messages(), params, progress=False)
            scores = oracle(**inputs).logits[0].log_softmax(-1)
            ids = output.prompt_token_ids
            assert output.prompt_logprobs is not None
            ours = [
                known[token].logprob for token, known in zip(ids[1:], output.prompt_logprobs[1:], strict=True) if known
            ]
            theirs = scores[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
            assert ours == pytest.approx(theirs, abs=1e-3, rel=1e-4), task
            greedy = oracle.generate(
                **inputs, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True
            )
            assert output.outputs[0].token_ids == greedy[0, len(ids) :].tolist(), task
