"""Asks the same questions with graphs full, piecewise and off, and with graphs that are stale on purpose."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from saccade import LLM
from saccade.eval.choices import ChoiceQuestion, pick, score_choices
from saccade.eval.results import Answered
from tests.engine.test_frozen_inputs import freezing

PROMPT = "Question: {input}\nAnswer:"
FROZEN = "query_start"
"""Where requests begin in a step. Freezing it at capture is the bug of sglang#16902: another batch's boundaries."""

GRAPHS = {
    "full": "vision=off,prefill=full,decode=full",
    "piecewise": "vision=off,prefill=piecewise,decode=piecewise",
    "off": "vision=off,prefill=off,decode=off",
}
STALE = "stale"
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "block_size": 4,
    "kv_cache_tokens": 4096,
    "max_model_len": 128,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "encoder_budget_tokens": 16,
    "encoder_cache_tokens": 64,
    "graphs_strict": True,
}
NOISE = 5e-3
"""In a summed log-likelihood. All graphs run the same shapes, but piecewise ones have other temporaries."""


def ask(
    folder: Path, way: str, choices: Sequence[ChoiceQuestion], monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> list[Answered]:
    """The answers of a checkpoint. With graphs on, a step that is not a replay is an error."""
    with monkeypatch.context() as patched:
        if way == STALE:
            patched.setattr(sys.modules["saccade.graphs.capture"], "Frame", freezing(FROZEN))
        llm = LLM(folder, **SETTINGS | settings, graphs=GRAPHS["full" if way == STALE else way])
    with llm:
        return [pick(*scored) for scored in zip(choices, score_choices(llm, choices, PROMPT), strict=True)]


def gaps(answers: Sequence[Answered], base: Sequence[Answered]) -> list[float]:
    """The largest difference between the scores of each question."""
    return [ours.off_by(theirs) for ours, theirs in zip(answers, base, strict=True)]


def changed(answers: Sequence[Answered], base: Sequence[Answered]) -> list[int]:
    """The questions whose answers differ."""
    return [i for i, (ours, theirs) in enumerate(zip(answers, base, strict=True)) if ours.said != theirs.said]


def check_same(answers: Sequence[Answered], base: Sequence[Answered]) -> None:
    """Scores differ by no more than noise, and answers only where the two best choices are that close."""
    worst = gaps(answers, base)
    assert max(worst) < NOISE, base[worst.index(max(worst))].question
    for index in changed(answers, base):
        best, second = sorted(base[index].scores, reverse=True)[:2]
        assert best - second < 2 * NOISE, base[index].question


def check_stale(answers: Sequence[Answered], base: Sequence[Answered]) -> None:
    """Most scores are off by far more than noise, so nobody could mistake them for the right ones."""
    assert sum(gap > 100 * NOISE for gap in gaps(answers, base)) > len(base) / 2
    assert changed(answers, base)
