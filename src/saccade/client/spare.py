"""A worker process started before its work is known. Its imports take seconds, so a command that will need a worker
starts one before its own imports. For the same reason this module imports almost nothing."""

import shutil
import tempfile
from pathlib import Path

from saccade.bytecode import compile_if_new
from saccade.config import worker_environment
from saccade.processes import start_python

WORKER = "saccade.execution.worker_start"


class Spare:
    """A worker and its socket folder, which only this user may enter. Nothing is written to the worker's standard
    input; it closes when this process ends, and so ends the worker. Whoever takes the worker over ends it and removes
    the folder; otherwise the context manager does both."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="saccade-"))
        self.is_taken = False
        try:
            environment = worker_environment()
            compile_if_new(environment)
            self.process = start_python(WORKER, str(self.folder), environment=environment)
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
