"""A server that a benchmark starts and stops: `python -m saccade serve` in its own process."""

import re
import shlex
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from threading import Event, Thread
from time import perf_counter

from saccade.errors import ConfigError

SERVE = (sys.executable, "-m", "saccade", "serve")
READY = re.compile(r"ready on (https?://\S+)")
STOP_S = 60.0  # until it is killed
TAIL_LINES = 20
MAX_LINES = 10_000


class LaunchedServer:
    """`__enter__` returns when the server is ready; `__exit__` stops it. `lines` has its output with the seconds since
    the start. If the server exits or is not ready in time, a ConfigError shows its last
    lines. Ctrl-C does not reach the server, so the benchmark stops it itself."""

    def __init__(
        self,
        model: str,
        flags: str = "",
        *,
        timeout_s: float = 900.0,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.url = ""
        self.ready_s = 0.0
        self.lines: deque[tuple[float, str]] = deque(maxlen=MAX_LINES)
        self._command = [*SERVE, *([model] if model else []), "--port", "0", *shlex.split(flags)]
        self._timeout_s, self._say = timeout_s, say
        self._heard = Event()

    def __enter__(self) -> "LaunchedServer":
        self._begun = perf_counter()
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            bufsize=1,
            process_group=0 if sys.platform != "win32" else None,
        )
        self._listener = Thread(target=self._listen, daemon=True)
        self._listener.start()
        try:
            self._await_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def last_lines(self) -> str:
        return "\n".join(text for _, text in list(self.lines)[-TAIL_LINES:])

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join(STOP_S)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _await_ready(self) -> None:
        self._heard.wait(self._timeout_s)
        if self.url:
            return
        code = self._process.poll()
        why = f"is not ready after {self._timeout_s:g} s" if code is None else f"ended with exit code {code}"
        raise ConfigError(f"`{shlex.join(self._command)}` {why}; it said:\n{self.last_lines}")

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            since_s = perf_counter() - self._begun
            self.lines.append((since_s, line.rstrip()))
            self._say(line.rstrip())
            if not self.url and (match := READY.search(line)):
                self.ready_s = since_s
                self.url = match[1].rstrip("/.,")
                self._heard.set()
        self._process.wait()
        self._heard.set()
