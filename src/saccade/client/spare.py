"""A worker's process that is started before it is known what for.

Its imports take seconds; so a command that will need a worker starts one first, and only then imports what it takes
itself. This module therefore imports next to nothing.
"""

import asyncio
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

from saccade.config import worker_environment

WORKER = "saccade.execution.worker"


class Spare:
    """A worker and the folder that only this user may enter, in which it looks for its sockets.

    The other end of its standard input is held here and never written to: it closes with this process, and the worker
    ends. Whoever takes the worker over ends it and removes the folder; as a context manager a spare does so itself
    where nobody did.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="saccade-"))
        self.is_taken = False
        # -P: what lies in the working directory is not imported. A session of its own: Ctrl-C reaches the parent, which
        # decides what becomes of the requests.
        command = (sys.executable, "-P", "-m", WORKER, str(self.folder))
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                env=worker_environment(),
            )
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def __enter__(self) -> "Spare":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_taken:
            self.kill()
            self._process.wait()
            self.close_input()
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """That of a signal is negative; None while it runs."""
        return self._process.poll()

    async def wait(self) -> int:
        """The exit code. Looks now and then, so that a wait that is given up leaves no thread behind."""
        while (code := self._process.poll()) is None:
            await asyncio.sleep(POLL_S)
        return code

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def close_input(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()


POLL_S = 0.05
