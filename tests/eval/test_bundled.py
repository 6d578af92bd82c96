"""The model that ships with Saccade answers questions about pictures, and wrong replays show in its answers.

Floors are about three points, plus the noise of so few questions, below what `saccade eval` measured (see the model
card). The code that draws the pictures shares nothing with training.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import saccade.bundled
from saccade import LLM, SamplingParams
from saccade.eval.drawing import SHAPES, Thing, draw_things
from saccade.eval.eval_settings import EvalSettings
from saccade.eval.evaluation import make_examples
from saccade.eval.examples import Example, normalise
from saccade.layers.vision import Merger

FLOORS = {
    "shapes": 0.91,
    "colors": 0.91,
    "counts": 0.78,
    "positions": 0.92,
    "words": 0.92,
    "sklearn-digits": 0.8,
    "mnist": 0.92,
}

SIZES: dict[str, Any] = {
    "device": "cpu",
    "kv_cache_tokens": 4096,
    "encoder_cache_tokens": 2048,
    "encoder_budget_tokens": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "max_model_len": 256,
}
FULL = "vision=full,prefill=full,decode=full"
PIECEWISE = "vision=full,prefill=piecewise,decode=piecewise"
OFF = "vision=off,prefill=off,decode=off"
PICTURES = Path(__file__).parents[2] / "examples" / "pictures"
DIGITS = Path(__file__).parents[1] / "data" / "eval_mnist_digits.png"


def mnist_digits() -> list[Example]:
    """Ten test digits of each kind. Row r of the sheet has the digit r (MNIST, CC BY-SA 3.0)."""
    sheet = np.asarray(Image.open(DIGITS))
    cells = [(row, column) for row in range(10) for column in range(10)]
    return [
        Example("What digit is this?", str(r), (Image.fromarray(sheet[r * 28 : r * 28 + 28, c * 28 : c * 28 + 28]),))
        for r, c in cells
    ]


def questions() -> dict[str, list[Example]]:
    tasks = {"shapes": 12, "colors": 12, "counts": 14, "positions": 14, "words": 14, "sklearn-digits": 20}
    found = {name: make_examples(name, EvalSettings(task=name, limit=count, seed=5)) for name, count in tasks.items()}
    return found | {"mnist": mnist_digits()[::4]}


def answers(llm: LLM, examples: Sequence[Example]) -> list[str]:
    outputs = llm.chat([e.messages() for e in examples], SamplingParams(temperature=0, max_tokens=10), progress=False)
    return [normalise(output.outputs[0].text) for output in outputs]


def share_right(examples: Sequence[Example], said: Sequence[str]) -> float:
    return sum(text == normalise(e.answer) for e, text in zip(examples, said, strict=True)) / len(examples)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(saccade.bundled.path(), **SIZES, graphs=FULL) as opened:
        yield opened


@pytest.fixture(scope="module")
def asked() -> dict[str, list[Example]]:
    return questions()


@pytest.fixture(scope="module")
def said(llm: LLM, asked: dict[str, list[Example]]) -> dict[str, list[str]]:
    return {name: answers(llm, examples) for name, examples in asked.items()}


def test_the_checkpoint_is_small_and_loads_like_any_other(llm: LLM) -> None:
    folder = saccade.bundled.path()
    assert sum(file.stat().st_size for file in folder.iterdir()) < 25e6
    assert llm.processor.images is not None and llm.processor.videos is not None
    assert llm.executor.state.model.spec.decoder.deepstack_levels == 3


@pytest.mark.parametrize("task", list(FLOORS))
def test_answers_are_right(task: str, asked: dict[str, list[Example]], said: dict[str, list[str]]) -> None:
    wrong = [
        (e.question, e.answer, s) for e, s in zip(asked[task], said[task], strict=True) if s != normalise(e.answer)
    ]
    assert share_right(asked[task], said[task]) >= FLOORS[task], wrong


@pytest.mark.parametrize(
    ("picture", "question", "answer"),
    [
        ("digit.png", "What digit is this?", "7"),
        ("shapes.png", "How many circles are there?", "2"),
        ("heart.png", "What color is the heart?", "purple"),
        ("word.png", "What does it say?", "HELLO"),
        ("shapes.png", "How many circles are there, and what color are they?", "2 blue circles"),
        ("heart.png", "What shape is it, and what color?", "a purple heart"),
        ("heart.png", "Describe this image.", "a purple heart"),
        ("word.png", "What does it say, and in what color?", "the word HELLO in blue"),
        ("shapes.png", "Describe this image.", "a red star, a blue circle and a blue circle"),
        ("hills.png", "Describe this image.", "I do not know this picture."),
    ],
)
def test_questions_about_the_example_pictures_are_answered(llm: LLM, picture: str, question: str, answer: str) -> None:
    image = {"type": "image", "image": PICTURES / picture}
    talk = [{"role": "user", "content": [image, {"type": "text", "text": question}]}]
    [output] = llm.chat(talk, SamplingParams(temperature=0, max_tokens=20), progress=False)
    assert output.outputs[0].text == answer


@pytest.mark.parametrize("graphs", [PIECEWISE, OFF])
def test_answers_do_not_depend_on_graphs(
    graphs: str, asked: dict[str, list[Example]], said: dict[str, list[str]]
) -> None:
    """The same requests come in the same order, so every pass has the same padded shape and the same bits."""
    with LLM(saccade.bundled.path(), **SIZES, graphs=graphs) as other:
        for name, examples in asked.items():
            assert answers(other, examples) == said[name], name


def test_deepstack_rows_are_needed(llm: LLM, asked: dict[str, list[Example]], said: dict[str, list[str]]) -> None:
    """Without them many answers are wrong, most of all about counts."""
    tower = llm.executor.state.model.tower
    assert tower is not None
    mergers = [merger for merger in tower.deepstack if isinstance(merger, Merger)]
    parts = [part for merger in mergers for part in (merger.mlp.down.weight.data, merger.mlp.down.bias)]
    weights = [part for part in parts if part is not None]
    assert len(weights) == 6
    kept = [weight.clone() for weight in weights]
    examples = [*asked["counts"], *asked["colors"]]
    before = share_right(examples, [*said["counts"], *said["colors"]])
    try:
        for weight in weights:
            weight.zero_()
        changed = [Example(e.question, e.answer, tuple(_moved(image) for image in e.media)) for e in examples]
        after = share_right(changed, answers(llm, changed))
    finally:
        for weight, value in zip(weights, kept, strict=True):
            weight.copy_(value)
    assert after < before - 0.15, (before, after)


def _moved(image: Any) -> Image.Image:
    """The picture with one pixel changed, so that no cache has it."""
    pixels = np.array(image.convert("RGB"))
    pixels[0, 0, 0] ^= 1
    return Image.fromarray(pixels)


def pairs(seed: int, sizes: tuple[tuple[int, int], tuple[int, int]], count: int) -> list[Example]:
    """Questions about the lower part of the first of two pictures, which share a vision pass."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        names = random.permutation(SHAPES)[:2].tolist()
        images = tuple(
            draw_things(random, [Thing(name, "red", 0.5, 0.77, 0.2)], "white", size)
            for name, size in zip(names, sizes, strict=True)
        )
        found.append(Example("What shape is in the first picture?", names[0], images))
    return found


EQUAL_HALVES = ((256, 128), (128, 256))
UNEQUAL = ((256, 192), (128, 128))
"""Both have 64 rows in two images: 32 + 32, and 48 + 16."""


@pytest.fixture(scope="module")
def never_enlarged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, set to leave small pictures as they are, so that they keep their number of rows."""
    folder = tmp_path_factory.mktemp("model")
    for path in saccade.bundled.path().iterdir():
        (folder / path.name).symlink_to(path)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    settings["size"]["shortest_edge"] = 16 * 32 * 32
    (folder / "preprocessor_config.json").unlink()
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def share_with_exact_graphs(folder: Path, *, is_stale: bool) -> float:
    """First a graph of the layout 32 + 32 is captured while idle. Then come pictures of 48 + 16 rows, one request at a
    time. The first of them has no graph yet, or if `is_stale` replays the one that exists."""
    with LLM(folder, **SIZES, graphs="vision=exact,prefill=off,decode=off") as llm:
        encoder = llm.executor.encoder
        assert encoder is not None
        for example in pairs(1, EQUAL_HALVES, 4):
            answers(llm, [example])
        assert len(encoder.graphs.catalogue.exact.graphs) == 1
        examples = pairs(2, UNEQUAL, 20)
        replays = encoder.graphs.stats.replays.total()
        said = answers(llm, examples[:1])
        assert (encoder.graphs.stats.replays.total() > replays) == is_stale
        said += [answers(llm, [example])[0] for example in examples[1:]]
    return share_right(examples, said)


def test_a_stale_replay_shows_in_the_answers(monkeypatch: pytest.MonkeyPatch, never_enlarged: Path) -> None:
    """Without the boundaries in its key, the graph of two equal halves is replayed for unequal ones."""
    right = share_with_exact_graphs(never_enlarged, is_stale=False)
    monkeypatch.setattr("saccade.choice.catalogue.structure_digest", lambda structure: "the same for all")
    stale = share_with_exact_graphs(never_enlarged, is_stale=True)
    assert right >= 0.85 and stale < right - 0.2, (right, stale)
