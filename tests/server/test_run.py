"""A server that cannot start says why and ends."""

import socket
import sys
from pathlib import Path

import pytest

from saccade.server.run import serve
from saccade.server.settings import ServerSettings


@pytest.fixture(autouse=True)
def _same_interpreter() -> object:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_an_address_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve("m", ServerSettings(port=port)) == 2
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert serve(str(tmp_path / "nothing"), ServerSettings(port=0)) == 2
    said = capsys.readouterr().err
    assert "nothing" in said and "Traceback" not in said and "ready on" not in said
