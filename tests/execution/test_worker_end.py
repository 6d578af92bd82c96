"""How a worker ends says why: only a front end that is gone ends it without a word."""

import socket
from typing import Any

import pytest

from saccade.execution import worker
from saccade.execution.spare_compilers import SpareCompilers
from saccade.processes import EXIT_FAILED, EXIT_ORPHANED
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings
from saccade.wire.link import Link, OtherEndGoneError
from saccade.wire.messages import Failure, StartEngine, decode_reply, encode

START = StartEngine("nowhere", EngineSettings(device="cpu"), SchedulerSettings())


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> tuple[Link, socket.socket]:
    """A front end and the end of its worker, which needs no model folder."""
    monkeypatch.setattr("saccade.inputs.processor.Processor.from_folder", lambda folder: None)
    ours, theirs = socket.socketpair()
    return Link(ours), theirs


@pytest.mark.parametrize("error", [EOFError("Ran out of input"), RuntimeError("broken")], ids=["end", "other"])
def test_a_file_that_ends_too_early_is_reported_like_any_other_error(
    ends: tuple[Link, socket.socket], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def build(*given: Any) -> Any:
        raise error

    monkeypatch.setattr(worker, "_build", build)
    front, workers = ends
    front.send([encode(START)])
    assert worker.main(workers, SpareCompilers()) == EXIT_FAILED
    assert (frames := front.receive()) is not None
    assert decode_reply(frames[0]) == Failure(f"{type(error).__name__}: {error}")
    with pytest.raises(OtherEndGoneError):
        front.receive()
    front.close()


def test_a_worker_without_a_front_end_ends_without_a_word(
    ends: tuple[Link, socket.socket], capfd: pytest.CaptureFixture[str]
) -> None:
    front, workers = ends
    front.close()
    assert worker.main(workers, SpareCompilers()) == EXIT_ORPHANED
    assert capfd.readouterr().err == ""
