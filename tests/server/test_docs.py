import asyncio
import re

import orjson
import pytest
from starlette.routing import Route

from saccade.server.app import build_app
from saccade.server.operators.openapi import POSTS, build_document
from saccade.server.page.page_files import page_files
from saccade.server.requests.reading import read_request
from tests.server.fake import Caller, FakeEngine, service_for

PAGES = {"/", "/docs", "/openapi.json", "/page/{name}"}


def test_the_page_needs_no_key_and_runs_only_its_own_script(engine: FakeEngine) -> None:
    found = asyncio.run(Caller(service_for(engine, api_key=("right",))).get("/docs"))
    assert found.status == 200 and found.headers["content-type"].startswith("text/html")
    policy = found.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "script-src 'self'; style-src 'self';" in policy


def test_the_page_loads_nothing_from_elsewhere() -> None:
    text = page_files()["docs.html"].data.decode()
    assert not re.search(r"https?:|\sstyle=|\son\w+=", text), "the policy forbids all"
    assert set(re.findall(r'(?:href|src)="(?!#)([^"]+)"', text)) <= {f"page/{name}" for name in page_files()} | {
        "./",
        "openapi.json",
    }


def test_every_route_is_in_the_document(engine: FakeEngine) -> None:
    routes = [route for route in build_app(service_for(engine)).routes if isinstance(route, Route)]
    served = {route.path.replace(":path", "") for route in routes} - PAGES
    assert served == build_document()["paths"].keys()


@pytest.mark.parametrize("path", sorted(POSTS))
def test_every_example_is_a_valid_request(path: str) -> None:
    kind, _, example = POSTS[path]
    _, ignored = read_request(kind, orjson.dumps(example), 10_000)
    assert not ignored


def test_examples_are_answered(engine: FakeEngine) -> None:
    caller = Caller(service_for(engine))

    async def run() -> None:
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/generate"):
            found = await caller.post(path, POSTS[path][2])
            assert found.status == 200, found.body

    asyncio.run(run())
