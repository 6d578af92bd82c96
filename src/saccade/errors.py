"""The errors Saccade raises on purpose. Each says what was found, what is allowed and which setting to change.

SaccadeError
├── ConfigError        a setting, a checkpoint or the machine does not fit; the command line exits with 2
├── RequestError       one request is wrong; `param` names the field (HTTP 400, or its `status`)
├── CapacityError      full for now, try again later (HTTP 503 with Retry-After)
├── EngineDeadError    the engine's process is gone or closing (HTTP 503)
│   └── RankGoneError  one of its ranks is gone or hangs; clients may see which
├── PanicError         a Rust library panicked; only the call that it was handling failed
└── GraphError         a graph was asked for something its capture does not allow
    ├── CaptureError   the body cannot be captured
    └── AddressError   a buffer that a graph reads or writes has moved since capture
"""

from collections.abc import Iterator
from contextlib import contextmanager


class SaccadeError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(SaccadeError):
    """A setting, a checkpoint or the machine does not fit."""


class RequestError(SaccadeError):
    """One request is wrong; others are unaffected. `status` is the HTTP status of the reply."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


def too_long(problem: str, max_model_len: int, *, has_answer: bool, param: str) -> RequestError:
    """In these words clients find out that they must shorten the conversation, or take another model."""
    answer = ", the answer included" if has_answer else ""
    limit = f"this model's maximum context length is {max_model_len} tokens{answer} (--max-model-len)"
    return RequestError(f"{problem}; {limit}", param=param, code="context_length_exceeded")


class CapacityError(SaccadeError):
    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDeadError(SaccadeError):
    """The engine's process is gone or closing; its requests are lost."""


class RankGoneError(EngineDeadError):
    """A rank of the engine is gone or does not respond. The text is safe to show to clients."""


class PanicError(SaccadeError):
    """A Rust library panicked. Only the call that it was handling failed."""


@contextmanager
def contained() -> Iterator[None]:
    """Turns the panic of a Rust library into an Exception. The libraries raise it as a BaseException, which would pass
    through every handler that keeps one request's failure from the others."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise PanicError("a library panicked; its message is on stderr") from None


class GraphError(SaccadeError):
    """A graph was asked for something its capture does not allow."""


class CaptureError(GraphError):
    """The body cannot be captured."""


class AddressError(GraphError):
    """A buffer that a graph reads or writes has moved since capture."""
