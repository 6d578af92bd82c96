"""A worker process started before its work is known. Its imports take seconds, so a command that will need a worker
starts one before its own imports. For the same reason this module imports almost nothing."""

import socket

from saccade.bytecode import compile_if_new
from saccade.config import worker_environment
from saccade.processes import start_python

WORKER = "saccade.execution.worker_start"


class Spare:
    """A worker and the socket to it. Nothing is written to the worker's standard input; it closes when this process
    ends, and so ends the worker. Whoever takes the worker over ends it; otherwise the context manager does."""

    def __init__(self) -> None:
        self.is_taken = False
        environment = worker_environment()
        compile_if_new(environment)
        self.socket, other = socket.socketpair()
        with other:
            self.process = start_python(WORKER, str(other.fileno()), environment=environment, fds=(other.fileno(),))

    def __enter__(self) -> "Spare":
        return self

    def __exit__(self, *exception: object) -> None:
        if not self.is_taken:
            self.process.kill()
            self.process.communicate()
            self.socket.close()
