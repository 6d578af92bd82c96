"""Processes that compile kernels during start-up help where they can, and never do harm."""

import os
import textwrap
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from saccade.config import kernel_folder
from saccade.execution import compilers, spare_compilers
from saccade.execution.compilers import CompileJob, CompileProcesses, room_on, start_compiling
from saccade.execution.spare_compilers import SpareCompilers, room_for_compilers
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings
from saccade.wire.messages import Stage, StartEngine
from tests.child_processes import children

GPU = SimpleNamespace(name="GPU", major=9, minor=0, multi_processor_count=132, total_memory=140 * 2**30)
GIB = 2**30
MODULE = "process_that_compiles"

Write = Callable[[str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes the module that the processes run. In it, `line` is the process's job."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write_module(text: str) -> None:
        begin = "import pathlib, sys, time\nline = sys.stdin.readline()\n"
        (tmp_path / f"{MODULE}.py").write_text(begin + textwrap.dedent(text))

    return write_module


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StartEngine:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: GPU)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: None)
    monkeypatch.setattr(spare_compilers, "available_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(spare_compilers, "GPUS", tmp_path)
    monkeypatch.setattr(spare_compilers, "usable_cores", lambda: 5)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return StartEngine(str(tmp_path / "model"), EngineSettings(), SchedulerSettings())


def processes(start: StartEngine, tmp_path: Path, count: int = 3) -> CompileProcesses:
    return CompileProcesses(start, count, tmp_path / "stamps" / "stamp", no_spares())


def no_spares() -> SpareCompilers:
    found = SpareCompilers(MODULE)
    found.close()
    return found


def test_every_process_gets_its_share_and_progress_is_reported(
    write: Write, start: StartEngine, tmp_path: Path
) -> None:
    write(f"pathlib.Path({str(tmp_path)!r}, str(hash(line))).write_text(line)")
    reported: list[Stage] = []
    found = processes(start, tmp_path)
    found.wait(reported.append)
    jobs = [
        msgspec.json.decode(file.read_bytes(), type=CompileJob)
        for file in tmp_path.iterdir()
        if file.is_file() and file.suffix == ""
    ]
    assert sorted((job.index, job.count) for job in jobs) == [(0, 3), (1, 3), (2, 3)]
    assert all(job.start == start for job in jobs)
    assert [(stage.name, stage.total) for stage in reported] == [("compiling kernels", 3)] * len(reported)
    assert [stage.done for stage in reported] == sorted({stage.done for stage in reported})


@pytest.mark.parametrize("text", ["sys.exit(3)", "raise SystemError", "time.sleep(600)"])
def test_a_process_that_fails_or_hangs_only_costs_time(
    write: Write, start: StartEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    write(f"if '\"index\":1' in line: {text}" if "raise" not in text else f"{text}")
    before = set(children(os.getpid()))
    found = processes(start, tmp_path)
    found.wait(lambda stage: None, wait_s=1.0)
    assert "compile processes failed" in caplog.text
    assert set(children(os.getpid())) <= before


def test_close_leaves_no_process(write: Write, start: StartEngine, tmp_path: Path) -> None:
    write("time.sleep(600)")
    before = set(children(os.getpid()))
    found = processes(start, tmp_path)
    assert len(set(children(os.getpid())) - before) == 3
    found.close()
    assert set(children(os.getpid())) <= before


def test_the_engine_starts_without_processes_that_cannot_be_started(
    start: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **how: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(spare_compilers, "start_python", refuse)
    reported: list[Stage] = []
    processes(start, tmp_path).wait(reported.append)
    assert reported == []


def test_a_second_worker_waits_for_the_first_and_starts_no_processes(
    write: Write, start: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("time.sleep(600)")
    seconds = count()
    monkeypatch.setattr(compilers, "monotonic", lambda: next(seconds))  # each look takes a second
    first = processes(start, tmp_path)
    before = set(children(os.getpid()))
    second = processes(start, tmp_path)
    reported: list[Stage] = []
    assert set(children(os.getpid())) == before
    second.wait(reported.append, wait_s=5.0)
    assert len(reported) == 1
    third = processes(start, tmp_path)
    first.close()
    third.wait(reported.append)
    assert len(reported) == 1, "there was nothing to wait for"


def test_kernels_on_disk_are_not_compiled_again(write: Write, start: StartEngine) -> None:
    write("")
    gpu = torch.device("cuda")
    found = start_compiling(start, gpu, no_spares())
    assert found is not None
    found.wait(lambda stage: None)
    again = start_compiling(start, gpu, no_spares())
    assert again is not None, "the engine has not started yet"
    again.wait(lambda stage: None)
    again.note_started()
    assert start_compiling(start, gpu, no_spares()) is None
    longer = msgspec.structs.replace(start, limits=SchedulerSettings(max_num_seqs=8))
    other = start_compiling(longer, gpu, no_spares())
    assert other is not None, "other passes may need other kernels"
    other.close()
    (Path(start.folder) / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    quantised = start_compiling(start, gpu, no_spares())
    assert quantised is not None, "config.json may be that of the plain model"
    quantised.close()
    folder = kernel_folder()
    assert folder is not None
    assert folder.stat().st_mode & 0o077 == 0


def test_no_processes_are_started_where_they_would_not_help(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert start_compiling(start, torch.device("cpu"), no_spares()) is None
    ranks = msgspec.structs.replace(start, settings=EngineSettings(tensor_parallel_size=2))
    assert start_compiling(ranks, torch.device("cuda"), no_spares()) is None
    file = msgspec.structs.replace(start, folder=str(Path(start.folder) / "model.gguf"))
    assert start_compiling(file, torch.device("cuda"), no_spares()) is None
    monkeypatch.setattr(spare_compilers, "usable_cores", lambda: 3)
    assert start_compiling(start, torch.device("cuda"), no_spares()) is None


def test_a_first_start_takes_the_spare_processes(write: Write, start: StartEngine) -> None:
    write("")
    before = set(children(os.getpid()))
    spares = SpareCompilers(MODULE)
    waiting = set(children(os.getpid())) - before
    assert len(waiting) == 3, "cores but two"
    assert SpareCompilers(MODULE).take(0) == [], "another worker starts none"
    assert set(children(os.getpid())) - before == waiting
    found = start_compiling(start, torch.device("cuda"), spares)
    assert found is not None
    assert set(children(os.getpid())) - before <= waiting
    found.wait(lambda stage: None)
    found.note_started()
    assert set(children(os.getpid())) <= before
    no_more = SpareCompilers(MODULE)
    assert set(children(os.getpid())) <= before
    no_more.close()


def test_spare_processes_that_are_not_needed_end(write: Write, start: StartEngine) -> None:
    write("")
    before = set(children(os.getpid()))
    assert start_compiling(start, torch.device("cpu"), SpareCompilers(MODULE)) is None
    assert set(children(os.getpid())) <= before


@pytest.mark.parametrize(("cores", "host", "expected"), [(16, 120, 12), (8, 120, 6), (16, 7, 2), (2, 16, 0), (1, 1, 0)])
def test_the_number_of_processes_depends_on_cores_and_memory(
    monkeypatch: pytest.MonkeyPatch, cores: int, host: int, expected: int
) -> None:
    monkeypatch.setattr(spare_compilers, "usable_cores", lambda: cores)
    monkeypatch.setattr(spare_compilers, "available_bytes", lambda: host * GIB)
    assert room_for_compilers() == expected


def test_processes_leave_gpu_memory_for_the_weights() -> None:
    assert [room_on(size * GIB) for size in (16, 24, 80, 140)] == [1, 2, 6, 11]
