"""The server's log: plain lines on standard error. One is written on the event loop, so it must cost microseconds."""

import logging
import sys
from typing import TextIO

_LEVELS = (("saccade", logging.INFO), ("uvicorn", logging.WARNING), ("uvicorn.access", logging.INFO))


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is now: while a terminal shows how far a start is, that is not the plain stream."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def log_to_stderr() -> None:
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    for name, level in _LEVELS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
