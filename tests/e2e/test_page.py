"""The page in a real browser: against a server whose answers are hostile, and against the real one."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw

from tests.e2e.browser import Browser, find_browser

PAGE = files("saccade.server").joinpath("page/index.html")
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=2</script> & "quoted" \u00e9\U0001f642'
KEY = "a key"
READY_S = 300.0

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no chromium; Debian's package is called chromium")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_browser()
    assert program is not None
    browser = Browser(program, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    image = Image.new("RGB", (128, 96), "white")
    ImageDraw.Draw(image).ellipse((30, 20, 90, 80), fill="red")
    path = tmp_path_factory.mktemp("pictures") / "circle.png"
    image.save(path)
    return path


class Stub(ThreadingHTTPServer):
    """A server that says what a test wants it to, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[dict[str, Any]] = []
        self.pieces: list[str] = []
        self.error = ""
        self.pause_s = 0.0
        self.replays = 0
        self.is_abandoned = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_GET(self) -> None:
        if self.path == "/":
            self._reply(PAGE.read_bytes(), "text/html; charset=utf-8")
        elif self.headers.get("authorization") != f"Bearer {KEY}":
            self._reply(json.dumps({"error": {"message": "the API key is missing"}}).encode(), status=401)
        elif self.path == "/v1/models":
            self._reply(json.dumps({"object": "list", "data": [{"id": "org/<b>model</b>"}]}).encode())
        else:
            self._reply(json.dumps({"phases": [self._phase()]}).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.asked.append(json.loads(body))
        self.server.replays += 1
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
        for piece in self.server.pieces:
            chunk = {"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}], "usage": None}
            data = f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()
            middle = len(data) // 2  # cut anywhere, also inside a character
            self._write(data[:middle])
            self._write(data[middle:])
            time.sleep(self.server.pause_s)
        if self.server.error:
            self._write(f"data: {json.dumps({'error': {'message': self.server.error}})}\n\n".encode())
        usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
        self._write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())

    def _write(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()

    def _phase(self) -> dict[str, Any]:
        graph = {"key": "vision/full units=32", "tier": "capacity", "bytes": 2**20, "replays": self.server.replays}
        fallbacks = {"too_large": self.server.replays}
        counts = {"replays": {"capacity": self.server.replays}, "real_rows": 100, "padded_rows": 25}
        return {
            "phase": "vision",
            "graphs": [graph, {**graph, "key": "idle", "replays": 0}],
            "fallbacks": fallbacks,
            **counts,
        }

    def _reply(self, data: bytes, kind: str = "application/json", status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def stub() -> Iterator[Stub]:
    server = Stub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


def _answers(browser: Browser) -> list[str]:
    found: list[str] = browser.evaluate("[...document.querySelectorAll('.turn.assistant p')].map((p) => p.textContent)")
    return found


def _ask(browser: Browser, question: str) -> None:
    browser.type("#question", question)
    browser.press_enter()


def _wait_done(browser: Browser, count: int, timeout_s: float = 180.0) -> None:
    done = f"document.querySelectorAll('.turn.assistant').length === {count} && !document.querySelector('[aria-busy]')"
    browser.wait(done, timeout_s)


def _unlock(browser: Browser, stub: Stub) -> None:
    browser.open(stub.url)
    browser.wait("document.getElementById('state').textContent.includes('API key is missing')")
    browser.type("#key", KEY)
    browser.evaluate("document.getElementById('key').dispatchEvent(new Event('change'))")
    browser.wait("document.getElementById('model').options.length === 1")


def _begin_long_answer(browser: Browser, stub: Stub) -> None:
    stub.pieces, stub.pause_s = ["word "] * 400, 0.05
    _unlock(browser, stub)
    _ask(browser, "count")
    browser.wait("document.querySelector('.turn.assistant p')?.textContent.includes('word word')")


def test_the_page_is_one_small_file_that_loads_nothing_from_elsewhere() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(text.encode()) < 40_000
    assert not re.findall(r"https?://|@import|src=|innerHTML|eval\(| on\w+=|style=", text)


def test_an_answer_is_text_whatever_it_contains(browser: Browser, stub: Stub, picture: Path) -> None:
    stub.pieces = [HOSTILE[i : i + 5] for i in range(0, len(HOSTILE), 5)]
    _unlock(browser, stub)
    browser.choose_files("#files", picture, picture)
    browser.wait("document.querySelectorAll('#chosen img').length === 2")
    _ask(browser, "What <i>is</i> this?")
    _wait_done(browser, 1)
    assert _answers(browser) == [HOSTILE]
    assert browser.evaluate("window.hacked") is None
    assert browser.evaluate("document.querySelector('.turn.user p').textContent") == "What <i>is</i> this?"
    assert browser.evaluate("document.querySelector('#model option').textContent") == "b>"
    parts = stub.asked[0]["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image_url", "image_url", "text"]
    assert parts[0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert "7 + 3 tokens" in browser.evaluate("document.querySelector('.turn.assistant .note').textContent")


def test_a_dropped_image_and_the_history_are_sent(browser: Browser, stub: Stub, picture: Path) -> None:
    stub.pieces = ["a circle"]
    _unlock(browser, stub)
    data = json.dumps(list(picture.read_bytes()))
    browser.evaluate(
        f"""(() => {{
          const transfer = new DataTransfer();
          transfer.items.add(new File([new Uint8Array({data})], "a.png", {{ type: "image/png" }}));
          const drop = {{ dataTransfer: transfer, bubbles: true, cancelable: true }};
          document.body.dispatchEvent(new DragEvent("drop", drop));
        }})()"""
    )
    browser.wait("document.querySelectorAll('#chosen img').length === 1")
    _ask(browser, "first")
    _wait_done(browser, 1)
    _ask(browser, "second")
    _wait_done(browser, 2)
    roles = [message["role"] for message in stub.asked[1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert stub.asked[1]["messages"][1]["content"] == "a circle"
    assert len(stub.asked[1]["messages"][0]["content"]) == 2, "the image stays part of the conversation"
    assert [part["type"] for part in stub.asked[1]["messages"][2]["content"]] == ["text"]


def test_graphs_of_the_last_answer_are_the_difference(browser: Browser, stub: Stub) -> None:
    stub.pieces, stub.replays = ["yes"], 41
    _unlock(browser, stub)
    _ask(browser, "hello")
    _wait_done(browser, 1)
    browser.wait("document.querySelectorAll('#served tr').length === 2")
    served = browser.evaluate("[...document.querySelectorAll('#served td')].map((cell) => cell.textContent)")
    assert served == ["vision/full units=32", "1", "vision: not replayed, too large", "1"]
    row = browser.evaluate("[...document.querySelectorAll('#phases td')].map((cell) => cell.textContent)")
    assert row == ["vision", "2", "2.0", "42", "25.0 %", "42 too large"]


def test_stop_ends_the_request(browser: Browser, stub: Stub) -> None:
    _begin_long_answer(browser, stub)
    browser.evaluate("document.getElementById('stop').click()")
    _wait_done(browser, 1)
    assert stub.is_abandoned.wait(10), "the server kept writing"
    assert browser.evaluate("document.querySelector('.turn.assistant .note').textContent") == "stopped"


def test_an_error_in_the_stream_is_shown(browser: Browser, stub: Stub) -> None:
    stub.pieces, stub.error = ["half an ans"], "the engine is gone"
    _unlock(browser, stub)
    _ask(browser, "hello")
    _wait_done(browser, 1)
    assert _answers(browser) == ["half an ans"]
    assert browser.evaluate("document.querySelector('.turn.assistant .bad').textContent") == "the engine is gone"


def test_a_new_conversation_begins_with_nothing(browser: Browser, stub: Stub) -> None:
    _begin_long_answer(browser, stub)
    browser.evaluate("document.getElementById('new').click()")
    assert stub.is_abandoned.wait(10), "the server kept writing"
    stub.pieces, stub.pause_s = ["yes"], 0.0
    _ask(browser, "second")
    _wait_done(browser, 1)
    assert [message["role"] for message in stub.asked[1]["messages"]] == ["user"] and _answers(browser) == ["yes"]


def test_what_was_refused_can_be_asked_again(browser: Browser, stub: Stub, picture: Path, tmp_path: Path) -> None:
    stub.pieces, stub.error = [], "the image is broken"
    letter = tmp_path / "letter.txt"
    letter.write_text("no image")
    _unlock(browser, stub)
    browser.choose_files("#files", picture, letter)
    browser.wait("document.querySelectorAll('#chosen img').length === 1")
    assert "letter.txt: not an image" in browser.evaluate("document.getElementById('chosen').textContent")
    _ask(browser, "what is it?")
    _wait_done(browser, 1)
    browser.wait("document.querySelectorAll('#chosen img').length === 1")
    assert browser.evaluate("document.getElementById('question').value") == "what is it?"
    stub.pieces, stub.error = ["a circle"], ""
    browser.press_enter()
    _wait_done(browser, 2)
    [again] = stub.asked[1]["messages"]
    assert [part["type"] for part in again["content"]] == ["image_url", "text"]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The real server with the bundled model, its graphs on."""
    limits = {
        "--max-model-len": "256",
        "--max-num-seqs": "1",
        "--max-num-batched-tokens": "128",
        "--encoder-budget-tokens": "64",
        "--encoder-cache-tokens": "256",
    }
    flags = [word for pair in limits.items() for word in pair]
    command = [sys.executable, "-m", "saccade", "serve", "--port", "0", "--device", "cpu", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines: list[str] = []
    found = threading.Event()

    def read() -> None:
        for line in process.stderr or ():
            lines.append(line)
            if line.startswith("ready on"):
                found.set()
        found.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        found.wait(READY_S)
        ready = [line for line in lines if line.startswith("ready on")]
        assert ready, f"the server did not start: {''.join(lines)}"
        yield ready[0].split()[2]
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        reader.join(10)
        process.stderr.close()


def test_the_real_server_answers_about_an_image(browser: Browser, server: str, picture: Path) -> None:
    browser.seen.clear()
    browser.open(server)
    browser.wait("document.getElementById('model').options.length === 1")
    browser.choose_files("#files", picture)
    browser.wait("document.querySelectorAll('#chosen img').length === 1")
    browser.evaluate("document.getElementById('tokens').value = 8")
    _ask(browser, "What shape is this?")
    _wait_done(browser, 1)
    assert _answers(browser)[0].strip()
    assert "tokens" in browser.evaluate("document.querySelector('.turn.assistant .note').textContent")
    browser.wait("document.querySelectorAll('#served tr').length > 0")
    served = browser.evaluate("[...document.querySelectorAll('#served td:first-child')].map((c) => c.textContent)")
    assert {key.split("/")[0] for key in served} >= {"vision", "prefill", "decode"}, served
    sent = [event for event in browser.events("Network.requestWillBeSent") if event["documentURL"].startswith(server)]
    asked = [event["request"]["url"] for event in sent]
    assert {server + path for path in ("/", "/graphs", "/v1/chat/completions")} <= set(asked)
    assert all(url.startswith((server, "data:")) for url in asked), "the page asked somebody else"
    logged = [event["entry"] for event in browser.events("Log.entryAdded")]
    ours = [entry for entry in logged if entry["level"] == "error" and entry.get("url", server).startswith(server)]
    assert not ours, ours


def test_the_page_of_routes_shows_and_tries_them(browser: Browser, server: str) -> None:
    browser.seen.clear()
    browser.open(f"{server}/docs")
    browser.wait("document.querySelectorAll('article').length > 15")
    article = "document.getElementById('post-v1-chat-completions')"
    browser.evaluate(f"{article}.querySelectorAll('details').forEach((one) => {{ one.open = true; }})")
    fields = browser.evaluate(f"[...{article}.querySelectorAll('td code')].map((cell) => cell.textContent)")
    assert {"messages", "max_tokens", "temperature", "image_url"} <= set(fields)
    assert "curl '" in browser.evaluate(f"{article}.querySelector('pre').textContent")
    browser.evaluate(f"{article}.querySelector('button.main').click()")
    answer = browser.wait(f"[...{article}.querySelectorAll('pre')].at(-1).textContent.match(/^200\\n[^]*/)?.[0]")
    assert '"choices"' in answer
    logged = [event["entry"] for event in browser.events("Log.entryAdded")]
    assert not [entry for entry in logged if entry["level"] == "error" and "/docs" in entry.get("url", "")], logged
