"""The only place that opens connections on behalf of a request.

One strict pattern parses a URL, once, and the connection uses the result. The host is resolved once, and nothing is
sent unless all of its addresses are public. The connection goes to a checked address and never resolves the name again,
while TLS still verifies the name. A redirect is a new URL that passes all checks. Proxy variables of the environment
are ignored, bodies are not decompressed, and limits on bytes and time apply as data arrives."""

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urljoin

import httpcore2

from saccade.errors import RequestError
from saccade.inputs.media.images import too_large

MAX_URL_CHARS = 8192
NAME_THREADS = 8
HEADERS = ((b"User-Agent", b"saccade"), (b"Accept", b"*/*"), (b"Accept-Encoding", b"identity"))
REDIRECTS = frozenset({301, 302, 303, 307, 308})

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
Dial = Callable[[str, int], Awaitable[httpcore2.AsyncNetworkStream]]

_URL = re.compile(
    r"(?P<scheme>https?)://"
    r"(?:\[(?P<six>[0-9a-f:.]{2,45})\]|(?P<name>[a-z0-9_](?:[a-z0-9._-]{0,252}[a-z0-9_])?\.?))"
    r"(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<target>[/?][^#]*)?(?:#.*)?",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.IGNORECASE)
# Addresses that only look public: metadata services, relays, tunnels, ranges missing from the standard library's lists.
_CLOSED = tuple(
    map(
        ipaddress.ip_network,
        (
            *("0.0.0.0/8", "100.64.0.0/10", "168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24", "198.18.0.0/15"),
            *("240.0.0.0/4", "64:ff9b:1::/48", "100::/64", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),
            *("5f00::/16", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8"),
        ),
    )
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class RemoteAddress:
    """All parts of a URL that a request needs, so that it is never parsed again."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def url(self) -> str:
        return f"{self.scheme}://{_bracketed(self.host)}:{self.port}{self.target}"


@dataclass(frozen=True, slots=True)
class FetchPolicy:
    """Which hosts are allowed: none, all, or only `domains` (`*.a.org` for all subdomains of a.org)."""

    allows_all: bool = False
    domains: frozenset[str] = frozenset()
    max_redirects: int = 3

    def allows(self, host: str) -> bool:
        if not self.domains:
            return self.allows_all
        parts = host.split(".")
        above = {"*." + ".".join(parts[i:]) for i in range(1, len(parts))}
        return host in self.domains or not self.domains.isdisjoint(above)


class Fetcher:
    """Fetches URLs for any number of tasks. Keeps no connection open between fetches."""

    def __init__(
        self,
        policy: FetchPolicy,
        *,
        resolve: Resolve | None = None,
        dial: Dial | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """Tests replace the system's resolver and connections with `resolve` and `dial`."""
        self.policy = policy
        self._resolve = resolve or self._look_up
        # Dedicated threads: a name lookup cannot be cancelled, and slow lookups must delay only other lookups.
        self._names = ThreadPoolExecutor(NAME_THREADS, thread_name_prefix="names")
        self._dial = dial or _dial
        self._ssl_context = ssl_context

    async def fetch(self, url: str, *, max_bytes: int, timeout_s: float) -> bytes:
        """Returns the body. Every failure is a RequestError with a fixed text."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._follow(url, max_bytes)
        except TimeoutError:
            message = f"the URL was not fetched within {timeout_s:g} s"
            raise RequestError(message, code="media_fetch_timeout", status=504) from None
        except RequestError:
            raise
        except Exception:  # a library's message may reveal the internal network
            raise _failed("the URL could not be fetched") from None

    def close(self) -> None:
        self._names.shutdown(wait=False, cancel_futures=True)

    async def _look_up(self, host: str, port: int) -> Sequence[str]:
        return await asyncio.get_running_loop().run_in_executor(self._names, _addresses, host, port)

    async def _follow(self, url: str, max_bytes: int) -> bytes:
        address = parse_url(url)
        for _ in range(self.policy.max_redirects + 1):
            answer = await self._ask(address, max_bytes)
            if isinstance(answer, bytes):
                return answer
            following = parse_url(urljoin(address.url, answer))
            if address.scheme == "https" and following.scheme != "https":
                raise _refused("the URL redirects from https to http")
            address = following
        raise _failed(f"the URL redirects more than {self.policy.max_redirects} times")

    async def _ask(self, address: RemoteAddress, max_bytes: int) -> bytes | str:
        """The body, or the redirect's target."""
        backend = _Pinned(await self._check(address), self._dial)
        if address.scheme == "https" and self._ssl_context is None:
            self._ssl_context = await asyncio.to_thread(ssl.create_default_context)
        url = httpcore2.URL(scheme=address.scheme, host=address.host, port=address.port, target=address.target)
        pool = httpcore2.AsyncConnectionPool(
            ssl_context=self._ssl_context, max_connections=1, max_keepalive_connections=0, network_backend=backend
        )
        host = (b"Host", _host_header(address).encode())
        async with pool, pool.stream("GET", url, headers=[host, *HEADERS]) as response:
            headers = {name.lower(): value.decode("latin-1") for name, value in response.headers}
            if response.status in REDIRECTS and b"location" in headers:
                return headers[b"location"]
            if response.status != 200:
                status = 400 if 400 <= response.status < 500 else 424
                raise _failed(f"the URL was answered with status {response.status}", status)
            if headers.get(b"content-encoding", "identity").strip().lower() not in ("", "identity"):
                raise _failed("the URL was answered with compressed data")
            return await _read(response, headers.get(b"content-length", ""), max_bytes)

    async def _check(self, address: RemoteAddress) -> Sequence[str]:
        """The addresses that may be connected to."""
        if not self.policy.allows_all and not self.policy.domains:
            hint = "the server does not fetch media (--allow-remote-media, --allowed-media-domains); send a data URL"
            raise _refused(hint)
        if not self.policy.allows(address.host):
            raise _refused("the URL's host is not allowed (--allowed-media-domains)")
        is_literal = ":" in address.host or address.host.replace(".", "").isdecimal()
        found = [address.host] if is_literal else await self._resolve(address.host, address.port)
        if not found:
            raise _failed("the URL's host has no address")
        if not all(map(is_public, found)):
            raise _refused("the URL's host is not a public address")
        return found


def parse_url(text: str) -> RemoteAddress:
    """The only parser of remote URLs. Refuses everything that is not plainly a host and a path."""
    is_plain = len(text) <= MAX_URL_CHARS and not any(char <= " " or char in "\\\x7f" for char in text)
    match = _URL.fullmatch(text) if is_plain else None
    if match is None:
        raise _invalid("the URL must be https://host[:port]/path or http://host[:port]/path")
    scheme = match["scheme"].lower()
    host = _read_host(match["six"], match["name"])
    port = int(match["port"] or (443 if scheme == "https" else 80))
    if not 1 <= port <= 65535:
        raise _invalid("the URL's port must be 1 to 65535")
    target = quote(match["target"] or "/", safe="%/?:@!$&'()*+,;=-._~[]|")
    return RemoteAddress(scheme, host, port, target if target.startswith("/") else f"/{target}")


def is_public(text: str) -> bool:
    """Whether an address is on the public internet. An embedded IPv4 address (mapped, NAT64) must be public too."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:  # not an address
        return False
    if isinstance(address, ipaddress.IPv6Address):
        if getattr(address, "scope_id", None):
            return False
        if address.ipv4_mapped is not None:
            return is_public(str(address.ipv4_mapped))
        if address in _NAT64:
            return is_public(str(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)))
    is_closed = any(address in network for network in _CLOSED if network.version == address.version)
    return address.is_global and not (is_closed or address.is_multicast or address.is_reserved)


def read_domains(text: str) -> frozenset[str]:
    return frozenset(name.strip().lower().rstrip(".") for name in text.split(",") if name.strip())


class _Pinned(httpcore2.AsyncNetworkBackend):
    """Connects only to the checked addresses, whatever host it is given."""

    def __init__(self, addresses: Sequence[str], dial: Dial) -> None:
        self._addresses, self._dial = addresses, dial

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        for address in self._addresses[:-1]:
            try:
                return await self._dial(address, port)
            except (OSError, httpcore2.NetworkError):
                continue
        return await self._dial(self._addresses[-1], port)


def _addresses(host: str, port: int) -> Sequence[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


async def _dial(address: str, port: int) -> httpcore2.AsyncNetworkStream:
    return await httpcore2.AnyIOBackend().connect_tcp(address, port)


async def _read(response: httpcore2.Response, length: str, max_bytes: int) -> bytes:
    if length.isdecimal() and len(length) < 20 and int(length) > max_bytes:
        raise too_large("the URL's body", max_bytes)
    parts, size = [], 0
    async for part in response.aiter_stream():
        size += len(part)
        if size > max_bytes:
            raise too_large("the URL's body", max_bytes)
        parts.append(part)
    return b"".join(parts)


def _read_host(six: str | None, name: str | None) -> str:
    """The host in lower case. A host that ends in a number is an address, accepted only in its canonical form."""
    plain = (name or "").lower().rstrip(".")
    try:
        if six:
            return str(ipaddress.IPv6Address(six))
        return str(ipaddress.IPv4Address(plain)) if _NUMBER.fullmatch(plain.rpartition(".")[2]) else plain
    except ValueError:
        raise _invalid("the URL's host is not an address") from None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _host_header(address: RemoteAddress) -> str:
    is_default = address.port == (443 if address.scheme == "https" else 80)
    return _bracketed(address.host) + ("" if is_default else f":{address.port}")


def _refused(message: str) -> RequestError:
    return RequestError(message, code="media_not_allowed")


def _invalid(message: str) -> RequestError:
    return RequestError(message, code="media_invalid_url")


def _failed(message: str, status: int = 424) -> RequestError:
    return RequestError(message, code="media_fetch_failed", status=status)
