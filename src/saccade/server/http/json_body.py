"""JSON bodies: parsed without long pauses of the event loop, and written."""

from collections.abc import Iterator
from secrets import token_hex
from typing import Any

import orjson
from starlette.responses import Response

from saccade.errors import RequestError
from saccade.server.http.body_scan import CHUNK, MAX_DEPTH, Body, find_long_strings

MAX_URLS = 64
WHOLE_BYTES = 512 * 1024  # the parser takes 0.1 ms for a data URL of 300 KB


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
    """The values of a body. Long strings of a large one are cut out before parsing and put back afterwards: the parser
    looks at each of their bytes several times, and holds the GIL meanwhile."""
    if not body:
        raise RequestError("the body is empty; it must be a JSON object", code="invalid_json")
    try:
        if len(body) <= WHOLE_BYTES and _is_small(without_urls(body), max_values):
            return orjson.loads(body)
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


def without_urls(body: Body) -> Body:
    """A body without what looks like long data URLs. No values can hide inside: up to the next quote, such a text is
    part of a string, or the body is not JSON."""
    found = list(_quoted_urls(body))
    return _without(body, found, [""] * len(found)) if found else body


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


def is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


def json_reply(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
