"""Starting an engine process, tying its life to its parent's, and describing how it ended."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress

EXIT_FAILED, EXIT_ORPHANED = 3, 4
PR_SET_PDEATHSIG = 1


def start_python(
    module: str, *words: str, environment: Mapping[str, str], fds: Sequence[int] = ()
) -> "subprocess.Popen[bytes]":
    """Start a module as a process with a pipe as standard input and the inherited files `fds`. -P prevents imports from
    the working directory. The process has its own session, so Ctrl-C does not reach it: the front end decides what
    happens to requests."""
    return subprocess.Popen(
        (sys.executable, "-P", "-m", module, *words),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
        pass_fds=fds,
    )


def end_with_parent() -> None:
    """Ask Linux to kill this process when the thread that started it ends. Has no effect if that thread is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_input() -> None:
    """Exit when standard input closes; the parent holds its other end. Nothing else may read it from now on."""

    def wait_for_end() -> None:
        while os.read(0, 1):
            pass
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=wait_for_end, daemon=True).start()


def print_error(error: BaseException) -> None:
    """Prints a traceback, if anybody still reads standard error."""
    with suppress(OSError):
        traceback.print_exception(error)


def describe_exit(code: int) -> str:
    """A negative code is a signal, as in `subprocess`. Real-time signals have no names."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
