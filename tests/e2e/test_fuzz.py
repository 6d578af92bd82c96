"""Requests made up from the server's own schema, right ones and wrong ones: never a 5xx, never a hang, one envelope."""

import os
from datetime import timedelta
from typing import Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from saccade.server.operators.openapi import GETS, POSTS, build_document
from tests.e2e.process import ServerProcess

BOUND_S = 120.0
EXAMPLES = int(os.environ.get("SACCADE_FUZZ_EXAMPLES", "8"))
SETTINGS = settings(
    max_examples=EXAMPLES,
    deadline=timedelta(seconds=BOUND_S),
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def schema(mode: GenerationMode) -> Any:
    loaded = schemathesis.openapi.from_dict(build_document())
    loaded.config.generation.update(modes=[mode])
    return loaded


def short(body: Any) -> Any:
    """Answers of a few tokens, so that a request costs what its checks cost."""
    if isinstance(body, dict):
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            is_missing = name not in body and name != "max_completion_tokens"
            if is_missing or (isinstance(body.get(name), int) and body[name] > 4):
                body = body | {name: 4}
        params = body.get("sampling_params")
        if isinstance(params, dict) and isinstance(params.get("max_new_tokens", 128), int):
            body = body | {"sampling_params": params | {"max_new_tokens": 4}}
    return body


def check(reply: httpx2.Response) -> None:
    assert reply.status_code < 500, f"{reply.status_code}: {reply.text}"
    assert reply.headers["x-request-id"]
    if reply.status_code >= 400:
        error = reply.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"} and error["message"]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["right", "wrong"])
@pytest.mark.parametrize("path", [path for path in POSTS if path != "/abort_request"])
def test_posts_never_break(server: ServerProcess, http: httpx2.Client, path: str, mode: GenerationMode) -> None:
    operation = schema(mode)[path]["POST"]

    @SETTINGS
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        headers = {"content-type": "application/json"}
        try:
            check(http.post(path, json=short(case.body), headers=headers, timeout=BOUND_S))
        except (TypeError, ValueError):  # the generator left the body out, or made what JSON cannot write
            check(http.post(path, content=b"", headers=headers, timeout=BOUND_S))

    run()


@SETTINGS
@given(
    path=st.sampled_from(sorted({*GETS, *POSTS, "/", "/v1/models/x"})),
    method=st.sampled_from(["GET", "PUT", "PATCH", "OPTIONS", "HEAD"]),
)
def run_methods(http: httpx2.Client, path: str, method: str) -> None:
    reply = http.request(method, path, timeout=BOUND_S)
    assert reply.status_code < 500
    if reply.status_code >= 400 and method != "HEAD":
        check(reply)


def test_methods_never_break(http: httpx2.Client) -> None:
    run_methods(http)


def test_the_document_describes_what_is_served(http: httpx2.Client) -> None:
    found = http.get("/openapi.json").json()
    assert found == build_document()
    for path in GETS:
        assert http.get(path).status_code in (200, 403), path
