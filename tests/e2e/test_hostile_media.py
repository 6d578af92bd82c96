"""Files that are cheap to send and expensive to decode: they end with a 4xx or when their client leaves, hold no
memory, and text is answered meanwhile. Nothing here depends on the speed of the machine: what would take minutes must
not be waited for."""

import base64
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import orjson
import pytest

from saccade.jobs.packets import resident_bytes
from tests.child_processes import gone
from tests.e2e.conftest import wait_idle
from tests.e2e.pictures import asked, encoded, image_part, picture
from tests.e2e.process import ServerProcess, running
from tests.inputs.hostile_files import growing_gif, many_scans, motion_jpeg
from tests.inputs.hostile_files import picture as flat

CHAT = "/v1/chat/completions"
SPARE_BYTES = 64 * 2**20
LEAVE_S = 60.0


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Two processes for media, so that one large job at a time is decoded."""
    log = tmp_path_factory.mktemp("media") / "log"
    threads, limits = {"media_processes": 2, "preprocess_threads": 4}, {"max_queued_requests": 200}
    with running(checkpoint, log, server=threads, limits=limits) as found:
        found.wait_ready()
        yield found


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx2.Client]:
    with server.client() as client:
        ask_text(client)
        ask_image(client)
        yield client
        ask_text(client)
        ask_image(client)
        wait_idle(client)


def part(kind: str, data: bytes) -> dict[str, Any]:
    url = f"data:{kind}/any;base64,{base64.b64encode(data).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def ask_text(client: httpx2.Client) -> str:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "temperature": 0}
    reply = client.post(CHAT, json=body)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


def ask_image(client: httpx2.Client) -> None:
    reply = client.post(CHAT, json={"messages": asked(image_part(encoded(picture(3)))), "max_tokens": 2})
    assert reply.status_code == 200, reply.text


def ask(client: httpx2.Client, *parts: dict[str, Any], **more: Any) -> httpx2.Response:
    body = {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}], "max_tokens": 2}
    return client.post(CHAT, json=body | more)


def send_and_leave(server: ServerProcess, *parts: dict[str, Any]) -> socket.socket:
    """A request whose client will not wait; closing the socket is left to the caller."""
    where = urlsplit(server.url)
    body = orjson.dumps({"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 2})
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
    sent = socket.create_connection((where.hostname or "", where.port or 0))
    sent.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return sent


def used_bytes(server: ServerProcess) -> int:
    """Of the front end and its processes for media, which may end meanwhile."""
    total = resident_bytes(server.popen.pid)
    for pid in server.media_pids():
        try:
            total += resident_bytes(pid)
        except OSError:
            continue
    return total


def slow_gif(num_pixels: int = 2 * 10**9) -> bytes:
    """Takes many seconds, and is not refused: there are animations like it."""
    frame = growing_gif([(2000, 2000)])
    return frame[:19] + frame[19:-1] * (num_pixels // (2000 * 2000)) + b"\x3b"


BAD: dict[str, tuple[str, bytes]] = {
    "progressive": ("image", many_scans(8000, 8000, 2893)),
    "sequential": ("image", many_scans(8000, 8000, 2893, progressive=False)),
    "motion jpeg": ("video", motion_jpeg([flat(3000, 3000), many_scans(3000, 3000, 2893)], 3000, 3000)),
    "growing gif": ("video", growing_gif([(64, 64), (13000, 13000)])),
    "growing film": ("video", motion_jpeg([flat(64, 64), many_scans(13000, 13000, 0)], 64, 64)),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bomb_is_refused_and_leaves_no_memory_behind(server: ServerProcess, http: httpx2.Client, name: str) -> None:
    ask(http, part("video", growing_gif([(64, 64)])))
    before, quiet = used_bytes(server), ask_text(http)
    with ThreadPoolExecutor(4) as threads:
        replies = [threads.submit(ask, http, part(*BAD[name])) for _ in range(4)]
        assert ask_text(http) == quiet
        for reply in (future.result() for future in replies):
            assert reply.status_code in (400, 413), reply.text
            assert reply.json()["error"]["param"].startswith("messages[0].content[0]")
    wait_idle(http)
    processes = 2 * 48 * 2**20  # what idle ones may keep, see MAX_GROWN_BYTES
    assert used_bytes(server) - before < SPARE_BYTES + processes
    assert resident_bytes(server.popen.pid) < before + SPARE_BYTES


def test_text_and_small_images_do_not_wait_for_videos(server: ServerProcess, http: httpx2.Client) -> None:
    """Four videos would take minutes of CPU time; all answers here come before any of them is decoded."""
    video = part("video", slow_gif())
    links = [send_and_leave(server, video) for _ in range(4)]
    try:
        wait_inside(http, 4)
        for _ in range(5):
            ask_text(http)
            ask_image(http)
            assert ask(http, part("image", flat(70, 50, "PNG"))).status_code == 200  # decoded in the other process
            assert http.get("/health").status_code == 200
        assert http.get("/load").json()["server_load"] >= 3
    finally:
        for link in links:
            link.close()
    wait_idle(http)


def test_a_client_that_leaves_frees_its_process(server: ServerProcess, http: httpx2.Client) -> None:
    """Eight files of clients that left would keep the processes busy for minutes; the next one is decoded at once."""
    video = part("video", slow_gif())
    links = [send_and_leave(server, video) for _ in range(8)]
    wait_inside(http, 8)
    wait_busy(server, lambda: bool(http.get("/load").json()["server_load"]))
    for link in links:
        link.close()
    wait_idle(http)
    wait_quiet(server)
    reply = ask(http, part("video", growing_gif([(64, 64)] * 3)))
    assert reply.status_code == 200, reply.text


def test_many_videos_at_once_leave_no_memory_behind_and_no_text_outside(
    server: ServerProcess, http: httpx2.Client
) -> None:
    """A hundred and fifty bodies of 2.5 MB, whose clients leave."""
    before, video = resident_bytes(server.popen.pid), part("video", slow_gif())
    links = [send_and_leave(server, video) for _ in range(150)]
    try:
        wait_inside(http, 150)
        ask_text(http)
        ask_image(http)
    finally:
        for link in links:
            link.close()
    wait_idle(http)
    deadline = time.monotonic() + LEAVE_S
    while (used := resident_bytes(server.popen.pid)) - before > SPARE_BYTES:
        assert time.monotonic() < deadline, f"{used >> 20} MiB, {before >> 20} before"
        time.sleep(0.1)


def wait_inside(client: httpx2.Client, count: int) -> None:
    deadline = time.monotonic() + LEAVE_S
    while client.get("/load").json()["server_load"] < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_busy(server: ServerProcess, can_come: Callable[[], bool]) -> None:
    """Until a process has used CPU time, however little of it a busy machine gives."""
    first: dict[int, int] = {}
    while True:
        used = [ticks - first.setdefault(pid, ticks) for pid, (_, ticks) in states(server).items()]
        if any(ticks > 5 for ticks in used):
            return
        assert can_come(), "nothing is decoded"
        time.sleep(0.02)


def wait_quiet(server: ServerProcess) -> None:
    """Until a process is there and all wait for work. One that is still starting may have to wait for a CPU."""
    deadline = time.monotonic() + LEAVE_S
    before: dict[int, tuple[str, int]] = {}
    while not before or before != states(server) or any(state != "S" for state, _ in before.values()):
        assert time.monotonic() < deadline, before
        before = states(server)
        time.sleep(0.3)


def states(server: ServerProcess) -> dict[int, tuple[str, int]]:
    """Of each process for media: whether it sleeps ("S"), and the ticks of CPU time that it has used."""
    found = {}
    for pid in server.media_pids():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        found[pid] = fields[0], int(fields[11]) + int(fields[12])
    return found


def test_a_timeout_counts_decoding(http: httpx2.Client) -> None:
    reply = ask(http, part("video", slow_gif()), timeout=0.5)
    assert reply.status_code == 408, reply.text


def test_a_process_that_dies_is_replaced(server: ServerProcess, http: httpx2.Client) -> None:
    wait_quiet(server)  # a process that starts, because an earlier test lost one, uses CPU time too
    with ThreadPoolExecutor(1) as threads:
        reply = threads.submit(ask, http, part("video", slow_gif()))
        wait_busy(server, lambda: not reply.done())
        for pid in server.media_pids():
            os.kill(pid, signal.SIGKILL)
        assert reply.result().status_code == 503
        assert "try again" in reply.result().json()["error"]["message"]
    assert ask(http, part("image", flat(70, 50, "PNG"))).status_code == 200


def test_no_process_outlives_the_server(checkpoint: Path, tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with running(checkpoint, tmp_path / "log", server={"media_processes": 2}) as server:
            server.wait_ready()
            link = send_and_leave(server, part("video", slow_gif()))
            wait_busy(server, lambda: server.popen.poll() is None)
            pids = server.media_pids()
            assert pids
            if number == signal.SIGTERM:
                link.close()
            server.signal(number)
            server.wait()
            link.close()
            deadline = time.monotonic() + LEAVE_S
            while not all(map(gone, pids)):
                assert time.monotonic() < deadline
                time.sleep(0.02)
