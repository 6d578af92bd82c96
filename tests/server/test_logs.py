"""What the server writes to its log, and what that costs the event loop."""

import asyncio
import logging
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from saccade.errors import CapacityError, RequestError
from saccade.server.front_end import log_to_stderr
from saccade.server.http_errors import HttpError, explain
from tests.server.fake import Caller, FakeEngine, service_for

FULL = CapacityError("6 requests are running and waiting, which is the limit; try again later", retry_after_s=1)
MAX_CALLS = 100  # Python calls for one line; formatting it as a table takes thousands


@pytest.fixture(autouse=True)
def _logging() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("saccade", "uvicorn")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    log_to_stderr()
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def num_calls(error: Exception) -> int:
    found = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal found
        found += event == "call"

    sys.setprofile(count)
    try:
        explain(error, "an-id")
    finally:
        sys.setprofile(None)
    return found


def test_a_refusal_is_one_plain_line(capsys: pytest.CaptureFixture[str]) -> None:
    explain(FULL, "an-id")
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(f"WARNING request an-id: {FULL}"), "a full server works as intended: not an error"


def test_a_refusal_costs_the_event_loop_little(capsys: pytest.CaptureFixture[str]) -> None:
    explain(FULL, "the first one looks up levels and time zones")
    assert num_calls(FULL) < MAX_CALLS and "an-id" in capsys.readouterr().err


def test_internal_errors_are_logged_with_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise KeyError("inside")
    except KeyError as error:
        explain(error, "an-id")
    said = capsys.readouterr().err
    assert "ERROR request an-id: something went wrong" in said and "Traceback" in said and "KeyError: 'inside'" in said


@pytest.mark.parametrize(
    "error",
    [
        RequestError("the body is not valid JSON", code="invalid_json"),
        RequestError("the body has more than 5 values", status=413),
        HttpError(403, "this request came from a web page of another origin", code="origin_not_allowed"),
        HttpError(429, "this caller used more than 5 tokens a minute", retry_after_s=1),
        TimeoutError(),
    ],
)
def test_client_errors_are_not_logged(capsys: pytest.CaptureFixture[str], error: Exception) -> None:
    assert explain(error, "an-id").status < 500
    assert capsys.readouterr().err == ""


def test_the_access_log_has_the_id_of_each_request_and_no_query(capsys: pytest.CaptureFixture[str]) -> None:
    caller = Caller(service_for(None, access_log=True))
    headers = {"x-request-id": "an-id"}
    asyncio.run(caller.call("GET", "/v1/models\nforged", b"", headers, query=b"key=secret"))
    [line] = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r'.* INFO \S+ - "GET /v1/models%0Aforged" 404 an-id', line)
    pages = Caller(service_for(None, access_log=True, allowed_origins="https://a.example"))
    asked = {"origin": "https://b.example", "access-control-request-method": "POST"}
    asyncio.run(pages.call("OPTIONS", "/v1/models", b"", asked))
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith('"OPTIONS /v1/models" 400 -'), "CORS refused it"
    asyncio.run(Caller(service_for(None)).get("/v1/models"))
    assert capsys.readouterr().err == ""


def test_the_access_log_says_that_a_client_left(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    async def leave() -> None:
        gone = asyncio.Event()
        gone.set()
        caller = Caller(service_for(engine, access_log=True))
        headers = {"content-type": "application/json", "x-request-id": "an-id"}
        await caller.call("POST", "/v1/completions", b"{", headers, gone=gone, is_endless=True)

    asyncio.run(leave())
    assert capsys.readouterr().err.endswith('"POST /v1/completions" 499 an-id\n')
