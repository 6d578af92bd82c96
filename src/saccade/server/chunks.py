"""The JSON of streamed chunks, put together from parts that are written once a stream."""

from typing import Any

import orjson

NULL = b"null"


class ChunkWriter:
    """Chunks of one stream: all have the same id, time and model.

    `usage` is what stands in that field: nothing at all unless the client asked for usage.
    """

    def __init__(self, head: dict[str, Any], *, has_usage: bool) -> None:
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._tail = b',"usage":null}\n\n' if has_usage else b"}\n\n"

    def choice(
        self,
        index: int,
        value: bytes,
        *,
        logprobs: bytes = NULL,
        finish: bytes = NULL,
        usage: bytes = b"",
        more: bytes = b"",
    ) -> bytes:
        """`value` is the part that a kind of reply is about, such as b'"delta":{}'. `more` are further fields."""
        tail = b',"usage":' + usage + b"}\n\n" if usage else self._tail
        reason = b',"finish_reason":' + finish + more + b"}]"
        return b"".join((self._head, b'{"index":%d,' % index, value, b',"logprobs":', logprobs, reason, tail))

    def last(self, fields: dict[str, Any]) -> bytes:
        """The chunk without choices that ends a stream with usage."""
        return self._head + b"]," + orjson.dumps(fields)[1:-1] + b"}\n\n"
