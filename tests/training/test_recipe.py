"""Pictures show what their facts say, and conversations are what the tokenizer would make of their text."""

import math
import random
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training.conftest import Class
from training import papers, photos
from training.backdrops import CONTRAST, _jpeg, photograph
from training.batches import GRIDS, Emphasis, order
from training.checkpoint import MAX_UNITS, MIN_UNITS
from training.dialogue import KINDS, REPLIES, VALUES, Turn
from training.drafts import LONGER, TOLD, TOLD_OF_TWO
from training.language import COLORS, LETTERS, QUESTIONS, SHAPES, wordings
from training.marks import FIRST_DIGIT, FIRST_LETTER, GROUND, NOTHING, Guide, mark
from training.model import patchify
from training.other_questions import ask_digit_pair, ask_pair, ask_strange
from training.questions import ask_digits, ask_script, ask_shapes
from training.scenes import GAP, Script, Shapes, _fitted
from training.sheet import conversation, pictures, write_sheet
from training.strange import strange
from training.two_parts import TWO_PARTS
from training.vocabulary import SPECIALS

KINDS_OF_BATCH = [("pictures", (4, 5)), ("pairs", (3, 4)), ("videos", (4, 4)), ("texts", (1, 1))]


def test_the_vocabulary_has_qwens_special_tokens_and_reads_anything(school: Class) -> None:
    tokenizer = school.tokenizer
    assert tokenizer.get_vocab_size() == 1024
    for text in SPECIALS:
        assert tokenizer.encode(text, add_special_tokens=False).ids == [tokenizer.token_to_id(text)]
    for text in ("What color is it?", "Zażółć 图片 🙂\n\n\t x", LETTERS + LETTERS.lower(), "3 + 14 = 17"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert len(tokenizer.encode("QUICK").ids) == 5, "words in capitals are spelled"
    for name in SHAPES + COLORS:
        assert len(tokenizer.encode(name).ids) <= 2


@pytest.mark.parametrize(("name", "grid"), KINDS_OF_BATCH)
def test_joined_fragments_are_the_ids_of_their_text(school: Class, name: str, grid: tuple[int, int]) -> None:
    torch.manual_seed(1)
    batch = getattr(school.recipe, name)(grid, 24)
    for i in range(24):
        last = int(batch.rows[i].max()) + 1
        keep = torch.ones(batch.ids.shape[1], dtype=torch.bool)
        if batch.patches is not None:
            keep[batch.places[i].view(batch.patches.shape[1], -1)[:, 1:].flatten()] = False
        ids = batch.ids[i][: last + 1][keep[: last + 1]].tolist()
        text = school.tokenizer.decode(ids, skip_special_tokens=False)
        assert school.tokenizer.encode(text, add_special_tokens=False).ids == ids, text


def conversations(school: Class, name: str, grid: tuple[int, int], count: int) -> list[str]:
    batch = getattr(school.recipe, name)(grid, count)
    return [school.tokenizer.decode(row, skip_special_tokens=False) for row in batch.ids.tolist()]


def test_targets_are_the_tokens_behind_their_rows_and_end_every_answer(school: Class) -> None:
    torch.manual_seed(2)
    batch = school.recipe.pictures((4, 4), 24)
    end = school.tokenizer.token_to_id("<|im_end|>")
    for i in range(24):
        known = batch.targets[i] >= 0
        assert torch.equal(batch.ids[i][batch.rows[i][known] + 1], batch.targets[i][known])
        assert 1 <= batch.targets[i].tolist().count(end) <= 4, "as many answers as questions"


def names(turns: list[Turn], i: int) -> list[str]:
    return [KINDS[int(turn.kind[i])] for turn in turns if turn.given[i]]


def test_later_questions_are_new_and_not_told_by_earlier_ones(school: Class) -> None:
    torch.manual_seed(10)
    facts = school.studio.arrange(1500, 160, 160, torch.ones(1500, 3))
    turns = ask_shapes(facts, 5, turns=4)
    alike = [facts.shape[i, : int(facts.present[i].sum())].tolist() for i in range(1500)]
    lengths = set()
    for i in range(1500):
        asked = names(turns, i)
        lengths.add(len(asked))
        rich = sum(alike[i].count(shape) == 1 for shape in alike[i]) > 2
        for k, kind in enumerate(asked):
            for before in asked[:k]:
                assert kind != before and kind not in TOLD.get(before, ()), asked
                assert rich or kind not in TOLD_OF_TWO.get(before, ()), asked
    assert 4 in lengths and 0 not in lengths


def spelled(characters: Tensor, length: int) -> Script:
    num = len(characters)
    nowhere = torch.zeros(characters.shape)
    return Script(characters, torch.full((num,), length), torch.zeros(num).long(), nowhere, nowhere)


def test_a_sample_with_nothing_left_to_ask_ends(school: Class) -> None:
    torch.manual_seed(11)
    digits = spelled(torch.randint(0, 10, (400, 3)), 1)
    turns = ask_digits(digits, 5, turns=4)
    given = torch.stack([turn.given for turn in turns], 1).long()
    assert bool(given[:, 0].all()) and 0 < int(given[:, 1].sum()) < 400
    assert bool((given.diff(dim=1) <= 0).all()), "no turn behind one that is left out"
    later = [kind for i in range(400) for kind in names(turns, i)[1:]]
    assert later.count("unknown") < 30, "refusals fill no conversation"
    batch = school.recipe.pictures((4, 4), 48)
    for ids, targets in zip(batch.ids.tolist(), batch.targets, strict=True):
        text = school.tokenizer.decode(ids, skip_special_tokens=False)
        answers = int((targets == school.tokenizer.token_to_id("<|im_end|>")).sum())
        assert text.count("<|im_start|>user") == text.count("<|im_start|>assistant") == answers


def test_the_first_question_is_asked_as_if_there_were_no_others(school: Class) -> None:
    torch.manual_seed(12)
    facts = school.studio.arrange(6000, 160, 160, torch.ones(6000, 3))
    alone, first = (
        torch.bincount(ask_shapes(facts, 5, turns=num)[0].kind, minlength=len(KINDS)) / 6000 for num in (1, 4)
    )
    assert float((alone - first).abs().max()) < 0.025


def test_blocks_are_coded_by_rows_and_columns(school: Class) -> None:
    torch.manual_seed(18)
    canvas = torch.rand(2, 3, 16, 24)
    k = torch.arange(8.0)
    waves = torch.cos((2 * k[None] + 1) * k[:, None] * math.pi / 16) * 0.5
    waves[0] *= math.sqrt(0.5)
    torch.manual_seed(13)
    found = _jpeg(canvas.clone())
    torch.manual_seed(13)
    coarse = torch.rand(2, 1, 1, 1, 1)
    for sample in range(2):
        steps = (1 + k[:, None] + k[None]) * 0.02 * float(coarse[sample]) + 1e-3
        block = canvas[sample, 1, 8:16, 16:24]
        in_steps = (waves @ block @ waves.T) / steps
        assert bool((in_steps.frac().abs() - 0.5).abs().min() > 2e-3), "none lies between two: another seed, please"
        coded = in_steps.round() * steps
        expected = (waves.T @ coded @ waves).clamp(0, 1)
        torch.testing.assert_close(found[sample, 1, 8:16, 16:24], expected, atol=1e-5, rtol=0)


def test_two_questions_at_once_get_two_answers(school: Class) -> None:
    torch.manual_seed(14)
    facts = school.studio.arrange(1500, 96, 96, torch.ones(1500, 3))
    [turn] = ask_shapes(facts, 5)
    seen = set()
    for i in range(1500):
        kind, reply = KINDS[int(turn.kind[i])], REPLIES[int(turn.reply[i])]
        told = dict(zip(VALUES, turn.values[i].tolist(), strict=True))
        shown = [(int(facts.shape[i, k]), int(facts.color[i, k])) for k in range(int(facts.present[i].sum()))]
        if kind == "shape and color":
            assert reply == "one" and shown == [(told["shape"], told["color"])]
        elif kind == "colors of two":
            assert reply == "two colors"
            assert {(told["shape"], told["color"]), (told["shape1"], told["color1"])} <= set(shown)
        elif kind == "counts of two":
            found = [sum(shape == told[name] for shape, _ in shown) for name in ("shape", "shape1")]
            assert reply == "two counts" and found == [told["number"], told["number1"]]
        elif kind == "count and name":
            named = [(told[f"shape{k or ''}"], told[f"color{k or ''}"]) for k in range(len(shown))]
            assert sorted(named) == sorted(shown) and told["number"] == len(shown)
        elif kind == "count and color":
            asked = [color for shape, color in shown if shape == told["shape"]]
            assert asked == [told["color"]] * told["number"]
            assert reply == ("counted things" if len(asked) > 1 else "counted thing")
        elif kind == "thing at":
            assert reply == "one" and (told["shape"], told["color"]) in shown
        elif kind.startswith(("shape and ", "color and ")):
            place = [shape for shape, _ in shown].index(told["shape"])
            across, down = facts.x[i, place] > 48, facts.y[i, place] > 48
            assert told["edge"] == (int(across) if kind.endswith("side") else 2 + int(down))
            assert kind.startswith("shape") or told["color"] == shown[place][1]
        else:
            continue
        seen.add(kind)
    assert seen == set(TWO_PARTS) - {"digit and color", "word and color"}


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("shape and color", "shape", "color"),
        ("digit and color", "digit", "color"),
        ("word and color", "word", "color"),
        ("count and color", "how many", "color"),
        ("shape and side", "shape", "left or"),
        ("color and height", "color", "top or"),
    ],
)
def test_two_parts_are_asked_in_either_order(kind: str, first: str, second: str) -> None:
    texts = [text.casefold() for text in QUESTIONS[kind]]
    orders = [text.index(first) < text.index(second) for text in texts if first in text and second in text]
    assert orders.count(True) > 3 and orders.count(False) > 3


def test_two_pictures_are_described_one_after_the_other(school: Class) -> None:
    torch.manual_seed(16)
    first, second = (school.studio.arrange(800, 96, 96, torch.ones(800, 3)) for _ in range(2))
    [turn] = ask_pair(first, second, 5)
    replies = set()
    for i in torch.nonzero(turn.kind == KINDS.index("describe pair")).flatten().tolist():
        told = dict(zip(VALUES, turn.values[i].tolist(), strict=True))
        num = [int(part.present[i].sum()) for part in (first, second)]
        reply = " and ".join("one" if n == 1 else "many" for n in num).replace("one and one", "two")
        assert REPLIES[int(turn.reply[i])] == reply and [told["number"], told["number1"]] == num
        assert [told["shape"], told["shape1"]] == [int(part.shape[i, 0]) for part in (first, second)]
        replies.add(reply)
    assert replies >= {"many and many", "one and many", "many and one"}


def test_pictures_of_nothing_known_fill_their_frame_and_are_said_to_be_unknown(school: Class) -> None:
    torch.manual_seed(15)
    made = strange(44, 64, 96, school.studio.bank.glyphs_FGSS)
    assert made.shape == (44, 3, 64, 96) and float(made.min()) >= 0 and float(made.max()) <= 1
    assert int((made.flatten(1).std(1) > 0.02).sum()) >= 38, "only empty ones are plain"
    assert len({round(float(one.mean()), 4) for one in made}) > 30
    [turn] = ask_strange(400, 5, torch.device("cpu"))
    replies = {REPLIES[reply] for reply in turn.reply.tolist()}
    assert replies == {"strange", "unknown"} and {KINDS[kind] for kind in turn.kind.tolist()} >= {"describe", "shape"}
    assert sum("I do not know this picture." in text for text in conversations(school, "pictures", (4, 4), 120)) >= 3


def test_every_kind_of_strange_picture_has_its_share_of_small_batches(
    school: Class, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: Counter[str] = Counter()

    def draw(name: str, batch: int, height: int, width: int, device: torch.device, **_: Tensor) -> Tensor:
        drawn[name] += batch
        return torch.zeros(batch, 3, height, width, device=device)

    kinds = [(photos, name) for name in ("foliage", "clouds", "landscapes", "portraits", "pebbles")]
    kinds += [(papers, name) for name in ("pages", "screens", "plots", "doodles", "empty", "cloths", "tangles")]
    for module, name in kinds:
        monkeypatch.setattr(module, name, partial(draw, name))
    random.seed(1)
    for _ in range(400):
        assert strange(3, 32, 32, school.studio.bank.glyphs_FGSS).shape == (3, 3, 32, 32)
    share = 400 * 3 / 13
    assert 1.5 * share < drawn.pop("foliage") < 2.5 * share
    assert len(drawn) == 11 and all(0.6 * share < num < 1.4 * share for num in drawn.values()), drawn


def test_sums_are_right(school: Class) -> None:
    torch.manual_seed(3)
    found = 0
    for text in conversations(school, "texts", (1, 1), 400):
        for a, sign, b, result in re.findall(r"(\d+) ([+-]) (\d+)\D*?assistant\n(\d+)<", text):
            assert int(result) == (int(a) + int(b) if sign == "+" else int(a) - int(b)), text
            found += 1
    assert found > 40


def shares(found: Shapes, canvas: Tensor, index: int, k: int) -> float:
    """How much of a small square in the center of a shape has its color."""
    x, y = int(found.x[index, k]), int(found.y[index, k])
    patch = canvas[index, :, y - 1 : y + 2, x - 1 : x + 2]
    return float((patch - found.rgb[index, k, :, None, None]).abs().amax(0).lt(0.25).float().mean())


def test_shapes_lie_where_the_facts_say_and_do_not_touch(school: Class) -> None:
    torch.manual_seed(4)
    canvas, facts = school.studio.shapes(60, 160, 192)
    solid = [SHAPES.index(name) for name in ("circle",)]
    seen = 0
    for i in range(60):
        num = int(facts.present[i].sum())
        assert 1 <= num <= 7
        x, y, r = (values[i, :num] for values in (facts.x, facts.y, facts.radius))
        assert bool(((x > r) & (x < 192 - r) & (y > r) & (y < 160 - r)).all())
        apart = torch.hypot(x[:, None] - x, y[:, None] - y) + torch.eye(num) * 1e6
        assert bool((apart * 1.001 >= GAP * 0.95 * (r[:, None] + r)).all()) or float(r.min()) < 6
        for k in range(num):
            if int(facts.shape[i, k]) in solid:
                assert shares(facts, canvas, i, k) > 0.8
                seen += 1
    assert seen > 5


def test_colors_stand_out(school: Class) -> None:
    torch.manual_seed(5)
    behind = torch.rand(200, 3)
    names, shades = school.studio.palette.pick(behind, 3)
    apart = (shades - behind[:, None]).norm(dim=-1)
    assert float((apart >= CONTRAST).float().mean()) > 0.98
    assert names.min() >= 0 and names.max() < len(COLORS)


def test_words_fill_no_more_than_the_picture(school: Class) -> None:
    torch.manual_seed(6)
    canvas, script, is_number = school.studio.script(40, 96, 256)
    assert canvas.shape == (40, 3, 96, 256)
    assert bool(((script.characters < 26).sum(1)[~is_number] == script.length[~is_number]).all())
    assert bool(((script.characters < 10).sum(1)[is_number] >= script.length[is_number]).all())
    contrast = canvas.flatten(2).amax(-1) - canvas.flatten(2).amin(-1)
    assert bool((contrast.amax(1) > 0.15).all()), "something is written on each"


def test_fitted_strokes_fill_the_height_of_their_frame_and_stand_in_its_middle() -> None:
    fields = torch.zeros(3, 28, 28)
    fields[0, 5:23, 3:7] = fields[1, 2:10, 20:24] = fields[2, 10:26, 8:24] = 1
    wide = torch.tensor([1.0, 1.0, 1.4])
    found = _fitted(fields, wide)
    for i, (height, width) in enumerate(((18, 4), (8, 4), (16, 16))):
        rows, columns = found[i].amax(1) > 0.4, found[i].amax(0) > 0.4
        assert bool(rows.all())
        assert abs(int(columns.sum()) - 32 * width / (height * float(wide[i]))) <= 1.5
        assert abs(float(torch.nonzero(columns).float().mean()) - 15.5) <= 1


def test_photographs_are_bytes_between_minus_one_and_one(school: Class) -> None:
    torch.manual_seed(7)
    photos = photograph(torch.rand(16, 3, 64, 96), 0.5)
    levels = (photos + 1) * 127.5
    assert float((levels - levels.round()).abs().max()) < 1e-3
    assert float(photos.min()) >= -1 and float(photos.max()) <= 1


def test_a_video_moves_the_way_that_is_told(school: Class) -> None:
    torch.manual_seed(8)
    frames, facts, way, growth = school.studio.video(60, 128, 128)
    for i in torch.nonzero((growth < 0) & (facts.present.sum(1) == 1)).flatten().tolist()[:20]:
        still = (frames[i, 1] - frames[i, 0]).abs().sum(0)
        before, after = (
            ((frames[i, f] - facts.rgb[i, 0, :, None, None]).abs().sum(0) < 0.2) & (still > 0.1) for f in (0, 1)
        )
        if not before.any() or not after.any():
            continue
        (y0, x0), (y1, x1) = (np.nonzero(part.numpy()) for part in (before, after))
        dx, dy = x1.mean() - x0.mean(), y1.mean() - y0.mean()
        told = int(way[i])
        assert (dx < 0, dx > 0, dy < 0, dy > 0)[told], (told, dx, dy)


def test_every_kind_of_question_is_asked_and_every_size_is_served(school: Class) -> None:
    torch.manual_seed(9)
    facts = school.studio.arrange(3000, 128, 160, torch.ones(3000, 3))
    turns = [ask_shapes(facts, 5)[0].kind]
    turns += [getattr(school.recipe, name)((2, 3), 100).kind for name in ("pictures", "pairs", "videos", "texts")]
    turns += [school.recipe.texts((1, 1), 500).kind]
    single = [spelled(torch.randint(0, 10, (50, 1)), 1) for _ in range(2)]
    turns += [ask_digit_pair(single[0], single[1], 5)[0].kind]
    word = spelled(torch.randint(0, 26, (300, 7)), 7)
    turns += [ask_script(word, torch.zeros(300, dtype=torch.bool), 5)[0].kind]
    turns += [ask_digits(spelled(torch.randint(0, 10, (300, 3)), num), 5)[0].kind for num in (1, 3)]
    asked = {KINDS[kind] for turn in turns for kind in turn.flatten().tolist()}
    assert asked == set(QUESTIONS)
    assert all(len(list(wordings(kind))) >= 2 for kind in QUESTIONS)
    assert all(MIN_UNITS <= rows * columns <= MAX_UNITS for rows, columns in GRIDS)


def test_marks_lie_on_the_rows_of_things(school: Class) -> None:
    torch.manual_seed(5)
    batch = school.recipe.pictures((6, 8), 200)
    marks = batch.marks
    is_thing = (marks.names != NOTHING) & (marks.names != GROUND)
    column, row = marks.units % 8, marks.units // 8
    assert ((marks.x * 8).floor()[is_thing] == column[is_thing]).all()
    assert ((marks.y * 6).floor()[is_thing] == row[is_thing]).all()
    taken = [set(units[there].tolist()) for units, there in zip(marks.units, is_thing, strict=True)]
    assert all(len(rows) == int(there.sum()) for rows, there in zip(taken, is_thing, strict=True)), "one thing a row"
    assert is_thing.sum() > 300 and (marks.names == GROUND).sum() > 100
    assert {int(name) for name in marks.names[is_thing]} >= {0, 9, FIRST_LETTER, FIRST_DIGIT}


def test_a_guide_learns_from_marked_rows_alone(school: Class) -> None:
    torch.manual_seed(6)
    rows, guide = torch.randn(3, 12, 8, requires_grad=True), Guide(8)
    names = torch.tensor([[4, NOTHING], [GROUND, NOTHING], [NOTHING, NOTHING]])
    marks = mark(
        names, torch.zeros_like(names), torch.tensor([[40.0, 0]] * 3), torch.tensor([[70.0, 0]] * 3), (96, 128)
    )
    guide(rows, marks).backward()
    assert rows.grad is not None
    touched = rows.grad.abs().sum(-1) > 0
    assert touched.nonzero().tolist() == [[0, 2 * 4 + 1], [1, 2 * 4 + 1]]


def test_things_are_counted_as_often_as_is_asked_for(school: Class) -> None:
    def share(counting: float) -> float:
        torch.manual_seed(8)
        facts = school.studio.arrange(600, 96, 128, torch.ones(600, 3))
        [turn] = ask_shapes(facts, 5, counting=counting)
        return float(sum(KINDS[kind].startswith("count") for kind in turn.kind.tolist()) / 600)

    assert share(3.0) > 1.5 * share(1.0) > 0.1


def test_two_things_are_asked_and_pictures_described_as_often_as_is_asked_for(school: Class) -> None:
    def share(longer: float) -> float:
        torch.manual_seed(8)
        facts = school.studio.arrange(600, 96, 128, torch.ones(600, 3))
        [turn] = ask_shapes(facts, 5, longer=longer)
        return float(sum(KINDS[kind] in LONGER for kind in turn.kind.tolist()) / 600)

    assert share(3.0) > 1.5 * share(1.0) > 0.1


def test_emphasis_says_how_many_pictures_are_strange_and_how_often_each_is_asked_about(school: Class) -> None:
    torch.manual_seed(18)
    recipe = replace(school.recipe, emphasis=Emphasis(strange=0.5, turns=2))
    ids = recipe.pictures((4, 4), 40).ids
    texts = [school.tokenizer.decode(row, skip_special_tokens=False) for row in ids.tolist()]
    assert sum("I do not know this picture." in text for text in texts) > 14, "20 of 40, less those asked about a fact"
    assert max(text.count("<|im_start|>assistant") for text in texts) == 2
    usual = school.recipe.pictures((4, 4), 40).ids
    assert ids.shape[1] < usual.shape[1], "fewer questions leave less to compute"


def test_small_pictures_can_be_left_out() -> None:
    assert set(order()) == set(GRIDS)
    assert set(order(42)) == {grid for grid in GRIDS if grid[0] * grid[1] >= 42} != set(GRIDS)
    assert set(order(least_often=3)) == {grid for grid, mix in GRIDS.items() if mix.often >= 3} != set(GRIDS)


def test_a_sheet_shows_pictures_as_they_were_cut_into_patches(school: Class, tmp_path: Path) -> None:
    torch.manual_seed(17)
    batch = school.recipe.pictures((4, 5), 24)
    assert batch.patches is not None
    [image] = pictures(batch, (4, 5), 3)
    values = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 127.5 - 1
    torch.testing.assert_close(patchify(values[None, None])[0], batch.patches[3, 0], atol=1e-5, rtol=0)
    talk = conversation(school.recipe, batch, 3)
    starts = [line[:2] for line in talk.splitlines()]
    assert starts.count("? ") == starts.count("= ") >= 1
    write_sheet(school.recipe, tmp_path / "sheet.png", kind="pairs", count=2)
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert len(np.unique(np.asarray(sheet))) > 100


class Copies(TorchDispatchMode):
    """Names what a CUDA graph cannot hold: values of the host that become tensors, and tensors that are waited for."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (
            torch.ops.aten.lift_fresh,
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.nonzero,
        ):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_what_a_graph_cannot_hold_is_noticed() -> None:
    found: list[str] = []
    with Copies(found):
        float(torch.tensor([1.0]).sum())
    assert found == ["aten.lift_fresh.default", "aten._local_scalar_dense.default"]


@pytest.mark.parametrize(("name", "grid"), KINDS_OF_BATCH)
def test_the_second_batch_of_a_size_can_be_captured(school: Class, name: str, grid: tuple[int, int]) -> None:
    getattr(school.recipe, name)(grid, 160)
    found: list[str] = []
    with Copies(found):
        getattr(school.recipe, name)(grid, 160)
    assert not found
