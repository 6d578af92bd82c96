"""A sample of `make accuracy`: real weights (MiniMind2, 24 MB) and questions, with graphs on, off and stale."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from saccade.eval.choices import KNOWLEDGE, ChoiceQuestion, read_choices
from saccade.eval.results import Answered
from tests.accuracy.checkpoints import checkpoint
from tests.accuracy.ways import NOISE, STALE, ask, check_same, check_stale

NUM_QUESTIONS = 12


@pytest.fixture(scope="module")
def choices() -> list[ChoiceQuestion]:
    return read_choices(KNOWLEDGE)[:NUM_QUESTIONS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("minimind2", tmp_path_factory.mktemp("minimind2"))


@pytest.fixture(scope="module")
def base(folder: Path, choices: list[ChoiceQuestion]) -> list[Answered]:
    with pytest.MonkeyPatch.context() as patched:
        return ask(folder, "off", choices, patched)


@pytest.mark.parametrize("way", ["full", "piecewise"])
def test_graphs_change_no_answer(
    way: str, folder: Path, choices: list[ChoiceQuestion], base: list[Answered], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_same(ask(folder, way, choices, monkeypatch), base)


def test_graphs_with_another_batchs_boundaries_are_noticed(
    folder: Path, choices: list[ChoiceQuestion], base: list[Answered], monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = ask(folder, STALE, choices, monkeypatch)
    check_stale(stale, base)
    with pytest.raises(AssertionError):
        check_same(stale, base)


def test_a_difference_beyond_noise_is_noticed(base: list[Answered]) -> None:
    first, *others = base
    moved = replace(first, scores=tuple(score - 2 * NOISE for score in first.scores))
    with pytest.raises(AssertionError, match=re.escape(first.question)):
        check_same([moved, *others], base)
    with pytest.raises(AssertionError):
        check_stale(base, base)
