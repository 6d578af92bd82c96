"""The module that is trained is transformers' Qwen3-VL, and Saccade's."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch.nn import functional

from tests.training.conftest import SMALL, Class
from training.batches import GRIDS, order
from training.checkpoint import write_checkpoint
from training.lessons import Lessons, make_lessons, prepare
from training.model import Batch, Model, attend
from training.passes import Passes
from training.pupil import Pupil, schedule
from training.vocabulary import token_id


@pytest.fixture(scope="module")
def model() -> Model:
    made = Model(SMALL)
    made.initialise(torch.Generator().manual_seed(1))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.02)
    return made


@pytest.fixture(scope="module")
def oracle(model: Model, school: Class, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, {name: part.detach() for name, part in model.named_parameters()}, SMALL, school.tokenizer)
    hf.utils.logging.disable_progress_bar()
    return hf.Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


def as_inputs(batch: Batch, i: int, school: Class) -> dict[str, torch.Tensor]:
    """One sample the way transformers wants it."""
    ids, kinds = batch.ids[i].clone(), torch.zeros_like(batch.ids[i])
    inputs: dict[str, torch.Tensor] = {}
    if batch.patches is not None and batch.layout is not None:
        patches = batch.patches[i].flatten(0, 1)
        is_video = patches.shape[-1] == 2 * 768
        ids[batch.places[i]] = token_id(school.tokenizer, "<|video_pad|>" if is_video else "<|image_pad|>")
        kinds[batch.places[i]] = 2 if is_video else 1
        if not is_video:
            patches = patches.view(-1, 3, 1, 256).expand(-1, -1, 2, -1).flatten(1)
        grid = torch.tensor([[1, batch.layout.rows * 2, batch.layout.columns * 2]] * batch.patches.shape[1])
        suffix = "_videos" if is_video else ""
        inputs = {f"pixel_values{suffix}": patches, ("video" if is_video else "image") + "_grid_thw": grid}
    return {"input_ids": ids[None], "mm_token_type_ids": kinds[None], **inputs}


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "grid"),
    [("pictures", (3, 5)), ("pictures", (4, 4)), ("pairs", (4, 4)), ("videos", (4, 5)), ("texts", (1, 1))],
)
def test_logits_are_those_of_transformers(
    model: Model, oracle: Any, school: Class, name: str, grid: tuple[int, int]
) -> None:
    torch.manual_seed(3)
    batch = getattr(school.recipe, name)(grid, 6)
    ours = model(batch)
    for i in range(6):
        theirs = oracle(**as_inputs(batch, i, school)).logits[0][batch.rows[i]]
        known = batch.targets[i] >= 0
        torch.testing.assert_close(ours[i][known], theirs[known], atol=1e-4, rtol=1e-4)


def test_a_few_steps_lower_the_loss(school: Class) -> None:
    torch.manual_seed(4)
    model = Model(SMALL)
    model.initialise(torch.Generator().manual_seed(5))
    pupil, passes = Pupil(model, 3e-3, torch.device("cpu")), Passes(model, graphs=False, log=print)
    batch = school.recipe.texts((1, 1), 32)
    losses = []
    for _ in range(12):
        passes.run(("texts", (1, 1)), lambda: batch, 1.0, 0)
        losses.append(float(passes.losses[0]))
        pupil.update(0.02, 300)
    assert losses[-1] < 0.7 * losses[0], losses


def test_a_saved_state_goes_on_where_it_stopped(school: Class, tmp_path: Path) -> None:
    torch.manual_seed(6)
    batch = school.recipe.texts((1, 1), 8)

    def new() -> tuple[Pupil, Passes]:
        model = Model(SMALL)
        model.initialise(torch.Generator().manual_seed(7))
        return Pupil(model, 1e-3, torch.device("cpu")), Passes(model, graphs=False, log=print)

    pupil, passes = new()
    for step in range(4):
        if step == 2:
            pupil.save(tmp_path / "state.safetensors", step, 12.5)
        passes.run(("texts", (1, 1)), lambda: batch, 1.0, 0)
        pupil.update(0.5, step)
    other, others_passes = new()
    assert other.load(tmp_path / "state.safetensors") == (2, 12.5)
    for step in range(2, 4):
        others_passes.run(("texts", (1, 1)), lambda: batch, 1.0, 0)
        other.update(0.5, step)
    for name, ours, theirs in zip(pupil.names, pupil.masters, other.masters, strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


def test_a_frozen_tower_stays_as_it_is_and_is_exported(school: Class, tmp_path: Path) -> None:
    torch.manual_seed(8)
    model = Model(SMALL)
    model.initialise(torch.Generator().manual_seed(9))
    model.tower.requires_grad_(False)
    before = {name: part.detach().bfloat16() for name, part in model.named_parameters()}
    pupil, passes = Pupil(model, 1e-2, torch.device("cpu"), warm_up=1), Passes(model, graphs=False, log=print)
    lessons = prepare(make_lessons(school.recipe, (8, 8), grids=order(), always="texts"), model)
    for lesson in next(lessons):
        batch = lesson.make()
        assert (batch.levels is not None) == (lesson.key[0] != "texts"), "the tower has seen the pictures"
        passes.run(lesson.key, lesson.make, lesson.weight, lesson.slot)
    pupil.update(0.5, 1)
    lessons.close()
    pupil.export(tmp_path / "model.safetensors")
    after = load_file(tmp_path / "model.safetensors")
    assert set(after) == set(before)
    is_frozen = {name: torch.equal(after[name], part) for name, part in before.items()}
    assert all(is_frozen[name] == name.startswith("model.visual.") for name in before), is_frozen


def test_texts_may_come_in_every_step(school: Class) -> None:
    def kinds(always: str) -> list[list[str]]:
        steps = islice(make_lessons(school.recipe, (8, 8), grids=order(), always=always), 4)
        return [[lesson.key[0] for lesson in step] for step in steps]

    sides = ("pairs", "videos", "pairs", "texts")
    assert kinds("") == [["pictures", side] for side in sides]
    assert kinds("texts") == [["pictures", *dict.fromkeys((side, "texts"))] for side in sides]


def test_the_first_steps_show_every_size_from_the_largest_on(school: Class) -> None:
    steps = islice(make_lessons(school.recipe, (8, 8), grids=order(), parts=2), len(GRIDS))
    grids = [[lesson.key[1] for lesson in step if lesson.key[0] == "pictures"] for step in steps]
    assert {first for first, _ in grids} == set(GRIDS) and all(first == second for first, second in grids)
    units = [rows * columns for (rows, columns), _ in grids]
    assert units == sorted(units, reverse=True)


def test_a_step_in_two_parts_learns_as_much_from_as_many_pictures(school: Class) -> None:
    (whole, _), (*halves, _) = (
        next(make_lessons(school.recipe, (8, 8), grids=order(), parts=parts)) for parts in (1, 2)
    )
    assert len(halves) == 2 and sum(half.weight for half in halves) == whole.weight
    assert sum(len(half.make().ids) for half in halves) == len(whole.make().ids) == 8


def test_a_run_goes_on_without_graphs_where_none_can_be_captured(
    school: Class, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("taken by others")

    monkeypatch.setattr(Passes, "_capture", fail)
    told: list[str] = []
    batch = school.recipe.texts((1, 1), 4)
    passes = Passes(Model(SMALL), graphs=True, log=told.append)
    for _ in range(3):
        passes.losses.zero_()
        passes.run(("texts", (1, 1)), lambda: batch, 1.0, 0)
        assert float(passes.losses[0]) > 0
    assert sum("taken by others" in line for line in told) == 1, told


def test_an_error_while_lessons_are_prepared_is_raised(school: Class) -> None:
    def broken() -> Iterator[Lessons]:
        yield next(make_lessons(school.recipe, (8, 8), grids=order()))
        raise ValueError("nothing left to draw")

    lessons = prepare(broken(), Model(SMALL))
    next(lessons)
    with pytest.raises(ValueError, match="nothing left"):
        next(lessons)


@pytest.mark.parametrize("is_causal", [False, True])
def test_plain_attention_is_that_of_torch(is_causal: bool) -> None:
    torch.manual_seed(10)
    q, k, v = torch.randn(3, 2, 3, 17, 32).bfloat16()
    ours = attend(q, k, v, is_causal=is_causal)
    theirs = functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=is_causal)
    torch.testing.assert_close(ours.float(), theirs, atol=0.03, rtol=0.03)


def test_the_rate_rises_and_falls() -> None:
    late = [schedule(i / 100, 1000, 300) for i in range(101)]
    assert late[0] == 1 and late[-1] == pytest.approx(0.01) and late == sorted(late, reverse=True)
    assert schedule(0.0, 2, 300) == pytest.approx(0.01)
    assert schedule(0.0, 2, 30) == pytest.approx(0.1)
