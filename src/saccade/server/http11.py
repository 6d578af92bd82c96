"""uvicorn's HTTP/1.1 with a bounded head, and broken requests answered in the API's own shape."""

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from saccade.server.errors import HttpError


class BoundedProtocol(HttpToolsProtocol):
    """The parser keeps a head until it is complete: without a limit, one that never ends fills the memory."""

    max_header_bytes = 64 * 1024
    _head_bytes = 0
    _is_in_head = False

    @classmethod
    def limited(cls, max_header_bytes: int) -> type["BoundedProtocol"]:
        return type("LimitedProtocol", (cls,), {"max_header_bytes": max_header_bytes})

    def data_received(self, data: bytes) -> None:
        was_in_head = self._is_in_head
        super().data_received(data)
        if was_in_head and self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self.max_header_bytes and not self.transport.is_closing():
                text = f"the headers have more than {self.max_header_bytes} bytes, which is the limit"
                self._refuse(HttpError(431, text, code="headers_too_large"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes, self._is_in_head = 0, True

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(HttpError(400, "the request is not valid HTTP", code="invalid_http"))

    def _refuse(self, error: HttpError) -> None:
        body = orjson.dumps(error.envelope())
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()
