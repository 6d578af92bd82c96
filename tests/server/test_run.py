"""A starting server shows its progress; one that cannot start says why and exits."""

import asyncio
import errno
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import uvloop

from saccade.server.front_end import listeners, serve
from saccade.server.lifecycle import Launch, Stages
from saccade.server.server_settings import ServerSettings
from saccade.wire.messages import Stage
from tests.server.fake import HANG_S


@pytest.fixture(autouse=True)
def _same_interpreter() -> object:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_an_address_in_use_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve(Launch("m"), ServerSettings(port=port)) == 2
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


def test_a_name_that_has_an_ipv6_address_only_is_listened_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another server listens on that address, there is nothing else to try."""
    try:
        taken = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    found = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", taken.getsockname())]
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, **how: found)
    with taken:
        assert serve(Launch("m"), ServerSettings(host="six", port=80)) == 2
    assert f"cannot listen on six:80: {os.strerror(errno.EADDRINUSE)}" in capsys.readouterr().err


def test_a_server_goes_on_when_the_reader_of_its_log_leaves() -> None:
    """`saccade serve 2>&1 | tee FILE`: Ctrl-C ends tee, too."""
    reader, writer = os.pipe()
    os.close(reader)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = f"['serve', 'm', '--port', '{taken.getsockname()[1]}']"
        code = f"import sys; from saccade.cli import main; sys.exit(10 + main({words}))"
        ended = subprocess.run([sys.executable, "-c", code], stderr=writer, timeout=HANG_S, check=False)
    os.close(writer)
    assert ended.returncode == 12, "it printed why, and went on to return that"


def test_many_connections_are_accepted_within_a_few_turns_of_the_loop() -> None:
    turns = 0

    async def run(listener: socket.socket, num: int) -> None:
        nonlocal turns
        loop, seen, is_full = asyncio.get_running_loop(), list[asyncio.Transport](), asyncio.Event()

        class Noting(asyncio.Protocol):
            def connection_made(self, transport: Any) -> None:
                seen.append(transport)
                if len(seen) == num:
                    is_full.set()

        servers = [await loop.create_server(Noting, sock=one) for one in listeners(listener)]
        while not is_full.is_set():
            turns += 1
            await asyncio.sleep(0)
        for transport in seen:
            transport.abort()
        for server in servers:
            server.close()

    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener, ExitStack() as clients:
        for _ in range(128):
            clients.enter_context(socket.create_connection(listener.getsockname()))
        listener.setblocking(False)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(asyncio.wait_for(run(listener, 128), HANG_S))
    assert turns < 128 // 4


def test_invalid_tls_files_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "pem").write_text("garbage")
    file = str(tmp_path / "pem")
    assert serve(Launch("m"), ServerSettings(port=0, ssl_keyfile=file, ssl_certfile=file)) == 2
    said = capsys.readouterr().err
    assert "--ssl-certfile" in said and "Traceback" not in said


def test_the_unix_socket_of_another_server_is_not_removed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        assert serve(Launch(str(tmp_path / "nothing")), ServerSettings(uds=str(path))) == 2
        assert "another server" in capsys.readouterr().err and path.is_socket()
    assert serve(Launch(str(tmp_path / "nothing")), ServerSettings(uds=str(path))) == 2
    assert "nothing" in capsys.readouterr().err and not path.exists(), "a stale socket is removed"


def test_a_file_is_not_taken_for_a_socket(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    assert serve(Launch("m"), ServerSettings(uds=str(tmp_path / "file"))) == 2
    assert "--uds" in capsys.readouterr().err and (tmp_path / "file").read_text() == "kept"


def test_a_missing_model_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert serve(Launch(str(tmp_path / "nothing")), ServerSettings(port=0)) == 2
    said = capsys.readouterr().err
    assert "nothing" in said and "Traceback" not in said and "ready on" not in said


def test_a_stage_shows_its_progress() -> None:
    said: list[str] = []
    shown: list[str] = []
    stages = Stages(said.append, "first", monotonic(), shown.append)
    for stage in (
        Stage("loading weights"),
        Stage("loading weights", 3 * 10**9, 16_400_000_000, "a.weight"),
        Stage("capturing graphs", 57, 219),
    ):
        stages.note(stage)
    stages.enter("")
    assert shown == [
        *("loading weights", "loading weights: 3.0 of 16.4 GB"),
        *("capturing graphs", "capturing graphs: 57 of 219", ""),
    ]
    assert [line.split(":")[0] for line in said] == ["first", "loading weights", "capturing graphs"]
