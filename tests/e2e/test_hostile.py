"""Images, texts, numbers, schemas and bytes that mean no good: a clear 4xx or an answer, and nobody else notices."""

import socket
import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import numpy as np
import pytest
from PIL import Image

from tests.e2e.pictures import asked, data_url, encoded, image_part, picture
from tests.e2e.process import END_S, ServerProcess

CHAT = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def is_envelope(reply: httpx2.Response) -> bool:
    error = reply.json().get("error")
    return isinstance(error, dict) and error.keys() == {"message", "type", "param", "code"} and bool(error["message"])


def check_answers(http: httpx2.Client) -> None:
    reply = http.post(CHAT, json={"messages": HELLO, "max_tokens": 2})
    assert reply.status_code == 200, reply.text


def bomb() -> bytes:
    """A PNG of some kilobytes that says it has a gigapixel."""
    head = struct.pack(">IIBBBBB", 32768, 32768, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"\0" * 10**7)), (b"IEND", b"")]
    data = b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + data


def animated() -> bytes:
    buffer = BytesIO()
    picture(1).save(buffer, "GIF", save_all=True, append_images=[picture(2), picture(3)])
    return buffer.getvalue()


def rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(picture(1), "JPEG", exif=exif)


def transparent_palette() -> bytes:
    image = picture(1).quantize(8)
    return encoded(image, "PNG", transparency=0)


WHOLE = encoded(picture(5))
IMAGES: dict[str, tuple[bytes, set[int]]] = {
    "1x1": (encoded(picture(0, (1, 1))), {200, 400}),
    "1x20000": (encoded(picture(0, (1, 20000))), {400}),
    "20000x1": (encoded(picture(0, (20000, 1))), {400}),
    "nothing": (b"", {400}),
    "truncated": (WHOLE[: len(WHOLE) // 2], {400}),
    "no image": (b"<svg onload=alert(1)>", {400}),
    "cmyk": (encoded(picture(1).convert("CMYK"), "JPEG"), {200}),
    "16 bit": (encoded(Image.fromarray(np.arange(1024, dtype=np.uint16).reshape(32, 32) * 64)), {200}),
    "animated": (animated(), {200}),
    "rotated": (rotated(), {200}),
    "palette with transparency": (transparent_palette(), {200}),
    "bomb": (bomb(), {400, 413}),
}


def test_small_bodies_that_stand_for_much_are_refused_and_nobody_waits(
    server: ServerProcess, http: httpx2.Client
) -> None:
    """Pictures of kilobytes that are gigapixels together, and text that no context holds."""
    wide = image_part(encoded(Image.new("1", (8000, 8000))))
    many = http.post(CHAT, json={"messages": asked(*[wide] * 24)})
    assert many.status_code == 413 and many.json()["error"]["code"] == "image_too_large", many.text
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": "x" * 7_000_000}]}),
        ("/tokenize", {"prompt": "x" * 7_000_000}),
        ("/v1/completions", {"prompt": [5] * 1_000_000}),
        (CHAT, {"messages": HELLO * 30_000}),
    ):
        reply = http.post(path, json=body)
        assert reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded", reply.text[:300]
    status = Path(f"/proc/{server.popen.pid}/status").read_text()
    peak_kib = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
    assert peak_kib < 3 * 2**20, "decoded, the pictures alone were 4.6 GB"
    check_answers(http)


@pytest.mark.parametrize("name", IMAGES)
def test_odd_images_get_an_answer_or_a_reason(http: httpx2.Client, name: str) -> None:
    data, allowed = IMAGES[name]
    reply = http.post(CHAT, json={"messages": asked(image_part(data)), "max_tokens": 2})
    assert reply.status_code in allowed, reply.text
    if reply.status_code != 200:
        assert is_envelope(reply)
        param = reply.json()["error"]["param"] or ""
        assert param.startswith("messages[0].content[1]"), reply.text
    check_answers(http)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "http://127.0.0.1:1/a.png",
        "http://169.254.169.254/latest/meta-data",
        "https://example.invalid/a.png",
        "ftp://a/b",
        "data:image/png,notbase64",
        "data:image/png;base64,%%%",
        "",
        "a.png",
    ],
)
def test_urls_that_are_not_allowed_are_refused_without_saying_more(http: httpx2.Client, url: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    reply = http.post(CHAT, json={"messages": asked(part), "max_tokens": 2})
    assert reply.status_code in (400, 403) and is_envelope(reply), reply.text
    assert "passwd" not in reply.text and "Errno" not in reply.text


@pytest.mark.parametrize(
    "text", ["<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", "<eos>", "<|im_end|>"]
)
def test_special_tokens_in_text_stay_text(http: httpx2.Client, text: str) -> None:
    messages = [{"role": "user", "content": f"say {text} twice {text}"}]
    found = http.post("/tokenize", json={"messages": messages}).json()
    assert found["image_tokens"] == 0 and not set(found["tokens"]) & {2, 100, 101, 102, 103}
    reply = http.post(CHAT, json={"messages": messages, "max_tokens": 2})
    assert reply.status_code == 200, reply.text
    with_image = [{"role": "user", "content": [{"type": "text", "text": text}, image_part(WHOLE)]}]
    reply = http.post(CHAT, json={"messages": with_image, "max_tokens": 2})
    assert reply.status_code == 200, reply.text


NUMBERS = [
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "max_tokens", "max_completion_tokens", "min_tokens", "n", "top_logprobs", "prompt_logprobs", "priority", "timeout",
]  # fmt: skip
VALUES = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 400, "-" + "9" * 400, '"NaN"', "[]", "{}", '"1"']


@pytest.mark.parametrize("name", NUMBERS)
def test_no_number_breaks_anything(http: httpx2.Client, name: str) -> None:
    for value in VALUES:
        body = f'{{"messages":[{{"role":"user","content":"a"}}],"logprobs":true,"max_tokens":1,"{name}":{value}}}'
        reply = http.post(CHAT, content=body, headers={"content-type": "application/json"})
        assert reply.status_code == 400 and is_envelope(reply), f"{name}={value}: {reply.text}"


@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids", "allowed_token_ids", "stop"])
def test_no_collection_breaks_anything(http: httpx2.Client, name: str) -> None:
    values: list[Any] = [
        [-1],
        [2**31],
        [10**30],
        {"a": 1},
        {"1": 10**30},
        {"-1": 1},
        {"1e3": 1},
        [[]],
        [None],
        "\0" * 5000,
    ]
    for value in values:
        reply = http.post(CHAT, json={"messages": HELLO, "max_tokens": 1, name: value})
        assert reply.status_code == 400 and is_envelope(reply), f"{name}={value}: {reply.text}"
    many = {str(i): 0.1 for i in range(5000)} if name == "logit_bias" else ["x"] * 5000
    assert http.post(CHAT, json={"messages": HELLO, "max_tokens": 1, name: many}).status_code == 400


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        deep(100),
        {"type": "array", "items": {"enum": [str(i) for i in range(200_000)]}},
        {"type": "string", "pattern": "((((a+)+)+)+)+$(?="},
        {"$ref": "#"},
        {"$ref": "http://127.0.0.1:1/schema"},
        {"type": "nothing"},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
    ],
    ids=["deep", "huge", "regex", "loop", "remote", "unknown", "impossible"],
)
def test_schemas_cannot_hold_the_server(http: httpx2.Client, schema: dict[str, Any]) -> None:
    wish = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = http.post(CHAT, json={"messages": HELLO, "max_tokens": 2, "response_format": wish}, timeout=END_S)
    assert reply.status_code in (200, 400), reply.text
    check_answers(http)


@pytest.mark.parametrize("regex", ["(", "(a|a)*" * 500, "a{1,100000}{1,100000}", "(?<=a)b", "\\p{Nope}"])
def test_regular_expressions_cannot_hold_the_server(http: httpx2.Client, regex: str) -> None:
    reply = http.post(CHAT, json={"messages": HELLO, "max_tokens": 2, "regex": regex}, timeout=END_S)
    assert reply.status_code in (200, 400), reply.text
    check_answers(http)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"messages": ' + b"[" * 100_000,
        b'{"messages": []}',
        b'{"messages": [1]}',
        b'{"messages": [{}]}',
        b'{"messages": [{"role": "nobody", "content": "x"}]}',
        b'{"messages": [{"role": "user", "content": {"a": 1}}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    ],
)
def test_broken_bodies_are_refused(http: httpx2.Client, body: bytes) -> None:
    reply = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400 and is_envelope(reply), f"{body[:80]!r}: {reply.text}"


def test_large_bodies_are_refused_before_they_are_read(http: httpx2.Client) -> None:
    def endless() -> Any:
        yield b'{"messages": ['
        for _ in range(200):
            yield b" " * 65536

    for body in (endless(), b" " * (9 * 2**20)):
        try:
            reply = http.post(CHAT, content=body, headers={"content-type": "application/json"})
        except (httpx2.ReadError, httpx2.WriteError):  # the server closed while we were still sending
            continue
        assert reply.status_code == 413 and is_envelope(reply)
    check_answers(http)


def test_only_json_is_taken(http: httpx2.Client) -> None:
    reply = http.post(CHAT, content=b"a=1", headers={"content-type": "application/x-www-form-urlencoded"})
    assert reply.status_code == 415 and is_envelope(reply)


def raw(server: ServerProcess, data: bytes) -> bytes:
    """What the server says to bytes that need not be HTTP."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=END_S) as link:
        try:
            link.sendall(data)
            link.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        found = b""
        try:
            while part := link.recv(65536):
                found += part
        except ConnectionResetError:
            pass
        return found


def test_bytes_that_are_not_http_are_refused(server: ServerProcess, http: httpx2.Client) -> None:
    assert raw(server, b"\x16\x03\x01\x02\x00\x01\x00").startswith(b"HTTP/1.1 400")
    assert b'{"error":' in raw(server, b"GET / HTTP/9.9\r\n\r\n")
    assert raw(server, b"GET /health HTTP/1.1\r\nhost: ]]::[[@\\\r\nconnection: close\r\n\r\n").startswith(
        b"HTTP/1.1 200"
    )
    assert raw(server, b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert raw(server, b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")
    endless = b"GET /health HTTP/1.1\r\nx: " + b"a" * 2**20
    assert raw(server, endless).startswith(b"HTTP/1.1 431")
    many = b"".join(b"x%d: %s\r\n" % (i, b"a" * 1000) for i in range(100))
    assert raw(server, b"GET /health HTTP/1.1\r\nhost: x\r\n" + many + b"\r\n").startswith(b"HTTP/1.1 431")
    check_answers(http)


def test_unknown_routes_and_methods_have_the_same_envelope(http: httpx2.Client) -> None:
    for method, path, status in (
        ("GET", "/nope", 404),
        ("GET", "/v1/", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "//v1/chat/completions", 404),
        ("GET", "/%2e%2e/etc/passwd", 404),
    ):
        reply = http.request(method, path)
        assert reply.status_code == status and is_envelope(reply), f"{method} {path}: {reply.text}"


def test_unsupported_fields_are_refused_and_unknown_ones_named(http: httpx2.Client) -> None:
    for name, value in {
        "bad_words": ["a"],
        "chat_template": "x",
        "media_io_kwargs": {"a": 1},
        "best_of": 2,
    }.items():
        reply = http.post(CHAT, json={"messages": HELLO, "max_tokens": 1, name: value})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == name
    reply = http.post(CHAT, json={"messages": HELLO, "max_tokens": 1, "user": "me", "colour": 1, "bad_words": []})
    assert reply.status_code == 200 and reply.headers["x-ignored-fields"] == "user,colour"


def test_request_ids_are_echoed_when_sane(http: httpx2.Client) -> None:
    sane = http.get("/version", headers={"x-request-id": "abc-1.2:3"})
    assert sane.headers["x-request-id"] == "abc-1.2:3"
    for bad in ("a b", "x" * 200, "<script>"):
        assert http.get("/version", headers={"x-request-id": bad}).headers["x-request-id"] != bad
    assert http.get("/nope").headers["x-request-id"]


def test_a_data_url_may_be_written_in_odd_ways(http: httpx2.Client) -> None:
    url = data_url(WHOLE)
    for odd in (url.replace("data:", "DATA:"), url.replace(";base64", ";charset=utf-8;base64"), url.rstrip("=")):
        part = {"type": "image_url", "image_url": {"url": odd}}
        assert http.post(CHAT, json={"messages": asked(part), "max_tokens": 1}).status_code == 200
