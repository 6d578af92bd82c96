"""`saccade run` on a terminal: a spinner while it loads, commands, answers, lines that arrow keys bring back."""

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PICTURES = Path(__file__).parents[2] / "examples" / "pictures"
WAIT_S = 300.0  # on a busy machine
UP = "\x1b[A"


class Terminal:
    """A program's terminal, as somebody sees it who types."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._number, text.encode())

    def expect(self, text: str) -> str:
        """What came until this text did, behind what was expected before."""
        deadline = time.monotonic() + WAIT_S
        while text not in self._seen:
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self._number], [], [], left)[0], f"no {text!r} in {self._seen!r}"
            self._seen += os.read(self._number, 65536).decode(errors="replace")
        found, _, self._seen = self._seen.partition(text)
        return found


@contextmanager
def running(home: Path) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "saccade", "run"]
    own = {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "TERM": "xterm", "PYTHONUTF8": "1"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | own)
    os.close(theirs)
    try:
        yield Terminal(ours), process
    finally:
        process.kill()
        process.wait(30)
        os.close(ours)


def test_a_conversation_on_a_terminal(tmp_path: Path) -> None:
    pytest.importorskip("readline")
    question = "What color is the heart?"
    with running(tmp_path) as (terminal, process):
        assert terminal.expect("loading the bundled model").isascii() is False, "a spinner, before anything else"
        terminal.expect("> ")
        terminal.type("/help\n")
        terminal.expect("/image PATH|URL")
        terminal.expect("> ")
        terminal.type(f"/image {PICTURES / 'heart.png'}\n")
        terminal.expect("1 image(s)")
        terminal.expect("> ")
        terminal.type(f"{question}\n")
        terminal.expect("reading the question")
        terminal.expect("purple")
        terminal.expect("> ")
        terminal.type("/clear\n")
        terminal.expect("new conversation")
        terminal.expect("> ")
        terminal.type(f"{UP}{UP}\n")
        terminal.expect(question)
        terminal.expect("reading the question")
        terminal.expect("> ")
        terminal.type("/exit\n")
        assert process.wait(WAIT_S) == 0
    [history] = [path for path in tmp_path.rglob("history") if path.is_file()]
    assert history.read_text().count("heart?") == 2 and history.stat().st_mode & 0o777 == 0o600
