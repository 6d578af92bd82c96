"""What streaming costs the front end: `python -m tests.server.streaming_cost [--against SRC] [--profile FILE]`.

The front end is the real one. Its engine is a process that speaks over the real sockets and sends every stream a token
each `--step-ms`, in waves: a wave begins when all streams have a request, and all of its requests end in one step. The
client reads bytes and sends the next request of a stream as soon as one ends.

Prints medians over runs: CPU microseconds per streamed token and per request, for the event loop's thread and the whole
process, computed from long and short answers; and the milliseconds from the last update of a wave until the engine has
the first and the last request of the next. With `--against`, a front end from other sources, such as another checkout's
`src`, gets the same load in turn."""

import argparse
import asyncio
import base64
import cProfile
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from queue import Queue
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import simplejpeg

import saccade
from saccade.processes import start_python
from saccade.wire import messages
from saccade.wire.engine_metrics import SchedulerStats
from saccade.wire.link import Link
from saccade.wire.update import Finish, FinishReason

MODULE = "tests.server.streaming_cost"
SHORT, READY_S, WARM_UP = 8, 120.0, 2
ENDED = b"0\r\n\r\n"
Figures = dict[str, float]


class Waves:
    """Stands in for the engine's process."""

    def __init__(self, file: int, num_streams: int, step_s: float) -> None:
        self._link = Link(socket.socket(fileno=file))
        self._num_streams, self._step_s = num_streams, step_s
        self._requests: dict[int, tuple[list[int], int]] = {}
        self._ended, self._taken = time.monotonic(), list[float]()
        self._is_open = True

    def run(self) -> None:
        while self._is_open:
            self._link.wait(None)
            if (frames := self._link.receive()) is not None:
                self._obey(frames)
            if len(self._requests) == self._num_streams:
                gaps = [round((at - self._ended) * 1e3, 3) for at in (min(self._taken), max(self._taken))]
                print("wave", json.dumps(gaps), file=sys.stderr, flush=True)
                self._answer()

    def _obey(self, frames: list[memoryview]) -> None:
        match messages.decode_command(frames[0]):
            case messages.StartEngine(limits=limits):
                settings = limits.resolved(is_cuda=False, max_position=2048)
                self._tell(messages.Ready(settings, kv_cache_tokens=10**6, block_size=16))
            case messages.Add(serial=serial, prompt=head, params=params):
                prompt = messages.unpack_prompt(head, frames[1:]).token_ids.tolist()
                half = len(prompt) // 2
                self._requests[serial] = prompt[half : half + 16], params.max_tokens or 1
                self._taken.append(time.monotonic())
            case messages.AskStats(serial=serial):
                figures = SchedulerStats(**dict.fromkeys(SchedulerStats.__dataclass_fields__, 0))
                self._tell(messages.StatsReply(serial, figures, {}))
            case messages.Close():
                self._tell(messages.Closed())
                self._is_open = False

    def _answer(self) -> None:
        due, step = time.monotonic(), 0
        while self._requests:
            news = []
            for serial, (words, num_tokens) in list(self._requests.items()):
                is_last = step + 1 == num_tokens
                finish = Finish(FinishReason.LENGTH) if is_last else None
                timings = {"queue": 0.0, "prefill": 0.01, "decode": 1.0} if is_last else None
                tokens = (words[step % len(words)],)
                news.append(messages.News(str(serial), tokens, finish=finish, timings=timings, serial=serial, index=0))
                if is_last:
                    del self._requests[serial]
            due = max(due + self._step_s, time.monotonic())
            time.sleep(max(due - time.monotonic(), 0.0))
            self._ended, self._taken = time.monotonic(), []
            self._tell(messages.Updates(news))
            step += 1

    def _tell(self, reply: messages.EngineReply) -> None:
        self._link.send([messages.encode(reply)])


def serve_here(profile: str) -> int:
    """The front end, with a thread that prints its CPU clocks for every line it reads."""
    from saccade import bundled
    from saccade.server.front_end import serve
    from saccade.server.lifecycle import Launch
    from saccade.server.server_settings import ServerSettings
    from saccade.wire.engine_settings import EngineSettings, SchedulerSettings

    def start(module: str, *words: str, **more: Any) -> "subprocess.Popen[bytes]":
        return start_python(MODULE, "--worker", *words, **more)

    clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)

    def tell() -> None:
        for _ in sys.stdin:
            print("clocks", json.dumps([time.clock_gettime(clock), time.process_time()]), file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)  # the parent process is gone

    threading.Thread(target=tell, daemon=True).start()
    limits, profiler = SchedulerSettings(max_num_seqs=256), cProfile.Profile()
    with patch("saccade.client.spare.start_python", start), profiler if profile else nullcontext():
        plan = Launch(str(bundled.path()), EngineSettings(device="cpu"), limits)
        code = serve(plan, ServerSettings(port=0))
    if profile:
        profiler.dump_stats(profile)
    return code


class Front:
    """A front end's process."""

    def __init__(self, src: Path, process: "subprocess.Popen[str]") -> None:
        self.src, self._process = src, process
        self._told: dict[str, Queue[str]] = {name: Queue() for name in ("ready", "clocks", "wave")}
        threading.Thread(target=self._read, daemon=True).start()
        self.port = int(self._told["ready"].get(timeout=READY_S).split()[1].rsplit(":", 1)[1])

    def clocks(self) -> list[float]:
        assert self._process.stdin is not None, "it is a pipe"
        print(file=self._process.stdin, flush=True)
        found: list[float] = json.loads(self._told["clocks"].get(timeout=READY_S))
        return found

    def wave(self) -> list[float]:
        found: list[float] = json.loads(self._told["wave"].get(timeout=READY_S))
        return found

    def _read(self) -> None:
        for line in self._process.stderr or ():
            name, _, rest = line.partition(" ")
            if name in self._told:
                self._told[name].put(rest)
            elif "Error" in line:
                print(line, end="", file=sys.stderr)


@contextmanager
def serving(src: Path, profile: str, flags: argparse.Namespace) -> Iterator[Front]:
    root = Path(__file__).parents[2]
    place = os.environ | {"PYTHONPATH": f"{src}:{root}"}
    load = ["--streams", str(flags.streams), "--step-ms", str(flags.step_ms), "--profile", profile]
    place["STREAMING_COST"] = json.dumps(load)
    command = [sys.executable, "-m", MODULE, "--front", *load]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=place)
    try:
        yield Front(src, process)
    finally:
        process.terminate()
        process.wait(30)


class Stream(asyncio.Protocol):
    """Sends a request, reads until its reply ends, and sends the next."""

    def __init__(self, request: bytes, num_requests: int) -> None:
        self._request, self._num_left = request, num_requests
        self.ended = asyncio.get_running_loop().create_future()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None, "it sends"
        if data.startswith(b"HTTP") and not data.startswith(b"HTTP/1.1 200"):
            self.ended.set_exception(RuntimeError(data.decode()))
        if not data.endswith(ENDED):
            return
        self._num_left -= 1
        if self._num_left:
            self._transport.write(self._request)
        elif not self.ended.done():
            self._transport.close()
            self.ended.set_result(None)


def content(image_side: int) -> Any:
    """A text of about 400 tokens, or an image of noise with a question. The model sees few of its pixels."""
    if not image_side:
        return "".join(f"the {number} pictures of a street " for number in range(40))
    noise = np.random.default_rng(0).integers(0, 256, (image_side, image_side, 3), dtype=np.uint8)
    url = f"data:image/jpeg;base64,{base64.b64encode(simplejpeg.encode_jpeg(noise)).decode()}"
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]


async def load(port: int, flags: argparse.Namespace, num_tokens: int) -> None:
    num_streams, num_waves = flags.streams, flags.waves
    said = {"messages": [{"role": "user", "content": content(flags.image)}], "max_tokens": num_tokens, "stream": True}
    said |= {"mm_processor_kwargs": {"max_pixels": 12544}} if flags.image else {}
    body = json.dumps(said | {"ignore_eos": True, "stream_options": {"include_usage": True}}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
    loop = asyncio.get_running_loop()
    opened = [
        await loop.create_connection(lambda: Stream(request, num_waves), "127.0.0.1", port) for _ in range(num_streams)
    ]
    await asyncio.gather(*(stream.ended for _, stream in opened))


def measure(front: Front, flags: argparse.Namespace, num_tokens: int) -> tuple[list[float], list[list[float]]]:
    """CPU microseconds per request, and the milliseconds between waves."""
    from saccade.bench.load.client import run  # lazy: a front end from other sources may lack it

    before = front.clocks()
    run(load(front.port, flags, num_tokens))
    after = front.clocks()
    waves = [front.wave() for _ in range(flags.waves)]
    num_requests = flags.streams * flags.waves
    return [(end - begin) / num_requests * 1e6 for begin, end in zip(before, after, strict=True)], waves[1:]


def figures(front: Front, flags: argparse.Namespace) -> Figures:
    long, waves = measure(front, flags, flags.tokens)
    short, _ = measure(front, flags, SHORT)
    tokens = [(more - less) / (flags.tokens - SHORT) for more, less in zip(long, short, strict=True)]
    requests = [less - token * SHORT for less, token in zip(short, tokens, strict=True)]
    return {
        "loop, us per token": tokens[0],
        "loop, us per request": requests[0],
        "process, us per token": tokens[1],
        "process, us per request": requests[1],
        "first request of the next wave, ms": float(np.median([first for first, _ in waves])),
        "last request of the next wave, ms": float(np.median([last for _, last in waves])),
    }


def show(front: Front, found: Sequence[Figures]) -> None:
    print(f"{front.src}, {len(found)} runs: median (least)")
    for name in found[0]:
        values = [one[name] for one in found]
        print(f"  {name:36} {np.median(values):8.1f} ({min(values):.1f})")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--against", type=Path, help="other sources to compare with")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--waves", type=int, default=4)
    parser.add_argument("--image", type=int, default=0, metavar="SIDE", help="send a square JPEG, not a long text")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=8.0)
    parser.add_argument("--profile", default="", help="a file for cProfile's figures of the event loop")
    parser.add_argument("--front", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    given = sys.argv[1:]
    if "--worker" in given:
        given += json.loads(os.environ["STREAMING_COST"])
    flags = parser.parse_args(given)
    if flags.worker is not None:
        Waves(flags.worker, flags.streams, flags.step_ms / 1e3).run()
        return 0
    if flags.front:
        return serve_here(flags.profile)
    sources = [Path(saccade.__file__).parents[1], *([flags.against] if flags.against else [])]
    with ExitStack() as stack:
        fronts = [stack.enter_context(serving(src, flags.profile, flags)) for src in sources]
        for front in fronts:
            for _ in range(WARM_UP):
                measure(front, flags, SHORT)
        found = [[figures(front, flags) for front in fronts] for _ in range(flags.runs)]
    for front, *ones in zip(fronts, *found, strict=True):
        show(front, ones)
    return 0


if __name__ == "__main__":
    sys.exit(main())
