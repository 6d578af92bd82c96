"""Answers to held-out questions are judged by their content."""

from collections import Counter

import numpy as np
import pytest
from PIL import Image

from saccade.errors import ConfigError
from saccade.eval import held_out
from saccade.eval.content import has_facts, is_refusal, things
from saccade.eval.drawing import COLORS, SHAPES
from saccade.eval.eval_settings import EvalSettings
from saccade.eval.evaluation import make_examples
from saccade.eval.examples import Example
from saccade.eval.held_out import MAKERS

REFUSALS = ("I do not know this picture.", "i do not know", "I don't know what this is.", "I cannot tell.")


def make(task: str, count: int) -> list[Example]:
    return make_examples(task, EvalSettings(task=task, limit=count))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a red circle", {("red", "circle"): 1}),
        (
            "A red circle, a blue square and a grey cross.",
            {("red", "circle"): 1, ("blue", "square"): 1, ("gray", "cross"): 1},
        ),
        ("2 red circles and one black oval", {("red", "circle"): 2, ("black", "oval"): 1}),
        ("a circle that is red", {("red", "circle"): 1}),
        ("a circle and a red square", {("red", "circle"): 1, ("", "square"): 1}),
        ("red and blue", {("red", ""): 1, ("blue", ""): 1}),
        ("a circle and a square", {("", "circle"): 1, ("", "square"): 1}),
        ("5 shapes", {}),
    ],
)
def test_things_are_read_from_an_answer(text: str, found: dict[tuple[str, str], int]) -> None:
    assert things(text) == Counter(found)


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("a red star on the left", True),
        ("It is a star. It lies left.", True),
        ("a red star", False),
        ("a red star on the right", False),
        ("a star on the left or right", False),
        ("a star or circle on the left", False),
        ("I do not know.", False),
    ],
)
def test_an_answer_needs_all_facts_and_no_others_of_their_kind(text: str, is_right: bool) -> None:
    assert has_facts(text, ("star", "left")) == is_right


def test_words_and_numbers_are_facts_too() -> None:
    assert has_facts("the word HOUSE in red", ("HOUSE", "red"))
    assert not has_facts("the word HORSE in red", ("HOUSE", "red"))
    assert has_facts("three red stars", ("3", "red")) and not has_facts("4 red stars", ("3", "red"))
    assert has_facts("the number 417 in gray", ("417", "gray")) and not has_facts("41 in gray", ("417", "gray"))


@pytest.mark.parametrize("text", REFUSALS)
def test_refusals_are_distinguished_from_answers(text: str) -> None:
    assert is_refusal(text)
    assert not any(map(is_refusal, ("a red circle", "the word KNOW", "I do not see a picture.", "not red", "")))


def test_a_description_needs_every_thing_of_the_scene_and_nothing_else() -> None:
    for example in make("describe", 30):
        parts = example.answer.split(", ")
        assert 1 <= len(parts) <= 3
        assert example.is_right(" and ".join(f"a {part}" for part in reversed(parts))), example
        color, shape = parts[0].split()
        other = next(name for name in COLORS if name != color)
        wrong = [f"a {other} {shape}", *parts[1:]], parts[1:], [*parts, f"a {color} {shape}"], [f"{len(parts)} shapes"]
        assert not any(example.is_right(", ".join(said)) for said in wrong), example


def test_two_questions_need_both_answers() -> None:
    seen = Counter[str]()
    for example in make("two-questions", 120):
        first, second = example.answer.split(", ")
        assert example.is_right(f"{first} {second}") and example.is_right(f"It is {second}, {first}.")
        assert not example.is_right(first) and not example.is_right(second)
        others = [f"{first} and {other}" for other in (*COLORS, "left", "right") if other not in (first, second)]
        assert not any(map(example.is_right, others)), example
        seen[("shape" if first in SHAPES else "number" if first.isdigit() else "word")] += 1
    assert min(seen.values()) > 8 and len(seen) == 3


@pytest.mark.parametrize("task", ["unknown-photos", "unknown-pictures"])
def test_only_a_refusal_is_right_about_an_unknown_picture(task: str) -> None:
    for example in make(task, 12):
        assert all(map(example.is_right, REFUSALS)) and not example.is_right("a red circle")
        [image] = example.media
        assert isinstance(image, Image.Image) and np.asarray(image).std() > 2
        assert min(image.size) >= 32 and max(image.size) <= 400


def test_a_refusal_is_wrong_about_a_known_picture() -> None:
    for example in make("known-pictures", 12):
        assert not any(map(example.is_right, REFUSALS)) and example.is_right("a red circle")
    asked = {example.question for example in make("known-pictures", 200)}
    assert {example.question for example in make("unknown-pictures", 200)} == asked, "the control asks the same"


def test_missing_photos_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out, "PHOTOS", (("saccade", ("no.jpg",)),))
    held_out._find_photos.cache_clear()
    try:
        with pytest.raises(ConfigError, match="needs the photos of scikit-learn or matplotlib"):
            make("unknown-photos", 1)
    finally:
        held_out._find_photos.cache_clear()


def test_every_held_out_task_can_be_asked_for_by_name() -> None:
    assert all(EvalSettings(task=name).tasks() == (name,) for name in MAKERS)
