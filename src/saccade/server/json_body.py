"""From a body's bytes to its values, within a time that nobody notices."""

from secrets import token_hex
from typing import Any

import orjson

from saccade.errors import RequestError
from saccade.server.body_scan import CHUNK, MAX_DEPTH, Body, find_long_strings


def joined(parts: list[bytes]) -> Body:
    """The body. Empties the list meanwhile, so that it is not held twice."""
    if len(parts) == 1:
        return parts.pop()
    parts.reverse()
    body = bytearray()
    while parts:
        body += parts.pop()
    return body


def parse_json(body: Body, max_values: int) -> Any:
    """The values of a body. Long strings are left out of what is parsed and put in afterwards: the parser looks at each
    of their bytes several times, while the interpreter waits."""
    is_small = len(body) <= min(CHUNK, max_values) and body.count(b"[") + body.count(b"{") <= MAX_DEPTH
    found = [] if is_small else find_long_strings(body, max_values)
    try:
        if not found:
            return orjson.loads(body)
        nonce = token_hex(16)
        texts = {f"{nonce}{idx}": _text(body, begin, end) for idx, (begin, end) in enumerate(found)}
        return _with_texts(orjson.loads(_without(body, found, list(texts))), texts)
    except (orjson.JSONDecodeError, RecursionError):
        raise RequestError("the body is not valid JSON", code="invalid_json") from None


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
    """`value` with the texts in place of their names; containers are changed, not copied."""
    if isinstance(value, str):
        return texts.get(value, value)
    if isinstance(value, dict):
        for name, item in value.items():
            value[name] = _with_texts(item, texts)
    elif isinstance(value, list):
        value[:] = [_with_texts(item, texts) for item in value]
    return value
