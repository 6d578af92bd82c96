"""A server of the page's own files that says what a test wants it to, and remembers what it was asked."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from saccade.server.page.page_files import HEADERS, INDEX, page_files

VISION = {
    "unit": 32,
    "min_pixels": 1,
    "max_pixels": 2**31,
    "fixed_size": None,
    "has_video": True,
    "has_pixel_places": False,
}
DECODE = {"phase": "decode", "graph": "decode/full requests=1 tokens=1", "reason": "", "rows": 1, "padded": 0}
PREFILL = {"phase": "prefill", "graph": "prefill/full requests=5 tokens=128", "reason": "", "rows": 96, "padded": 32}
EAGER = {"phase": "vision", "graph": "", "reason": "it is larger than every bucket", "rows": 900, "padded": 0}


class Stub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.key = ""
        self.vision: dict[str, Any] = VISION
        self.asked: list[dict[str, Any]] = []
        self.pieces: list[str] = ["yes"]
        self.reasoning = ""
        self.refusal = ""  # a reply of status 400
        self.error = ""  # in the stream
        self.is_cut = False  # the stream ends too early
        self.pause_s = 0.0
        self.is_abandoned = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


@contextmanager
def running_stub() -> Iterator[Stub]:
    server = Stub()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        name = INDEX if path == "/" else path.removeprefix("/page/")
        if name in page_files():
            file = page_files()[name]
            self._reply(file.data, file.kind)
        elif path == "/ready":
            self._json({"status": "ready"})
        elif self._is_allowed():
            pages = {"/v1/models": self._models, "/live": self._live, "/graphs": self._graphs}
            self._json(pages[path]())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if not self._is_allowed():
            return
        self.server.asked.append(json.loads(body))
        if self.server.refusal:
            self._json({"error": {"message": self.server.refusal}}, 400)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        try:
            self._stream()
        except OSError:
            self.server.is_abandoned.set()

    def _stream(self) -> None:
        self._write(b": a comment\n\n")
        if self.server.reasoning:
            self._chunk(choices=[{"index": 0, "delta": {"reasoning_content": self.server.reasoning}}])
        for piece in self.server.pieces:
            self._chunk(choices=[{"index": 0, "delta": {"content": piece}, "finish_reason": None}])
            time.sleep(self.server.pause_s)
        if self.server.error:
            self._chunk(error={"message": self.server.error})
        if self.server.is_cut:
            return
        counts = [{**one, "passes": times} for one, times in ((EAGER, 1), (PREFILL, 1), (DECODE, 3))]
        self._chunk(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 3}, passes=counts)
        self._write(b"data: [DONE]\n\n")

    def _chunk(self, **fields: Any) -> None:
        data = f"data: {json.dumps(fields, ensure_ascii=False)}\n\n".encode()
        middle = len(data) // 2  # cut anywhere, also inside a character
        self._write(data[:middle])
        self._write(data[middle:])

    def _write(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()

    def _is_allowed(self) -> bool:
        if not self.server.key or self.headers.get("authorization") == f"Bearer {self.server.key}":
            return True
        self._json({"error": {"message": "the API key is missing or wrong"}}, 401)
        return False

    def _models(self) -> Any:
        card = {"id": "org/<b>model", "capabilities": ["chat", "multimodal"], "vision": self.server.vision}
        return {"object": "list", "data": [card]}

    def _live(self) -> Any:
        since = int(self.path.partition("since=")[2] or 0)
        now = time.monotonic()
        kinds = [("vision", [EAGER]), ("language", [PREFILL]), ("language", [DECODE])]
        records: list[dict[str, Any]] = [
            {
                "number": i + 1,
                "stream": stream,
                "start": now - 1 + 0.2 * i,
                "seconds": 0.1,
                "requests": 2,
                "passes": passes,
            }
            for i, (stream, passes) in enumerate(kinds)
        ]
        names = ("prefix_queried_tokens", "prefix_hit_tokens", "encoder_queries", "encoder_hits", "preemptions")
        figures = {"running": 2, "waiting": 1, "kv_usage": 0.25, "encoder_usage": 0.5, **dict.fromkeys(names, 4)}
        second = {
            "second": int(now) - 2,
            "prompt_tokens": 7,
            "output_tokens": 50,
            "first_tokens": 2,
            "first_token_s": 0.4,
        }
        passes = [record for record in records if record["number"] > since]
        common = {"now": now, "pending": 0, "kv_cache_tokens": 1024, "gpu_bytes": 0}
        return {**common, "scheduler": figures, "passes": passes, "seconds": [second]}

    def _graphs(self) -> Any:
        graph = {"key": PREFILL["graph"], "tier": "capacity", "bytes": 2**20, "replays": 42}
        counts = {"replays": {"capacity": 42}, "real_rows": 300, "padded_rows": 100}
        return {"phases": [{"phase": "prefill", "graphs": [graph], "fallbacks": {"too_large": 3}, **counts}]}

    def _json(self, value: Any, status: int = 200) -> None:
        self._reply(json.dumps(value).encode(), "application/json", status)

    def _reply(self, data: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass
