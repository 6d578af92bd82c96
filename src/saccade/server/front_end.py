"""`saccade serve`: the process that speaks HTTP and starts the engine's process."""

import asyncio
import gc
import logging
import math
import resource
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any, TextIO

import uvicorn
from rich.console import Console

from saccade.client.back_off import BackOff
from saccade.client.served import ServedEngine
from saccade.config import writable_folder
from saccade.errors import ConfigError, SaccadeError
from saccade.server.app import build_app
from saccade.server.http.addresses import address_of
from saccade.server.http.http11 import BoundedProtocol
from saccade.server.http.tls import TlsFiles
from saccade.server.lifecycle import Launch, Stages, drain, restart, start
from saccade.server.server_settings import ServerSettings
from saccade.server.service import Service
from saccade.server.sharing.freed_memory import FreedMemory
from saccade.server.work_line import WorkLine

EXIT_ENGINE_DIED, EXIT_CANNOT_START = 1, 2
GRACE_S = 5  # for connections to close after the last replies
BACKLOG = 2048
NUM_LISTENERS = 16
MAX_CONNECTIONS, SPARE_FILES = 16384, 256
SWITCH_S = 0.0005  # image decoding threads yield the GIL to the event loop this soon

_log = logging.getLogger(__name__)
_LOG_LEVELS = (("saccade", logging.INFO), ("uvicorn", logging.WARNING))


def serve(plan: Launch, settings: ServerSettings) -> int:
    """Serves until a signal arrives and returns the exit code; a second signal skips the drain."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        if settings.profile_folder:
            writable_folder(settings.profile_folder, "--profile-folder")
        with _bound(settings) as listener:
            sys.setswitchinterval(SWITCH_S)
            warnings.filterwarnings("ignore", module="PIL")  # would put clients' files into the server's log
            log_to_stderr()
            front = _Front(settings, plan, console)
            config = front.config()
            config.load()
            with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
                return runner.run(front.run(config, listener))
    except SaccadeError as error:
        console.print(f"saccade: {error}", markup=False)
        return EXIT_CANNOT_START
    finally:
        gc.unfreeze()


class _Front:
    """The front end: answers HTTP at once, and accepts requests when the engine is ready."""

    def __init__(self, settings: ServerSettings, plan: Launch, console: Console) -> None:
        self._settings, self._plan, self._console = settings, plan, console
        self._tls = TlsFiles(settings) if settings.ssl_certfile else None
        self._service = Service(plan.model, settings, plan.limits, plan.media)
        self._engine: ServedEngine | None = None
        self._engine_died = False

    def config(self) -> uvicorn.Config:
        settings, tls = self._settings, self._tls
        return uvicorn.Config(
            build_app(self._service),
            http=BoundedProtocol.limited(
                settings.max_header_bytes, settings.body_timeout_s, _max_connections(settings)
            ),
            loop="auto",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,  # see `AccessLog`
            root_path=settings.root_path,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(settings.keep_alive_s),
            timeout_graceful_shutdown=GRACE_S,
            backlog=BACKLOG,
            ssl_context_factory=None if tls is None else lambda config, default: tls.context,
        )

    async def run(self, config: uvicorn.Config, listener: socket.socket) -> int:
        http = _HttpServer(config)
        if not self._settings.is_local and not self._service.callers.keys:
            who = f"anyone who can reach {self._settings.host}"
            self._say(f"warning: {who} can use this server; set a key (--api-key)")
        self._say(f"listening on {_address(self._settings, listener)}")
        serving = asyncio.create_task(http.serve(sockets=listeners(listener)))
        starting = asyncio.create_task(self._start(listener))
        stopped = asyncio.create_task(http.stopped.wait())
        background: list[asyncio.Task[Any]] = [starting, stopped]
        if self._tls is not None:
            background.append(asyncio.create_task(self._tls.watch()))
        try:
            await asyncio.wait({starting, stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                engine_ended = asyncio.create_task(self._watch_engine())
                background += [engine_ended, asyncio.create_task(FreedMemory(self._service.admission).run())]
                if self._settings.log_stats:
                    background.append(asyncio.create_task(WorkLine(self._service).run()))
                await asyncio.wait({engine_ended, stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
                if engine_ended.done():
                    engine_ended.result()
            self._say("shutting down")
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            if death := await drain(self._service, self._engine, http.hurry):
                _log.error("%s", death)
                self._engine_died = True
            http.should_exit = True
            await serving
        return EXIT_ENGINE_DIED if self._engine_died else 0

    async def _start(self, listener: socket.socket) -> None:
        try:
            with self._console.status("starting") as line:  # prints nothing without a terminal
                stages = Stages(self._say, "opening the front end", self._service.begun, line.update)
                self._engine = await start(self._service, self._plan, stages)
        except BaseException:
            self._service.fail()
            raise
        gc.collect()
        gc.freeze()  # scanning the long-lived objects would block the event loop for 0.1 s or more
        if self._settings.data_parallel_size > 1:
            self._say(f"{self._settings.data_parallel_size} replicas; routing: {self._settings.routing}")
        if self._engine.ready.ranks.size > 1:
            self._say(self._engine.ready.ranks.summary())
        total = self._service.time_to_ready_s or 0.0
        self._say(f"ready on {_address(self._settings, listener)} after {total:.2f} s")

    async def _watch_engine(self) -> None:
        """Returns `dead_engine_s` after the engine died for good, so that clients and probes can learn why."""
        back_off, is_alive = BackOff(), True
        while is_alive:
            assert self._engine is not None, "the engine was started"
            reason = await self._engine.wait_dead()
            _log.error("%s; /health reports it, and requests are refused", reason)
            is_alive = self._settings.restart_engine and await self._revive(back_off)
        self._engine_died = True
        await asyncio.sleep(self._settings.dead_engine_s or math.inf)

    async def _revive(self, back_off: BackOff) -> bool:
        assert self._engine is not None, "only an engine that was started can die"
        back_off.note_death()
        self._service.revive()
        await self._engine.aclose()
        found = await restart(self._service, self._plan, back_off, Stages(self._say, "", monotonic()))
        if found is None:
            return False
        self._engine = found
        self._say("the engine is running again")
        return True

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False)


def listeners(listener: socket.socket) -> list[socket.socket]:
    """The listening socket and duplicates of it. In one turn of its loop uvloop accepts one connection per socket, and
    turns are long while many bodies arrive: with one socket, a probe would wait a turn for each connection ahead."""
    return [listener, *(listener.dup() for _ in range(NUM_LISTENERS - 1))]


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which is not the plain stream while a terminal shows start-up progress."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def log_to_stderr() -> None:
    """Sets up the log: plain lines, written on the event loop, so each may take only microseconds."""
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    for name, level in _LOG_LEVELS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


class _HttpServer(uvicorn.Server):
    """uvicorn with our signal handling: the first signal drains, the second hurries, and neither sets the exit code."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopped, self.hurry = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        chosen = self.hurry if self.stopped.is_set() else self.stopped
        self._loop.call_soon_threadsafe(chosen.set)


@contextmanager
def _bound(settings: ServerSettings) -> Iterator[socket.socket]:
    """The listening socket. A Unix socket's file is removed with it."""
    with _bind_unix(Path(settings.uds)) if settings.uds else _bind(settings) as listener:
        try:
            yield listener
        finally:
            if settings.uds:
                Path(settings.uds).unlink(missing_ok=True)


def _max_connections(settings: ServerSettings) -> int:
    """The limit from the settings, or one that leaves enough files for everything else this process opens."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = settings.max_connections or MAX_CONNECTIONS
    if soft != resource.RLIM_INFINITY and soft < wanted + SPARE_FILES:
        # Shells often set 1024 where the system allows far more.
        soft = wanted + SPARE_FILES if hard == resource.RLIM_INFINITY else min(wanted + SPARE_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    most = wanted if soft == resource.RLIM_INFINITY else min(wanted, max(soft - SPARE_FILES, soft // 2))
    if settings.max_connections > most:
        what = f"max_connections is {settings.max_connections}; this process may open {soft} files"
        raise ConfigError(f"{what}, some of which it needs itself (lower --max-connections, or raise ulimit -n)")
    return most


def _bind(settings: ServerSettings) -> socket.socket:
    listener = None
    try:
        family, address = address_of(settings.host, settings.port)
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # two servers can bind one port; only listen() fails if it is taken
    except OSError as error:
        if listener is not None:
            listener.close()
        where = f"{settings.host}:{settings.port}"
        raise ConfigError(f"cannot listen on {where}: {error.strerror} (--host, --port)") from None
    return listener


def _bind_unix(path: Path) -> socket.socket:
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error} (--uds)") from None
    return listener


def _remove_stale(path: Path) -> None:
    """Removes a socket file that nobody listens on. One that answers belongs to another server and stays."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        except OSError:  # unclear from here: binding will fail and say why
            return
        else:
            raise ConfigError(f"another server listens on {path} (--uds)")


def _address(settings: ServerSettings, listener: socket.socket) -> str:
    if settings.uds:
        return f"unix:{settings.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if settings.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
