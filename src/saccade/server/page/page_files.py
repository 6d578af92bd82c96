"""Serves the web page. It may run only its own scripts and styles, talks to this server alone, and cannot be framed."""

from functools import cache
from hashlib import blake2b
from importlib.resources import files
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from saccade.server.http_errors import HttpError

INDEX, DOCS = "index.html", "docs.html"
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
}
_RULES = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' data: blob:",
    "media-src": "data: blob:",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",  # nothing is parsed as markup, not even by mistake
    "trusted-types": "'none'",
}
HEADERS = {
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in _RULES.items()),
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-cache",  # revalidated every time, so that versions never mix
}


class PageFile(NamedTuple):
    data: bytes
    kind: str
    etag: str


@cache
def page_files() -> dict[str, PageFile]:
    """The page's files by name, read once; a request cannot reach any other file."""
    folder, found = files("saccade.server.page"), {}
    for file in folder.iterdir():
        kind = _KINDS.get(file.name[file.name.rfind(".") :])
        if kind is not None:
            data = file.read_bytes()
            found[file.name] = PageFile(data, kind, f'"{blake2b(data, digest_size=8).hexdigest()}"')
    return found


async def index(request: Request) -> Response:
    return _reply(request, INDEX)


async def docs(request: Request) -> Response:
    """The page that shows /openapi.json."""
    return _reply(request, DOCS)


async def page_file(request: Request) -> Response:
    return _reply(request, request.path_params["name"])


def _reply(request: Request, name: str) -> Response:
    file = page_files().get(name)
    if file is None:
        raise HttpError(404, "the page of this installation has no such file", code="unknown_route")
    headers = {**HEADERS, "etag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.data, headers=headers, media_type=file.kind)
