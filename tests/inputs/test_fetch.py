"""The fetcher against hostile servers and URLs: it sends nothing to addresses that are not allowed."""

import asyncio
import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.errors import RequestError
from saccade.inputs.media.fetch import Fetcher, FetchPolicy, is_public, parse_url, read_domains
from saccade.inputs.text.chat_messages import MediaRef
from tests.inputs.web import LIMIT_S, PUBLIC, answer, drip, live, serve, skip

BODY = b"picture" * 100


async def fetch(fetcher: Fetcher, url: str, *, max_bytes: int = 10_000, timeout_s: float = LIMIT_S) -> bytes:
    with MediaRef("image", url, "messages[0].content[1].image_url").named_in_errors():
        return await fetcher.fetch(url, max_bytes=max_bytes, timeout_s=timeout_s)


async def refusal(fetcher: Fetcher, url: str, *, max_bytes: int = 10_000, timeout_s: float = LIMIT_S) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await fetch(fetcher, url, max_bytes=max_bytes, timeout_s=timeout_s)
    assert caught.value.param == "messages[0].content[1].image_url"
    return caught.value


def test_a_public_picture_is_fetched_from_the_checked_address() -> None:
    async def test() -> None:
        async with serve(answer(BODY)) as web:
            assert await fetch(web.fetcher(), "http://Media.Test.:8080/a%20b/ü?q=1&r=[x]#part") == BODY
            assert web.dialled == [PUBLIC] and web.resolved == ["media.test"]
            assert web.requests == ["/a%20b/%C3%BC?q=1&r=[x]"]
            assert "\r\nHost: media.test:8080\r\n" in web.heads[0]
            assert "cookie" not in web.heads[0].lower() and "authorization" not in web.heads[0].lower()

    live(test())


def test_nothing_is_fetched_unless_allowed() -> None:
    async def test() -> None:
        async with serve(answer(BODY)) as web:
            closed = web.fetcher(allows_all=False)
            assert (await refusal(closed, "http://media.test/")).code == "media_not_allowed"
            some = web.fetcher(allows_all=True, domains=frozenset({"a.org", "*.b.org"}))
            for host in ("media.test", "b.org", "xa.org", "a.org.media.test", "b.org.evil.com", "93.184.215.14"):
                assert (await refusal(some, f"http://{host}/")).code == "media_not_allowed"
            assert web.connections == 0 and web.resolved == []

    live(test())


def test_a_star_allows_all_subdomains() -> None:
    async def test() -> None:
        async with serve(answer(BODY)) as web:
            names = {name: [[PUBLIC]] for name in ("a.org", "x.b.org", "x.y.b.org")}
            some = web.fetcher(names=names, allows_all=False, domains=read_domains(" A.org., *.b.org,"))
            for name in names:
                assert await fetch(some, f"http://{name}/") == BODY

    live(test())


def test_an_ipv6_address_keeps_its_brackets() -> None:
    async def test() -> None:
        async with serve(answer(b"", "302 Found", Location="/there")) as web:
            fetcher, dialled = web.fetcher(max_redirects=1), list[str]()
            inner = fetcher._dial

            async def dial(address: str, port: int) -> Any:
                dialled.append(address)
                return await inner(PUBLIC, port)

            fetcher._dial = dial
            await refusal(fetcher, "http://[2606:4700:0::1111]:8080/here")
            assert web.requests == ["/here", "/there"] and dialled == ["2606:4700::1111"] * 2 and not web.resolved
            assert all("\r\nHost: [2606:4700::1111]:8080\r\n" in head for head in web.heads)

    live(test())


PRIVATE = (
    *("127.0.0.1", "127.1.2.3", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0"),
    *("100.100.100.200", "168.63.129.16", "192.0.0.192", "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1"),
    *("::1", "::", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1", "::ffff:7f00:1"),
    *("::ffff:169.254.169.254", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2002:7f00:1::1"),
    *("::127.0.0.1", "2001:0:7f00:1::", "2001:db8::1", "fe80::1%eth0", "2001:4860::1%1", "100::1", "fec0::1"),
    *("255.255.255.255", "nonsense", ""),
)  # fmt: skip
OPEN = ("8.8.8.8", "93.184.215.14", "1.1.1.1", "2606:4700::1111", "2a00:1450:4001:800::200e", "64:ff9b::808:808")


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


def test_public_addresses_are_public_even_if_mapped() -> None:
    assert all(map(is_public, (*OPEN, "::ffff:8.8.8.8")))


@pytest.mark.parametrize("address", [a for a in PRIVATE if a not in ("nonsense", "")])
def test_a_host_with_a_private_address_is_refused_before_anything_is_sent(address: str) -> None:
    async def test() -> None:
        async with serve(answer(BODY)) as web:
            for found in ([address], [PUBLIC, address], [address, PUBLIC]):
                error = await refusal(web.fetcher(names={"media.test": [found]}), "http://media.test/")
                assert error.code == "media_not_allowed" and address not in str(error)
            assert web.dialled == [] and web.connections == 0

    live(test())


TRICKS = (
    "http://127.0.0.1/",
    "http://localhost/",
    "http://LOCALHOST./",
    "http://2130706433/",
    "http://0x7f000001/",
    "http://0x7f.0.0.1/",
    "http://0177.0.0.1/",
    "http://127.1/",
    "http://127.0.0.1./",
    "http://0/",
    "http://00000000000.0.0.0/",
    "http://1.1.1.256/",
    "http://[::1]/",
    "http://[::ffff:127.0.0.1]/",
    "http://[::ffff:7f00:1]/",
    "http://[0:0:0:0:0:ffff:169.254.169.254]/latest/meta-data/",
    "http://[fe80::1%25eth0]/",
    "http://169.254.169.254/latest/meta-data/",
    "http://metadata.google.internal/",
    "http://media.test@127.0.0.1/",
    "http://127.0.0.1@media.test/",
    "http://user:pass@media.test/",
    "http://media.test\\@127.0.0.1/",
    "http://127.0.0.1\\@media.test/",
    "http://media.test\\.evil/",
    "http:\\\\127.0.0.1/",
    "http:/127.0.0.1/",
    "http:127.0.0.1/",
    "http:///127.0.0.1/",
    "http://media.test:80:80/",
    "http://media.test:0/",
    "http://media.test:99999/",
    "http://media.test:80@127.0.0.1/",
    "http://media.test#@127.0.0.1/\r\nHost: x",
    "http://media.test/ HTTP/1.1\r\nX: y",
    "http://media.test/\tx",
    "http://media .test/",
    "http://①②⑦.⓪.⓪.①/",
    "http://127。0。0。1/",
    "http://media.test%2f@127.0.0.1/",
    "http://%31%32%37.0.0.1/",
    "http://",
    "http://?x",
    "http://-x/",
    "http://[]/",
    "http://[127.0.0.1]/",
    "gopher://media.test/",
    "ftp://media.test/",
    "file:///etc/passwd",
    "//media.test/",
    "media.test",
    "",
    "http://media.test/" + "a" * 10_000,
)


@pytest.mark.parametrize("url", TRICKS)
def test_tricky_urls_send_nothing(url: str) -> None:
    async def test() -> None:
        async with serve(answer(BODY)) as web:
            names = {"localhost": [["127.0.0.1", "::1"]], "metadata.google.internal": [["169.254.169.254"]]}
            error = await refusal(web.fetcher(names={**names, "media.test": [["127.0.0.1"]]}), url)
            assert error.code in ("media_not_allowed", "media_invalid_url", "media_fetch_failed")
            assert web.dialled == [] and web.connections == 0

    live(test())


def test_the_host_is_resolved_only_once() -> None:
    """DNS rebinding: the second answer would be the metadata service."""

    async def test() -> None:
        async with serve(answer(BODY)) as web:
            fetcher = web.fetcher(names={"media.test": [[PUBLIC], ["169.254.169.254"]]})
            assert await fetch(fetcher, "http://media.test/") == BODY
            assert web.resolved == ["media.test"] and web.dialled == [PUBLIC]
            assert (await refusal(fetcher, "http://media.test/")).code == "media_not_allowed"
            assert web.dialled == [PUBLIC]

    live(test())


def test_the_next_address_is_tried_if_one_is_down() -> None:
    async def test() -> None:
        async with serve(answer(BODY)) as web:
            inner = web.fetcher()._dial

            async def dial(address: str, port: int) -> object:
                if address != PUBLIC:
                    raise ConnectionRefusedError
                return await inner(address, port)

            fetcher = web.fetcher(names={"media.test": [["8.8.8.8", PUBLIC]]})
            fetcher._dial = dial  # type: ignore[assignment]
            assert await fetch(fetcher, "http://media.test/") == BODY

    live(test())


class TestRedirects:
    @pytest.mark.parametrize(
        "location",
        [
            "http://127.0.0.1/",
            "http://169.254.169.254/latest",
            "//127.0.0.1/x",
            "http://[::1]/",
            "http://rebind.test/",
            "file:///etc/passwd",
            "\\\\127.0.0.1\\x",
            "http://media.test\\@127.0.0.1/",
            "gopher://media.test/",
        ],
    )
    def test_redirects_to_the_internal_network_are_not_followed(self, location: str) -> None:
        async def test() -> None:
            async with serve(answer(b"", "302 Found", Location=location)) as web:
                fetcher = web.fetcher(names={"media.test": [[PUBLIC]], "rebind.test": [["10.0.0.1"]]}, max_redirects=1)
                assert (await refusal(fetcher, "http://media.test/")).status in (400, 424)
                assert set(web.dialled) == {PUBLIC}
                assert "127.0.0.1" not in web.dialled and all("passwd" not in path for path in web.requests)

        live(test())

    def test_a_redirect_to_another_host_needs_that_host_allowed(self) -> None:
        async def test() -> None:
            async with serve(answer(b"", "301 Moved", Location="http://other.test/")) as web:
                names = {"media.test": [[PUBLIC]], "other.test": [[PUBLIC]]}
                fetcher = web.fetcher(names=names, allows_all=False, domains=frozenset({"media.test"}))
                assert (await refusal(fetcher, "http://media.test/")).code == "media_not_allowed"
                assert web.connections == 1 and web.resolved == ["media.test"]

        live(test())

    def test_redirects_are_followed_a_few_times_and_checked_each_time(self) -> None:
        async def reply(path: str, writer: asyncio.StreamWriter) -> None:
            count = int(path.rpartition("/")[2] or 0)
            to = answer(BODY) if count == 3 else answer(b"", "307 Temporary Redirect", Location=f"/deep/{count + 1}")
            await to(path, writer)

        async def test() -> None:
            async with serve(reply) as web:
                assert await fetch(web.fetcher(max_redirects=3), "http://media.test/deep/0") == BODY
                assert web.requests == [f"/deep/{i}" for i in range(4)] and len(web.resolved) == 4
                assert "redirects more than 2" in str(
                    await refusal(web.fetcher(max_redirects=2), "http://media.test/deep/0")
                )
                assert (await refusal(web.fetcher(max_redirects=0), "http://media.test/deep/2")).status == 424

        live(test())

    @pytest.mark.parametrize("status", [301, 302, 303, 307, 308, 200, 201, 300, 304])
    def test_only_redirects_are_followed(self, status: int) -> None:
        is_redirect = status in (301, 302, 303, 307, 308)

        async def test() -> None:
            async with serve(answer(b"" if status == 304 else BODY, f"{status} Some", Location="/there")) as web:
                fetcher = web.fetcher(max_redirects=1)
                if status == 200:
                    assert await fetch(fetcher, "http://media.test/here") == BODY
                else:
                    assert ("redirects more" in str(await refusal(fetcher, "http://media.test/here"))) is is_redirect
                assert web.requests == (["/here", "/there"] if is_redirect else ["/here"])

        live(test())

    def test_rebinding_between_two_hops_is_caught(self) -> None:
        async def test() -> None:
            async with serve(answer(b"", "302 Found", Location="/again")) as web:
                fetcher = web.fetcher(names={"media.test": [[PUBLIC], ["127.0.0.1"]]})
                assert (await refusal(fetcher, "http://media.test/")).code == "media_not_allowed"
                assert web.dialled == [PUBLIC] and web.connections == 1

        live(test())


class TestBodies:
    def test_a_body_that_declares_too_many_bytes_is_not_read(self) -> None:
        async def test() -> None:
            async with serve(answer(b"x" * 100, Content_Length="1000000000000")) as web:
                error = await refusal(web.fetcher(), "http://media.test/", max_bytes=1000)
                assert error.status == 413 and "1000" in str(error)

        live(test())

    @pytest.mark.parametrize("has_length", [True, False])
    def test_a_body_of_exactly_the_allowed_size_is_read(self, has_length: bool) -> None:
        async def reply(path: str, writer: asyncio.StreamWriter) -> None:
            size = f"Content-Length: {len(BODY)}\r\n" if has_length else ""
            writer.write(f"HTTP/1.1 200 OK\r\n{size}Connection: close\r\n\r\n".encode() + BODY)

        async def test() -> None:
            async with serve(reply) as web:
                assert await fetch(web.fetcher(), "http://media.test/", max_bytes=len(BODY)) == BODY
                assert (await refusal(web.fetcher(), "http://media.test/", max_bytes=len(BODY) - 1)).status == 413

        live(test())

    def test_a_body_without_a_length_is_cut_off_at_the_limit(self) -> None:
        sent = 0

        async def reply(path: str, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            while sent < 500_000_000:
                writer.write(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
                sent += 0x10000
                await writer.drain()

        async def test() -> None:
            async with serve(reply) as web:
                assert (await refusal(web.fetcher(), "http://media.test/", max_bytes=100_000)).status == 413
                await asyncio.wait_for(web.closed.wait(), LIMIT_S)
            assert sent < 50_000_000

        live(test())

    def test_a_body_that_trickles_in_is_abandoned_at_the_deadline(self) -> None:
        async def reply(path: str, writer: asyncio.StreamWriter) -> None:
            asyncio.get_running_loop().call_later(0.1, skip, 30.0)
            await drip(path, writer)

        async def test() -> None:
            async with serve(reply) as web:
                error = await refusal(web.fetcher(), "http://media.test/", max_bytes=100_000, timeout_s=30.0)
                assert error.status == 504 and error.code == "media_fetch_timeout"
                await asyncio.wait_for(web.closed.wait(), LIMIT_S)

        live(test())

    def test_a_silent_server_is_abandoned_at_the_deadline(self) -> None:
        over = asyncio.Event()

        async def reply(path: str, writer: asyncio.StreamWriter) -> None:
            skip(30.0)
            await over.wait()

        async def test() -> None:
            async with serve(reply) as web:
                assert (await refusal(web.fetcher(), "http://media.test/", timeout_s=30.0)).status == 504
                over.set()

        live(test())

    @pytest.mark.parametrize("status, expected", [("404 Not Found", 400), ("500 Oops", 424), ("204 No Content", 424)])
    def test_other_statuses_are_errors(self, status: str, expected: int) -> None:
        async def test() -> None:
            async with serve(answer(b"secret page", status)) as web:
                error = await refusal(web.fetcher(), "http://media.test/")
                assert error.status == expected and "secret" not in str(error)

        live(test())

    def test_compressed_bodies_are_refused(self) -> None:
        async def test() -> None:
            async with serve(answer(b"\x1f\x8b", Content_Encoding="gzip")) as web:
                assert (await refusal(web.fetcher(), "http://media.test/")).code == "media_fetch_failed"

        live(test())

    @pytest.mark.parametrize("seed", range(4))
    def test_garbage_is_an_error_with_a_fixed_text(self, seed: int) -> None:
        random = Random(seed)
        begin = b"" if seed % 2 else b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

        async def reply(path: str, writer: asyncio.StreamWriter) -> None:
            writer.write(begin + random.randbytes(2000))

        async def test() -> None:
            async with serve(reply) as web:
                assert str(await refusal(web.fetcher(), "http://media.test/")) == "the URL could not be fetched"

        live(test())


def test_a_cancelled_fetch_closes_its_connection() -> None:
    started = asyncio.Event()

    async def reply(path: str, writer: asyncio.StreamWriter) -> None:
        started.set()
        await drip(path, writer)

    async def test() -> None:
        async with serve(reply) as web:
            task = asyncio.create_task(fetch(web.fetcher(), "http://media.test/"))
            await asyncio.wait_for(started.wait(), LIMIT_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(web.closed.wait(), LIMIT_S)
            assert web.open == 0

    live(test())


def test_proxy_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def test() -> None:
        async with serve(answer(BODY)) as web:
            assert await fetch(web.fetcher(), "http://media.test/") == BODY

    live(test())


def test_tls_verifies_the_name_although_the_connection_goes_to_an_address(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is needed to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=media.test"]
    subprocess.run([*command, "-addext", "subjectAltName=DNS:media.test"], check=True, capture_output=True, timeout=300)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    asked: list[str | None] = []
    server.sni_callback = lambda socket, name, context: asked.append(name)

    async def test() -> None:
        async with serve(answer(BODY), server) as web:
            names = {"media.test": [[PUBLIC]], "other.test": [[PUBLIC]]}
            client = ssl.create_default_context(cafile=certificate)
            assert await fetch(web.fetcher(names=names, ssl_context=client), "https://media.test/") == BODY
            assert asked == ["media.test"] and "\r\nHost: media.test\r\n" in web.heads[0]
            wrong = web.fetcher(names=names, ssl_context=client)
            assert (await refusal(wrong, "https://other.test/")).code == "media_fetch_failed"
            unknown = web.fetcher(names=names)
            assert (await refusal(unknown, "https://media.test/")).code == "media_fetch_failed"
            assert len(web.requests) == 1

    live(test())


def test_redirects_from_https_to_http_are_refused() -> None:
    fetcher = Fetcher(FetchPolicy(allows_all=True))

    async def ask(*args: object) -> str:
        return "http://media.test/"

    fetcher._ask = ask  # type: ignore[method-assign, assignment]

    async def test() -> None:
        assert (await refusal(fetcher, "https://media.test/")).code == "media_not_allowed"

    live(test())


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60) | st.text(alphabet="htp:/\\@[]127.0x#?%ab", max_size=40).map(lambda s: "http://" + s))
def test_every_url_that_parses_has_a_plain_host(text: str) -> None:
    try:
        address = parse_url(text)
    except RequestError:
        return
    assert not set(address.host) & set("/\\@[]#?% ") and address.host == address.host.lower()
    assert address.target.startswith("/") and not any(c <= " " for c in address.target)
    assert parse_url(address.url) == address


def test_slow_lookups_delay_only_other_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup cannot be cancelled. After a timeout it keeps its thread, so nothing else may need that thread."""
    release = threading.Event()

    def slow(*args: Any, **more: Any) -> list[Any]:
        assert release.wait(LIMIT_S)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", slow)

    async def run() -> None:
        fetcher = Fetcher(FetchPolicy(allows_all=True))
        try:
            asked = [fetcher.fetch(f"https://a{i}.test/", max_bytes=10, timeout_s=0.05) for i in range(50)]
            found = await asyncio.gather(*asked, return_exceptions=True)
            assert {getattr(error, "code", None) for error in found} == {"media_fetch_timeout"}
            assert await asyncio.wait_for(asyncio.to_thread(lambda: "at once"), LIMIT_S) == "at once"
        finally:
            release.set()
            fetcher.close()

    live(run())
