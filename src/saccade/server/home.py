"""GET /: the page that comes with the package."""

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from saccade.server.http_errors import HttpError

_HEADERS = {
    "content-security-policy": "default-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


class PageRoute:
    """The file is read once; a package without it has no page."""

    def __init__(self) -> None:
        found = files("saccade.server").joinpath("page", "index.html")
        self._page = found.read_text() if found.is_file() else None

    async def show(self, request: Request) -> Response:
        if self._page is None:
            raise HttpError(404, "this installation has no page", code="unknown_route")
        return HTMLResponse(self._page, headers=_HEADERS)
