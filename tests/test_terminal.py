"""Output on terminals that are wide, narrow or missing, and to readers that leave."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from saccade.cli.commands import EXIT_TERMINATED
from saccade.errors import ConfigError
from saccade.terminal import print_table, progress_bar, stages, write_json

BOUND_S = 300
PRINTS = "from saccade.terminal import Output; Output().print('much ' * 99999)"
WRITES = "import sys; sys.stdout.write('much ' * 99999)"
BUFFERS = "import sys; sys.stdout.write('little')"


def a_table() -> Table:
    table = Table("name", "number of them", "", title="what there is")
    table.add_row("a-word-of-22-characters", "1,234,567", "x")
    table.add_row("several words [red]in a[/red] row, so many that they wrap", "8", "")
    return table


def shown(width: int, table: Table) -> str:
    text = io.StringIO()
    print_table(Console(file=text, width=width), table)
    return text.getvalue()


@pytest.mark.parametrize("width", [40, 59])
def test_a_table_that_does_not_fit_becomes_a_list(width: int) -> None:
    lines = shown(width, a_table()).splitlines()
    assert all(len(line) <= width for line in lines)
    text = " ".join(" ".join(lines).split())
    assert "name a-word-of-22-characters number of" in text and "1,234,567" in text
    assert "in a row" in text and "[red]" not in text and "┃" not in text and "…" not in text
    assert lines[0] == "what there is" and "" in lines, "one entry is apart from the next"


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_table_that_fits_stays_a_table(width: int) -> None:
    text = shown(width, a_table())
    assert "┃" in text and "a-word-of-22-characters" in text and "1,234,567" in text
    assert text.startswith("what there is "), "the title stands over the first column"


def test_a_small_table_fits_a_narrow_terminal() -> None:
    table = Table("stage", "s")
    table.add_row("weights", "0.1")
    assert "┃" in shown(20, table)


def test_without_a_terminal_stages_are_lines_and_there_are_no_bars() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=False)
    with stages(console, "first") as say:
        say("[second]")
    with progress_bar(console) as bar:
        bar.update(bar.add_task("work", total=2), advance=1)
    with progress_bar(None) as bar:
        bar.add_task("work", total=2)
    assert text.getvalue() == "first\n[second]\n"


def test_on_a_terminal_there_is_a_bar() -> None:
    text = io.StringIO()
    with progress_bar(Console(file=text, force_terminal=True, width=80)) as bar:
        bar.update(bar.add_task("work", total=2), advance=1)
    assert "work" in text.getvalue() and "1/2" in text.getvalue()


@pytest.mark.parametrize(("says", "code"), [(PRINTS, 3), (BUFFERS, 3), (WRITES, 0)])
def test_a_reader_that_leaves_causes_no_error(says: str, code: int) -> None:
    """`saccade ... | head -1`. The command runs to its end and exits with its own code."""
    body = f"from saccade.cli import commands\ncommands.dispatch = lambda words: (exec({says!r}), 3)[1]\n"
    assert piped_to_nobody(f"{body}import sys\nsys.exit(commands.main([]))") == (code, b"")


def test_help_may_be_cut_off() -> None:
    code = "import sys; from saccade.cli import main; sys.exit(main(['help', '--markdown']))"
    assert piped_to_nobody(code) == (0, b"")


TALKS = """
import logging, sys
from saccade.cli import commands
from saccade.server.front_end import log_to_stderr
from saccade.terminal import warn

def talk(words):
    warn("careful")
    log_to_stderr()
    logging.getLogger("saccade").warning("look out")
    print("shutting down", file=sys.stderr)
    return 3

commands.dispatch = talk
sys.exit(commands.main([]))
"""


def test_an_error_output_that_takes_nothing_stops_nothing() -> None:
    """The log's disk is full, or its reader is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    for nowhere in (os.open("/dev/full", os.O_WRONLY), writer):
        ended = subprocess.run([sys.executable, "-c", TALKS], stderr=nowhere, timeout=BOUND_S, check=False)
        os.close(nowhere)
        assert ended.returncode == 3
    told = subprocess.run([sys.executable, "-c", TALKS], stderr=subprocess.PIPE, timeout=BOUND_S, check=False).stderr
    assert told.startswith(b"warning: careful\n") and told.endswith(b"WARNING look out\nshutting down\n")


def test_a_container_whose_command_still_starts_can_be_stopped() -> None:
    """Its first process gets no signal that it has no handler for."""
    code = "import os, signal; from saccade.cli import commands; {}; "
    code += "commands.dispatch = lambda words: signal.raise_signal(signal.SIGTERM) or 3; commands.main([])"
    words = [[sys.executable, "-c", code.format(kind)] for kind in ("pass", "os.getpid = lambda: 1")]
    codes = [subprocess.run(each, timeout=BOUND_S, check=False).returncode for each in words]
    assert codes == [-signal.SIGTERM, EXIT_TERMINATED]


def piped_to_nobody(code: str) -> tuple[int, bytes]:
    reader, writer = os.pipe()
    os.close(reader)
    usual = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    words = [sys.executable, "-c", code]
    try:
        done = subprocess.run(
            words, stdout=writer, stderr=subprocess.PIPE, env=usual, timeout=BOUND_S, check=False, text=False
        )
    finally:
        os.close(writer)
    return done.returncode, done.stderr


def test_a_file_that_cannot_be_written_is_an_error_that_names_its_flag(tmp_path: Path) -> None:
    path = tmp_path / "no" / "figures.json"
    with pytest.raises(ConfigError, match=rf"{path} cannot be written: No such file or directory \(--json\)"):
        write_json(path, {"a": 1})
    write_json(path, {"a": 1}, makes_folder=True)
    assert path.read_text() == '{\n "a": 1\n}\n'


def test_closed_standard_streams_are_replaced_before_anything_takes_their_numbers() -> None:
    code = "import socket, sys; from saccade.cli import main; "
    code += "sys.exit(10 + main(['--version']) + (socket.socket().fileno() < 3))"
    closing = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    ended = subprocess.run([*closing, sys.executable, "-c", code], timeout=BOUND_S, check=False)
    assert ended.returncode == 10
