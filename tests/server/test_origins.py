"""Web pages of other sites cannot use a local server, and clients other than browsers notice nothing."""

import asyncio
from typing import Any

import pytest

from saccade.errors import ConfigError
from saccade.server.http.origins import OriginRules, is_foreign_page
from saccade.server.server_settings import ServerSettings
from tests.server.fake import Answer, Caller, FakeEngine, service_for

CHAT = "/v1/chat/completions"
BODY = b'{"messages":[{"role":"user","content":"hi"}]}'
JSON = {"content-type": "application/json"}


def code(found: Answer) -> str:
    return "" if found.status == 200 else str(found.json["error"]["code"])


def ask(engine: FakeEngine, headers: dict[str, str], method: str = "POST", path: str = CHAT, **settings: Any) -> Answer:
    caller = Caller(service_for(engine, **settings))
    return asyncio.run(caller.call(method, path, BODY if method == "POST" else b"", headers))


OWN = [
    "localhost",
    "localhost:8000",
    "a.localhost:1",
    "127.0.0.1:8000",
    "[::1]:8000",
    "10.0.0.7",
    "host.docker.internal",
]
OTHERS = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "box",
    "notlocalhost",
]


@pytest.mark.parametrize("host", OWN)
def test_local_host_names_are_answered(engine: FakeEngine, host: str) -> None:
    assert ask(engine, {"host": host, **JSON}).status == 200


@pytest.mark.parametrize("host", OTHERS)
def test_other_host_names_are_refused_except_for_probes(engine: FakeEngine, host: str) -> None:
    for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/"), ("GET", "/metrics")):
        found = ask(engine, {"host": host, **JSON}, method, path)
        assert found.status == 403 and code(found) == "host_not_allowed", path
        assert f"--allowed-hosts {host.partition(':')[0]}" in found.json["error"]["message"]
    assert ask(engine, {"host": host}, "GET", "/health").status == 200
    assert not engine.seen


def test_a_malformed_host_is_refused(engine: FakeEngine) -> None:
    for host in ("]", "a/health?", "\\@/health", "a b", "localhost:99999999"):
        assert code(ask(engine, {"host": host, **JSON})) == "invalid_host"


@pytest.mark.parametrize(
    ("settings", "allowed", "refused"),
    [
        (
            {"allowed_hosts": ("api.example.com",)},
            ["api.example.com:443", "API.example.com.", "localhost"],
            ["b.example"],
        ),
        ({"allowed_hosts": ("*.example.com",)}, ["a.example.com", "a.b.example.com"], ["example.com", "aexample.com"]),
        ({"allowed_hosts": ("*",)}, ["evil.example", "]"], []),
        ({"host": "0.0.0.0"}, ["box:8000", "saccade", "10.1.2.3:8000", "gpu.local"], ["evil.example"]),
        ({"host": "0.0.0.0", "api_key": ("k",)}, ["api.example.com", "evil.example"], []),
        ({"host": "0.0.0.0", "api_key": ("k",), "allowed_hosts": ("a.example",)}, ["a.example"], ["b.example"]),
        ({"host": "127.0.0.1", "api_key": ("k",)}, ["localhost"], ["evil.example"]),
        ({"uds": "/tmp/s"}, ["anything.example"], []),
    ],
)
def test_the_settings_decide_which_host_names_are_answered(
    engine: FakeEngine, settings: dict[str, Any], allowed: list[str], refused: list[str]
) -> None:
    more = {"authorization": "Bearer k", **JSON}
    for host in allowed:
        assert ask(engine, {"host": host, **more}, **settings).status == 200, host
    for host in refused:
        assert code(ask(engine, {"host": host, **more}, **settings)) == "host_not_allowed", host


@pytest.mark.parametrize("kind", [{}, {"content-type": "text/plain"}, JSON])
@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://localhost:3000", "null", "http://evil.example:8000"]
)
def test_a_page_of_another_origin_reaches_nothing(engine: FakeEngine, origin: str, kind: dict[str, str]) -> None:
    for path in (CHAT, "/v1/completions", "/generate", "/flush_cache", "/abort_request", "/tokenize", "/ping"):
        found = ask(engine, {"host": "localhost:8000", "origin": origin, **kind}, path=path, admin_api_key="")
        assert found.status == 403, path
    found = ask(engine, {"host": "localhost:8000", "origin": origin}, "GET", "/flush_cache")
    assert code(found) == "origin_not_allowed" and "--allowed-origins" in found.json["error"]["message"]
    assert not engine.seen and not engine.num_flushes


def test_a_page_without_an_origin_is_recognized_by_sec_fetch_site(engine: FakeEngine) -> None:
    """An image or a link on another site's page is a GET without an Origin."""
    for site in ("cross-site", "same-site"):
        found = ask(engine, {"host": "localhost", "sec-fetch-site": site}, "GET", "/flush_cache")
        assert code(found) == "origin_not_allowed" and not engine.num_flushes
    assert ask(engine, {"host": "localhost", "sec-fetch-site": "cross-site"}, "GET", "/").status == 200, "a link to it"
    assert ask(engine, {"host": "localhost", "sec-fetch-site": "none"}, "GET", "/flush_cache").status == 200


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1:8000", "[::1]:8000"])
def test_the_servers_own_page_may_call(engine: FakeEngine, host: str) -> None:
    assert ask(engine, {"host": host, "origin": f"http://{host}", **JSON}).status == 200
    behind_proxy = {"host": "127.0.0.1:8000", "origin": "https://chat.example", "sec-fetch-site": "same-origin"}
    assert ask(engine, {**behind_proxy, **JSON}).status == 200
    untyped = ask(engine, {"host": host, "origin": f"http://{host}"})
    assert untyped.status == 415, "without a type, browsers send no preflight request"


def test_allowed_origins_may_call(engine: FakeEngine) -> None:
    headers = {"host": "localhost", "origin": "https://a.example", **JSON}
    for allowed in ('["https://a.example"]', "*"):
        found = ask(engine, headers, allowed_origins=allowed)
        assert found.status == 200 and found.headers["access-control-allow-origin"] in ("https://a.example", "*")
    found = ask(engine, {**headers, "origin": "https://b.example"}, allowed_origins="https://a.example")
    assert code(found) == "origin_not_allowed"


def test_clients_other_than_browsers_need_no_origin(engine: FakeEngine) -> None:
    for headers in ({}, JSON, {"content-type": "application/vnd.api+json"}, {"host": "127.0.0.1:8000"}):
        assert ask(engine, headers).status == 200
    assert ask(engine, {"content-type": "text/plain"}).status == 415
    assert ask(engine, {"content-type": "application/x-www-form-urlencoded"}, path="/flush_cache").status == 415
    assert ask(engine, {"origin": "chrome-extension://abcdef", **JSON}).status == 200


def test_origins_are_compared_as_browsers_write_them() -> None:
    same = [
        ("http://a", "a"),
        ("http://a", "a:80"),
        ("https://a", "a"),
        ("https://a:8443", "a:8443"),
        ("http://[::1]:1", "[::1]:1"),
    ]
    other = [
        ("http://a:81", "a"),
        ("http://b", "a"),
        ("https://a.b", "a"),
        ("http://a:x", "a"),
        ("http://a", ""),
        ("", "a"),
    ]
    assert not [pair for pair in same if is_foreign_page(*pair)]
    assert all(is_foreign_page(*pair) for pair in other)


def test_malformed_allowed_hosts_are_refused() -> None:
    for name in ("http://a", "a:80", "a/b", "", "*a"):
        with pytest.raises(ConfigError, match="--allowed-hosts"):
            ServerSettings(allowed_hosts=(name,))
    OriginRules(ServerSettings(allowed_hosts=("a-b.example", "10.0.0.1")), has_keys=False)


def test_the_page_runs_only_its_own_script(engine: FakeEngine) -> None:
    for path in ("/", "/page/main.js", "/page/style.css"):
        found = ask(engine, {"host": "localhost"}, "GET", path)
        policy = dict(rule.split(" ", 1) for rule in found.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
        assert policy["script-src"] == policy["style-src"] == "'self'" and policy["trusted-types"] == "'none'"
        assert found.headers["x-frame-options"] == "DENY" and found.headers["x-content-type-options"] == "nosniff"
        tag = found.headers["etag"]
        again = ask(engine, {"host": "localhost", "if-none-match": tag}, "GET", path)
        assert again.status == 304 and not again.body
    assert ask(engine, {}, "GET", "/version").headers["x-content-type-options"] == "nosniff"
