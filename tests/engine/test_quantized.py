"""FP8 weights in the engine: graphs match eager runs, and scales are watched like weights."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from saccade.config import Mode
from saccade.execution.verification import check_graphs
from saccade.models.quantization import Quantize
from saccade.models.vlm import Model
from saccade.models.weights import load_model
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.update import FinishReason
from tests.engine.conftest import Loaded
from tests.engine.rig import Options, build, executor_of, random_prompt, run
from tests.models import tiny

Load = Callable[[str], Loaded]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
FP8 = Quantize(language="fp8", vision="fp8")


def rounded(made: tiny.Tiny) -> Model:
    return load_model(made.folder, dtype=torch.float32, quantize=FP8)


@pytest.mark.parametrize("mode", [Mode.FULL, Mode.PIECEWISE])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_moe"])
def test_graphs_match_eager_runs(loaded: Load, family: str, mode: Mode) -> None:
    made, _ = loaded(family)
    engine = build(rounded(made), made.folder, Options(mode=mode, strict=True))
    report = check_graphs(executor_of(engine))
    assert report.is_right and len(report.rows) > 4
    rng = np.random.default_rng(1)
    prompts = {str(i): random_prompt(made, rng, num_images=i % 2 if family == "qwen3_vl" else 0) for i in range(4)}
    answers = run(engine, prompts, GREEDY)
    assert {answer.finish.reason for answer in answers.values()} == {FinishReason.LENGTH}


def test_replaced_scales_are_noticed(loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = loaded("qwen3")
    model = rounded(made)
    engine = build(model, made.folder, Options(mode=Mode.FULL, strict=True))
    mlp: Any = model.decoder.layers[1].mlp
    assert mlp.down.weight.scales is not None
    monkeypatch.setattr(mlp.down, "weight", replace(mlp.down.weight, scales=mlp.down.weight.scales.clone()))
    rng = np.random.default_rng(2)
    answers = run(engine, {"a": random_prompt(made, rng)}, GREEDY)
    assert all("layers.1.mlp.down.weight" in answer.finish.detail for answer in answers.values())
