"""Accuracy of each family on a real multiple-choice benchmark, with real weights, in four ways of running.

Takes about 17 minutes on two cores: `make accuracy` runs it and prints the table.
"""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from saccade.eval.choices import KNOWLEDGE, ChoiceQuestion, per_character, pick, read_choices
from saccade.eval.results import Answered, wilson
from saccade.inputs.text.tokenizer import Tokenizer
from tests.accuracy.checkpoints import FAMILIES, checkpoint
from tests.accuracy.ways import NOISE, PROMPT, STALE, ask, changed, check_same, check_stale, gaps

Record = Callable[[str, object], None]
STALE_QUESTIONS = 100
"""Fewer are enough to show that stale graphs are wrong."""


@pytest.fixture(scope="module")
def choices() -> list[ChoiceQuestion]:
    return read_choices(KNOWLEDGE)


@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in FAMILIES])
def test_graphs_change_no_answer_but_stale_graphs_do(
    family: str,
    choices: list[ChoiceQuestion],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Record,
) -> None:
    folder = checkpoint(family, tmp_path)
    base = ask(folder, "off", choices, monkeypatch)
    record_property("accuracy", row(family, "off", choices, base, base))
    for way in ("full", "piecewise"):
        answers = ask(folder, way, choices, monkeypatch)
        record_property("accuracy", row(family, way, choices, answers, base))
        check_same(answers, base)
    few = ask(folder, STALE, choices[:STALE_QUESTIONS], monkeypatch)
    record_property("accuracy", row(family, STALE, choices, few, base))
    check_stale(few, base[: len(few)])


def row(
    family: str, way: str, choices: Sequence[ChoiceQuestion], answers: Sequence[Answered], base: Sequence[Answered]
) -> list[str]:
    """A row of the table printed at the end."""
    by_length = [pick(choice, per_character(choice, a.scores)) for choice, a in zip(choices, answers, strict=False)]
    worst = gaps(answers, base[: len(answers)])
    others = changed(answers, base[: len(answers)])
    return [
        *(family, way, str(len(answers)), _share(answers), _share(by_length)),
        *(f"{max(worst):.2g}", f"{statistics.median(worst):.2g}", str(len(others))),
    ]


def _share(answers: Sequence[Answered]) -> str:
    right = sum(answer.is_right for answer in answers)
    low, high = wilson(right, len(answers))
    return f"{right / len(answers):.1%} ({100 * low:.1f}-{100 * high:.1f})"


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ("gemma3", "minimind2")],
)
def test_scores_match_transformers(
    family: str, choices: list[ChoiceQuestion], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For families whose weights are converted here. test_smollm2.py has SmolLM2's."""
    few = choices[:4]
    folder = checkpoint(family, tmp_path)
    found = ask(folder, "full", few, monkeypatch)
    encode = Tokenizer.from_folder(folder).encode
    oracle = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for choice, answer in zip(few, found, strict=True):
        context = PROMPT.replace("{input}", choice.question)
        start = len(encode(context, has_bos=True))
        expected = [oracle_score(oracle, encode(f"{context} {text}", has_bos=True), start) for text in choice.choices]
        assert answer.scores == pytest.approx(expected, abs=NOISE), choice.question


@torch.no_grad()
def oracle_score(oracle: Any, ids: list[int], start: int) -> float:
    scores = oracle(torch.tensor([ids])).logits[0].log_softmax(-1)
    return sum(float(scores[i - 1, ids[i]]) for i in range(start, len(ids)))
