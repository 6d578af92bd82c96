"""Who may call what: keys, odd paths, odd headers, cross-origin calls."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.routing import Route

from saccade.server.app import build_app
from saccade.server.http.auth import ADMIN_PATHS, Keys
from saccade.server.http_errors import HttpError
from tests.server.fake import Caller, FakeEngine, service_for

Scripted = Callable[..., tuple[Caller, FakeEngine, object]]
OPEN = {"/", "/docs", "/page/main.js", "/health", "/ready"}
HOSTS = ["", "]", "/health", "a/health?", "localhost:99999999", "\\@/health", "health/../v1"]


def routes() -> list[tuple[str, str]]:
    app = build_app(service_for(None))
    return [
        (method, route.path.replace("{name:path}", "m").replace("{name}", "main.js"))
        for route in app.routes
        if isinstance(route, Route)
        for method in sorted((route.methods or set()) - {"HEAD"})
    ]


@pytest.mark.parametrize(("method", "path"), routes())
def test_every_route_except_health_and_the_page_needs_a_key(engine: FakeEngine, method: str, path: str) -> None:
    service = service_for(engine, api_key=("right", "other"), admin_api_key="boss")
    caller = Caller(service)

    async def run() -> None:
        for host in HOSTS:
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "right"}, {"x_api_key": "righ"}):
                found = await caller.call(method, path, b"{}", {"host": host, **headers})
                if path in OPEN:
                    is_page = path in ("/", "/docs", "/page/main.js")
                    assert found.status == 200 or (is_page and found.json["error"]["code"] == "invalid_host")
                else:
                    assert found.status == 401 and found.json["error"]["code"] == "invalid_api_key"
        for headers in ({"authorization": "bearer right"}, {"x-api-key": "other"}):
            found = await caller.call(method, path, b"{}", headers)
            assert found.status == 403 if path in ADMIN_PATHS else found.status != 401
        assert (await caller.call(method, path, b"{}", {"authorization": "Bearer boss"})).status not in (401, 403)

    asyncio.run(run())


def test_no_spelling_of_a_path_gets_around_the_key(engine: FakeEngine) -> None:
    caller = Caller(service_for(engine, api_key=("right",)))

    async def run() -> None:
        for path in ("/health/", "//health", "/health/../v1/models", "/HEALTH", "/ready\0", "/v1/models;/health"):
            found = await caller.get(path)
            assert found.status == 401, path

    asyncio.run(run())


def test_the_page_needs_no_key_and_reveals_nothing_about_the_server(engine: FakeEngine) -> None:
    """It has a field for the key and sends that key with its own requests."""
    asked: dict[str, Any] = {"api_key": ("right",), "served_model_name": ("hidden-name",)}
    for path, kind in (("/", "text/html"), ("/page/main.js", "text/javascript"), ("/page/style.css", "text/css")):
        found, other = (asyncio.run(Caller(service_for(engine, **more)).get(path)) for more in (asked, {}))
        assert found.status == 200 and found.headers["content-type"].startswith(kind)
        assert found.body == other.body and b"hidden-name" not in found.body


def test_only_the_pages_own_files_can_be_read(engine: FakeEngine) -> None:
    open_caller, caller = Caller(service_for(engine)), Caller(service_for(engine, api_key=("right",)))
    for name in ("../ops.py", "..%2fops.py", "/etc/passwd", "", ".", "main.js/", "MAIN.JS", "main.js\0", "none.js"):
        assert asyncio.run(open_caller.get(f"/page/{name}")).status == 404, name
        assert asyncio.run(caller.get(f"/page/{name}")).status == 401, name


def test_administrative_routes_are_closed_without_an_admin_key(engine: FakeEngine) -> None:
    caller = Caller(service_for(engine))

    async def run() -> None:
        for headers in ({}, {"authorization": "Bearer "}, {"authorization": "Bearer x"}):
            assert (await caller.get("/server_info", **headers)).status == 403

    asyncio.run(run())


def test_a_root_path_does_not_change_who_may_call_what(engine: FakeEngine) -> None:
    caller = Caller(service_for(engine, api_key=("right",), root_path="/vlm"))

    async def run() -> None:
        assert (await caller.get("/vlm/health")).status != 401
        assert (await caller.get("/vlm/v1/models")).status == 401

    asyncio.run(run())


def test_keys_are_not_kept_in_plain_text() -> None:
    keys = Keys({"secret-one": "one"}, "secret-two")
    assert "secret" not in repr(vars(keys))
    with pytest.raises(HttpError):
        keys.check("/v1/models", {b"authorization": b"Bearer secret-ONE"})
    assert keys.check("/v1/models", {b"authorization": b"Bearer  secret-one "}) == "one"


def test_pages_of_other_origins_may_call_only_when_allowed(engine: FakeEngine) -> None:
    closed, open_ = Caller(service_for(engine)), Caller(service_for(engine, allowed_origins='["https://a.example"]'))
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}

    async def run() -> None:
        path = "/v1/chat/completions"
        assert "access-control-allow-origin" not in (await closed.call("OPTIONS", path, b"", asked)).headers
        found = await open_.call("OPTIONS", path, b"", asked)
        assert found.status == 200 and found.headers["access-control-allow-origin"] == "https://a.example"
        stainless = {**asked, "access-control-request-headers": "authorization,x-stainless-lang,x-stainless-os"}
        assert (await open_.call("OPTIONS", path, b"", stainless)).status == 200, "what OpenAI's client asks for"
        other = await open_.call("OPTIONS", path, b"", {**asked, "origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers

    asyncio.run(run())


def test_overlong_headers_are_refused(engine: FakeEngine) -> None:
    caller = Caller(service_for(engine, max_header_bytes=2048))

    async def run() -> None:
        found = await caller.get("/version", x="a" * 3000)
        assert found.status == 431 and found.json["error"]["code"] == "headers_too_large"

    asyncio.run(run())
