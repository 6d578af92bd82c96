"""JSON bodies: parsed without long pauses of the event loop, and written."""

from collections.abc import Iterator
from secrets import token_hex
from typing import Any

import orjson
from starlette.responses import Response

from saccade.errors import RequestError
from saccade.server.http.body_scan import CHUNK, MAX_DEPTH, Body, find_long_strings, is_plain_value

MAX_URLS = 64


def joined(parts: list[Body]) -> Body:
    """The whole body. Empties the list meanwhile, so that the body is not held twice."""
    if len(parts) == 1:
        return parts.pop()
    parts.reverse()
    body = bytearray()
    while parts:
        body += parts.pop()
    return body


def parse_json(body: Body, max_values: int) -> Any:
    """The values of a body. Long strings are cut out before parsing and put back afterwards: the parser looks at each
    of their bytes several times, and holds the GIL meanwhile."""
    try:
        if _is_small(body, max_values):
            return orjson.loads(body)
        if (value := _parse_quickly(body, max_values)) is not None:
            return value
        found = find_long_strings(body, max_values)
        if not found:
            return orjson.loads(body)
        names = _new_names(found)
        texts = {name: _text(body, *place) for name, place in zip(names, found, strict=True)}
        return _with_texts(orjson.loads(_without(body, found, names)), texts)
    except (orjson.JSONDecodeError, RecursionError):
        raise RequestError("the body is not valid JSON", code="invalid_json") from None


def _is_small(body: Body, max_values: int) -> bool:
    return len(body) <= min(CHUNK, max_values) and body.count(b"[") + body.count(b"{") <= MAX_DEPTH


def _parse_quickly(body: Body, max_values: int) -> Any | None:
    """The values of a body that is small except for a few long data URLs, found without a full scan; None for any other
    body. That includes one where text inside a string only looked like a URL: its placeholder is then left over."""
    found = _find_data_urls(body)
    if len(body) - sum(end - begin for begin, end in found) > CHUNK:  # before anything is copied
        return None
    names = _new_names(found)
    rest = _without(body, found, names)
    if not found or not _is_small(rest, max_values):
        return None
    try:
        value = orjson.loads(rest)
    except orjson.JSONDecodeError:
        return None
    texts = {name: _text(body, *place) for name, place in zip(names, found, strict=True)}
    value = _with_texts(value, texts)
    return None if texts else value


def size_without_urls(body: Body) -> int:
    """Bytes of a body outside what look like long data URLs. No values can hide inside: up to the next quote, such a
    text is part of a string, or the body is not JSON."""
    return len(body) - sum(end - begin for begin, end in _quoted_urls(body))


def _find_data_urls(body: Body) -> list[tuple[int, int]]:
    """The places of what look like long data URLs and are plain values."""
    return [(begin, end) for begin, end in _quoted_urls(body) if is_plain_value(body, begin, end)]


def _quoted_urls(body: Body) -> Iterator[tuple[int, int]]:
    """From a quote and `data:` to the next quote, if that is far. Stops at the first long gap between URLs."""
    at = 0
    for _ in range(MAX_URLS):
        begin = body.find(b'"data:', at, at + CHUNK) + 1
        end = body.find(b'"', begin) if begin else -1
        if end < 0:
            return
        if end - begin > CHUNK:  # shorter ones are left to the parser
            yield begin, end
        at = end


def _new_names(found: list[tuple[int, int]]) -> list[str]:
    """Placeholders that no client can guess."""
    nonce = token_hex(16)
    return [f"{nonce}{idx}" for idx in range(len(found))]


def _text(body: Body, begin: int, end: int) -> str:
    if body.find(b"\\", begin, end) >= 0:
        return body[begin:end].replace(b"\\/", b"/").decode("ascii")
    return str(memoryview(body)[begin:end], "ascii")


def _without(body: Body, found: list[tuple[int, int]], names: list[str]) -> bytes:
    parts, at = [], 0
    for (begin, end), name in zip(found, names, strict=True):
        parts += [body[at:begin], name.encode()]
        at = end
    return b"".join([*parts, body[at:]])


def _with_texts(value: Any, texts: dict[str, str]) -> Any:
    """`value` with texts in place of their names. Changes containers in place, and removes the texts that it used."""
    if isinstance(value, str):
        return texts.pop(value, value)
    if isinstance(value, dict):
        for name, item in value.items():
            value[name] = _with_texts(item, texts)
    elif isinstance(value, list):
        value[:] = [_with_texts(item, texts) for item in value]
    return value


def json_reply(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
