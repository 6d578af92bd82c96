"""A run reports, and ends early where it is not worth its time."""

from pathlib import Path

import pytest
import torch

from tests.training.conftest import SMALL, Class
from training import train
from training.accuracy import accuracy, held_out
from training.dialogue import KINDS
from training.model import Model
from training.passes import Passes
from training.train import HopelessError, Options, line
from training.vocabulary import token_id


def options(least_rate: float) -> Options:
    here = Path()
    return Options(
        data=here,
        out=here,
        state=here,
        minutes=9.0,
        batch=1024,
        rate=1e-3,
        seed=1,
        device="cpu",
        dtype="float32",
        max_steps=10,
        report_every_s=20.0,
        resume=False,
        graphs=False,
        compile=False,
        small=True,
        least_rate=least_rate,
        start=None,
        warm_up=300,
        freeze_tower=False,
        counting=1.0,
        longer=1.0,
        strange=0.08,
        turns=4,
        least_units=0,
        least_often=0,
        always="",
        side_batch=0,
        parts=1,
        memory_gib=0.0,
    )


def steps_until_given_up(monkeypatch: pytest.MonkeyPatch, least_rate: float, step_s: float) -> int | None:
    """The first steps are slow; the others take `step_s`."""
    now = 0.0
    monkeypatch.setattr("training.train.time.perf_counter", lambda: now)
    clock = train._Clock(0.0, 0.0, options(least_rate), 0)
    for step in range(1, 3000):
        now += 5.0 if step < 8 else step_s
        try:
            clock.check(step)
        except HopelessError as error:
            assert "--least-rate" in str(error)
            return step
    return None


def test_a_slow_run_gives_up_after_a_minute_and_a_fast_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps_until_given_up(monkeypatch, 20_000, 0.05) is None, "1,280 samples in 0.05 s are 25,600 a second"
    ended = steps_until_given_up(monkeypatch, 20_000, 0.1)
    assert ended is not None and 600 <= ended <= 620
    assert steps_until_given_up(monkeypatch, 0.0, 0.1) is None


def test_first_answers_are_counted_for_themselves(school: Class) -> None:
    model = Model(SMALL)
    model.initialise(torch.Generator().manual_seed(1))
    end_id = token_id(school.tokenizer, "<|im_end|>")
    batches = held_out(school.recipe, 8, seed=1)
    found, first = accuracy(model, batches, end_id)
    assert sum(asked for _, asked in first.values()) == 8 * len(batches), "every sample has a first answer"
    assert sum(asked for _, asked in found.values()) == sum(int((batch.targets == end_id).sum()) for batch in batches)
    passes = Passes(model, graphs=False, log=print, end_id=end_id)
    for _ in range(2):
        passes.run(("texts", (1, 1)), lambda: batches[-1], 1.0, 0)
    assert int(passes.answers) == 2 * int((batches[-1].targets == end_id).sum())


def test_a_line_of_the_report_is_short() -> None:
    found = dict.fromkeys(KINDS, (98, 100))
    text = line(found, found)
    assert len(text) < 800 and text.startswith("right 98.00% first 98.00%: sha 98 col 98")
    assert line({"shape": (3, 3), "copy": (1, 2)}, {}).endswith(": cop 50")
