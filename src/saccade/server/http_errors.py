"""Error replies: OpenAI's nested envelope with our own fixed texts. Messages from other libraries go to the log, not to
the client. There are two exceptions, both about what the client wrote: one bounded, printable line from llguidance
about a grammar (see `wire.grammar`), and pydantic's names of types and limits (see `reading`)."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import orjson
from starlette.responses import Response

from saccade.errors import CapacityError, ConfigError, EngineDeadError, RankGoneError, RequestError, SaccadeError

log = logging.getLogger("saccade.server")

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
}
MAX_SHOWN = 128  # longest client-supplied name that is echoed


class HttpError(SaccadeError):
    """`should_retry=False` tells clients that the same request will fail again."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        should_retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.retry_after_s, self.should_retry = retry_after_s, should_retry

    def envelope(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        found = {}
        if self.retry_after_s is not None:
            found["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.should_retry is not None:
            found["x-should-retry"] = "true" if self.should_retry else "false"
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        return found

    def response(self, body: dict[str, Any]) -> Response:
        return Response(orjson.dumps(body), self.status, headers=self.headers(), media_type="application/json")


class ClientGoneError(Exception):
    """The client is gone; nobody waits for the reply."""


def starting() -> HttpError:
    return HttpError(503, "the model is still being loaded", code="starting", retry_after_s=5)


def draining() -> HttpError:
    return HttpError(503, "the server is shutting down", code="shutting_down", retry_after_s=5)


def engine_dead(reason: str = "") -> HttpError:
    text = reason or "the engine died; the server must be restarted"
    return HttpError(503, text, code="engine_dead", retry_after_s=30)


def engine_restarting() -> HttpError:
    text = "the engine died while it had this request, and is being restarted; send the request again"
    return HttpError(503, text, code="engine_dead", retry_after_s=5)


def too_late() -> HttpError:
    return HttpError(408, "the request's deadline has passed", code="deadline_exceeded", should_retry=False)


def no_route(path: str, known: Sequence[str]) -> HttpError:
    text = f"there is no route {quoted(path)}; the routes are {', '.join(known)}"
    return HttpError(404, text, code="unknown_route")


def no_method(method: str, path: str, allowed: str) -> HttpError:
    return HttpError(405, f"the route {quoted(path)} takes {allowed}, not {quoted(method)}", code="unknown_route")


def no_model(name: str, known: Sequence[str]) -> HttpError:
    text = f"the model {quoted(name)} is not served here; the server has {', '.join(known)}"
    return HttpError(404, text, code="model_not_found", param="model")


def quoted(name: str) -> str:
    """A client-supplied name, if it is short and printable."""
    return name if len(name) <= MAX_SHOWN and name.isascii() and name.isprintable() else "with this name"


def aborted() -> HttpError:
    return HttpError(500, "the request was aborted by an administrator", code="aborted", should_retry=False)


def to_http(error: BaseException, request_id: str) -> HttpError:
    match error:
        case HttpError():
            return error
        case RequestError():
            return HttpError(error.status, str(error), code=error.code or "invalid_value", param=error.param)
        case CapacityError():
            return HttpError(503, str(error), code="queue_full", retry_after_s=error.retry_after_s)
        case RankGoneError():
            return engine_dead(str(error))
        case EngineDeadError():
            return engine_dead()
        case TimeoutError():
            return too_late()
        case ConfigError():  # the checkpoint lacks what the request needs
            return HttpError(400, str(error), code="unsupported")
        case _:
            text = f"something went wrong inside the server; its log has details under request {request_id}"
            return HttpError(500, text, code="internal_error", should_retry=False)


def explain(error: Exception, request_id: str) -> HttpError:
    """The error to send to the client; details go to the log."""
    found = to_http(error, request_id)
    if found.status >= 500 and not isinstance(error, HttpError):
        level = logging.WARNING if isinstance(error, CapacityError) else logging.ERROR
        log.log(level, "request %s: %s", request_id, found, exc_info=error if found.code == "internal_error" else None)
    return found
