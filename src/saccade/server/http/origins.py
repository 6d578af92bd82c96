"""Which host names this server answers to, and which web pages may call it. A browser sends a page's requests to any
address, even this machine's own, so listening on 127.0.0.1 does not keep web pages out."""

import ipaddress
import re
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from saccade.server.http_errors import HttpError
from saccade.server.server_settings import ServerSettings

PROBES = frozenset({"/health", "/ready"})  # they reveal nothing that a page could use
READS = frozenset({"GET", "HEAD", "OPTIONS"})
GETS_WITH_EFFECTS = frozenset({"/flush_cache", "/health_generate", "/trace"})
PRIVATE_ENDINGS = (".localhost", ".local", ".internal")  # nobody can register these names
_HOST = re.compile(rb"(?P<name>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_.-]+)(:[0-9]{0,5})?")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class OriginRules:
    """Checks the Host of every request, and the Origin and Content-Type of those that do something.

    A web site may point its own name at 127.0.0.1 (DNS rebinding). Addresses cannot be pointed elsewhere, so any
    address is allowed as Host. Clients other than browsers send no Origin and pass that check."""

    def __init__(self, settings: ServerSettings, *, has_keys: bool) -> None:
        self._names = frozenset(name.lower() for name in settings.allowed_hosts)
        self._endings = tuple(name[1:] for name in self._names if name.startswith("*."))
        # A page of another site does not know the key, and browsers cannot reach Unix sockets.
        is_guarded = bool(settings.uds) or (not settings.is_local and has_keys)
        self._takes_any_host = "*" in self._names or (is_guarded and not self._names)
        self._own_names = {"localhost", settings.host.lower(), socket.gethostname().lower()}
        self._is_local = settings.is_local
        self._origins = frozenset(settings.origins())

    def check(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> None:
        """Raises for a request that may come from a page of another site. `path` is without the root path."""
        if path not in PROBES:
            self._check_host(headers.get(b"host", b""))
        if method not in READS or path in GETS_WITH_EFFECTS:
            self._check_origin(headers)
        if method == "POST":
            _check_content_type(headers, is_browser=b"origin" in headers)

    def _check_host(self, host: bytes) -> None:
        if self._takes_any_host or not host:  # browsers always send one
            return
        found = _HOST.fullmatch(host)
        if found is None:
            raise HttpError(400, "the Host header is not a host name or address", code="invalid_host")
        name = found["name"].decode().lower().rstrip(".")
        if not self._is_own(name):
            text = f"this server does not answer to the name {name[:255]}; allow it with --allowed-hosts {name[:255]}"
            raise HttpError(403, text, code="host_not_allowed")

    def _is_own(self, name: str) -> bool:
        if name in self._own_names or name in self._names or name.endswith((*PRIVATE_ENDINGS, *self._endings)):
            return True
        # A name without a dot belongs to the local network (a container, a machine).
        return _is_address(name) or (not self._is_local and "." not in name)

    def _check_origin(self, headers: Mapping[bytes, bytes]) -> None:
        origin = headers.get(b"origin", b"").decode("latin-1")
        site = headers.get(b"sec-fetch-site", b"").lower()
        if "*" in self._origins or origin in self._origins or site == b"same-origin":
            return
        if origin:
            is_foreign = is_foreign_page(origin, headers.get(b"host", b"").decode("latin-1"))
        else:
            is_foreign = site in (b"cross-site", b"same-site")  # browsers set it on requests without an Origin
        if is_foreign:
            text = "this request came from a web page of another origin; allow that origin with --allowed-origins"
            raise HttpError(403, text, code="origin_not_allowed")


def is_foreign_page(origin: str, host: str) -> bool:
    """Whether an origin is a web page that did not come from `host`. The scheme is not compared, since proxies change
    it. Browser extensions and desktop applications have other schemes than web pages."""
    try:
        parts = urlsplit(origin)
        own = urlsplit(f"//{host}")
        authority = (parts.hostname, parts.port or _DEFAULT_PORTS.get(parts.scheme))
        ports = {own.port} if own.port else {80, 443}
    except ValueError:
        return True
    if parts.scheme not in _DEFAULT_PORTS:
        return not (parts.scheme and parts.netloc)  # "null" is a page without an origin
    return not host or authority[0] != own.hostname or authority[1] not in ports


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]").partition("%")[0])
    except ValueError:
        return False
    return True


def _check_content_type(headers: Mapping[bytes, bytes], *, is_browser: bool = False) -> None:
    """Accepts JSON or no type, which some clients omit. Browsers must send one: a page could omit it to avoid the
    preflight request. Compression is refused, since a small body could become a large one."""
    if headers.get(b"content-encoding", b"identity").strip().lower() not in (b"", b"identity"):
        raise HttpError(415, "the body must not be compressed (Content-Encoding)", code="unsupported_media_type")
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    is_untyped = not kind and (not is_browser or headers.get(b"content-length", b"") == b"0")
    if not is_untyped and kind != b"application/json" and not kind.endswith(b"+json"):
        raise HttpError(415, "the body must be JSON (Content-Type: application/json)", code="unsupported_media_type")
