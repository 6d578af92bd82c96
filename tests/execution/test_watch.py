"""Traces and profiles end at their time limit, or when told to."""

import gzip
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from saccade.execution.watch import Watch
from saccade.wire.messages import BeginTrace, EndTrace, Profiled, StartProfile, StopProfile


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Engine:
    def __init__(self) -> None:
        self.is_traced = False

    def begin_trace(self) -> None:
        self.is_traced = True

    def end_trace(self) -> None:
        self.is_traced = False


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def watch(engine: Engine, clock: Clock) -> Watch:
    return Watch(cast(Any, engine), clock)


def profiled(watch: Watch, question: StartProfile | StopProfile) -> Profiled:
    found = watch.answer(question)
    assert isinstance(found, Profiled)
    return found


def test_a_trace_ends_at_its_limit(watch: Watch, engine: Engine, clock: Clock) -> None:
    assert watch.seconds_left() is None
    watch.answer(BeginTrace(1, limit_s=5.0))
    assert watch.seconds_left() == 5.0
    clock.now += 4.9
    watch.check()
    before = engine.is_traced
    clock.now += 0.1
    watch.check()
    assert (before, engine.is_traced) == (True, False) and watch.seconds_left() is None


def test_a_trace_that_was_ended_has_no_limit_left(watch: Watch, engine: Engine, clock: Clock) -> None:
    watch.answer(BeginTrace(1, limit_s=5.0))
    watch.answer(EndTrace(2))
    assert not engine.is_traced and watch.seconds_left() is None
    engine.begin_trace()
    clock.now += 10.0
    watch.check()
    assert engine.is_traced, "the limit belonged to the first trace"


def test_a_profile_ends_at_its_limit_and_its_file_is_named_once(watch: Watch, clock: Clock, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "profiles"
    assert profiled(watch, StartProfile(1, str(folder), 5.0)).problem == ""
    torch.ones(3).exp()
    clock.now += 2.0
    watch.answer(BeginTrace(2, limit_s=1.0))
    assert watch.seconds_left() == 1.0, "the next limit is the trace's"
    clock.now += 4.0
    assert watch.seconds_left() == 0.0
    watch.check()
    assert watch.seconds_left() is None
    (file,) = folder.iterdir()
    assert b"aten::exp" in gzip.decompress(file.read_bytes())
    assert profiled(watch, StopProfile(3)) == Profiled(3, str(file))
    assert "no profile is running" in profiled(watch, StopProfile(4)).problem


def test_only_one_profile_runs_at_a_time(watch: Watch, tmp_path: Path) -> None:
    profiled(watch, StartProfile(1, str(tmp_path), 5.0))
    assert "already running" in profiled(watch, StartProfile(2, str(tmp_path), 5.0)).problem
    assert profiled(watch, StopProfile(3)).file.startswith(str(tmp_path))


def test_a_folder_that_cannot_be_used_is_named(watch: Watch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = profiled(watch, StartProfile(1, str(tmp_path / "file"), 5.0))
    assert found.problem == f"{tmp_path / 'file'} is not a folder (--profile-folder)"
    assert watch.seconds_left() is None and "no profile is running" in profiled(watch, StopProfile(2)).problem
