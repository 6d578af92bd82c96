"""What the held-out tasks of `saccade eval` ask is never asked in training."""

import re
from functools import cache

import pytest

from saccade.eval.eval_settings import EvalSettings
from saccade.eval.evaluation import make_examples
from saccade.eval.held_out import MAKERS
from training.language import HINTS, QUESTIONS, SLOTS, wordings

_SLOT = re.compile(r"\\\{([a-z]+)\d?\\\}")


@cache
def templates() -> re.Pattern[str]:
    """Matches every question that training can ask."""

    def values(match: re.Match[str]) -> str:
        names = SLOTS.get(match[1], ("[a-z]+",))
        return "(?:" + "|".join(map(re.escape, names) if match[1] in SLOTS else names) + ")"

    texts = [_SLOT.sub(values, re.escape(text)) for kind in QUESTIONS for text in wordings(kind)]
    hints = "|".join(map(re.escape, HINTS))
    return re.compile(f"(?:{'|'.join(texts)})(?:{hints})")


@pytest.mark.parametrize("task", sorted(MAKERS))
def test_no_template_of_training_makes_a_held_out_question(task: str) -> None:
    for example in make_examples(task, EvalSettings(task=task, limit=150)):
        spelled = (example.question, example.question[0].lower() + example.question[1:].rstrip("?.!"))
        assert not any(map(templates().fullmatch, spelled)), example.question


@pytest.mark.parametrize("task", ["shapes", "colors", "counts", "positions", "presence"])
def test_the_other_tasks_ask_what_training_asks(task: str) -> None:
    asked = {example.question for example in make_examples(task, EvalSettings(task=task, limit=40))}
    assert all(map(templates().fullmatch, asked)), [text for text in asked if not templates().fullmatch(text)]
