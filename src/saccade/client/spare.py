"""A worker's process that is started before it is known what for.

Its imports take seconds; so a command that will need a worker starts one first, and only then imports what it takes
itself. This module therefore imports next to nothing.
"""

import shutil
import tempfile
from pathlib import Path

from saccade.config import worker_environment
from saccade.processes import start_python

WORKER = "saccade.execution.worker"


class Spare:
    """A worker and the folder that only this user may enter, in which it looks for its sockets.

    Nothing is ever written to its standard input, which closes with this process: then the worker ends. Whoever takes
    the worker over ends it and removes the folder; as a context manager a spare does so itself where nobody did.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="saccade-"))
        self.is_taken = False
        try:
            self.process = start_python(WORKER, str(self.folder), environment=worker_environment())
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def __enter__(self) -> "Spare":
        return self

    def __exit__(self, *exception: object) -> None:
        if not self.is_taken:
            self.process.kill()
            self.process.communicate()
            shutil.rmtree(self.folder, ignore_errors=True)
