"""What all routes share: the engine and its phase, the model's names, the workers, the counters."""

import asyncio
from enum import Enum
from hashlib import sha256
from time import monotonic, time
from typing import Any

from saccade import __version__
from saccade.client.served import ServedEngine
from saccade.errors import EngineDeadError, RankGoneError
from saccade.inputs.media.media_loader import MediaLoader, MediaSettings
from saccade.inputs.media.media_pool import MediaPool
from saccade.inputs.sizing import read_sizing
from saccade.inputs.text.embedding import EmbeddingSettings
from saccade.inputs.text.generation import GenerationDefaults
from saccade.models.media import ImageSettings
from saccade.server.figures.metrics import Metrics
from saccade.server.figures.running_requests import RunningRequests
from saccade.server.figures.telemetry import new_telemetry
from saccade.server.http_errors import HttpError, draining, engine_dead, engine_restarting, no_model, starting, to_http
from saccade.server.response_store import ResponseStore
from saccade.server.server_settings import ServerSettings
from saccade.server.sharing.admission import Admission
from saccade.server.sharing.caller_limits import read_limits
from saccade.server.sharing.callers import Callers
from saccade.server.sharing.read_turns import ReadTurns
from saccade.server.sharing.workers import Workers
from saccade.server.text.tool_parser import ToolStyle
from saccade.wire.engine_metrics import JobStats
from saccade.wire.engine_settings import SchedulerSettings

SATURATED_S = 5.0  # a queue is saturated if its first entry has waited longer
ANY_MODEL = "auto"


class ServerPhase(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class Service:
    """One model behind the server. `engine` is available once the phase goes from STARTING to READY."""

    def __init__(self, model: str, settings: ServerSettings, limits: SchedulerSettings, media: MediaSettings) -> None:
        self.settings = settings
        self.names = settings.served_model_name or (model,)
        self.model = model
        self.created = int(time())
        self.begun = monotonic()
        self.time_to_ready_s: float | None = None
        self.media = MediaLoader(media)
        self.metrics = Metrics(self.names[0], settings.metrics_style)
        file = read_limits(settings.limits, allow_priority=settings.allow_priority)
        self.callers = Callers(file, settings.api_key)
        self.admission = Admission(
            max_inside=limits.max_queued_requests,  # raised when the engine reports how many run at once
            max_reading=settings.max_reading_requests,
            max_pending=settings.max_pending_requests,
            max_pending_bytes=settings.max_pending_bytes,
            retry_after_s=limits.retry_after_s,
        )
        self.read_turns = ReadTurns()
        self.workers = Workers(settings.preprocess_threads, num_media_requests=settings.max_pending_requests)
        self.media_pool: MediaPool | None = None
        self.responses = ResponseStore(settings.response_store_bytes)
        self.tool_style: ToolStyle = "hermes"
        self._engine: ServedEngine | None = None
        self.defaults: GenerationDefaults | None = None  # sampling defaults of the checkpoint
        self.eos_token_ids: frozenset[int] = frozenset()
        self.embedding = EmbeddingSettings()
        self.fingerprint = f"saccade-{__version__}"
        self._phase = ServerPhase.STARTING
        self._revival = ""  # why the engine is being restarted
        self.last_output: float | None = None  # on the monotonic clock
        self.requests = RunningRequests()
        self.telemetry = new_telemetry(settings.otlp_traces_endpoint)

    @property
    def phase(self) -> ServerPhase:
        if self._phase is ServerPhase.READY and self._engine is not None and not self._engine.is_alive:
            return ServerPhase.DEAD
        return self._phase

    @property
    def engine(self) -> ServedEngine:
        """The engine, also while requests drain; raises the reason if there is none."""
        if self.phase is ServerPhase.DEAD:
            raise engine_dead(self.death)
        if self._engine is None:
            raise starting()
        return self._engine

    @property
    def has_engine(self) -> bool:
        return self._engine is not None and self.phase is not ServerPhase.DEAD

    @property
    def is_replicated(self) -> bool:
        return self._engine is not None and self._engine.is_replicated

    @property
    def degraded(self) -> list[str]:
        """What is wrong with a server that still works: an engine, or a queue that is saturated."""
        found = [f"{self._revival}; it is being restarted"] if self._revival else []
        found += [] if self._engine is None else self._engine.degraded
        if (wait_s := self.workers.oldest_s) > SATURATED_S:
            found.append(f"requests wait {wait_s:.0f} seconds to be prepared")
        if self.media_pool is not None and (wait_s := self.media_pool.pool.oldest_s) > SATURATED_S:
            found.append(f"media wait {wait_s:.0f} seconds to be decoded")
        return found

    @property
    def media_jobs(self) -> JobStats | None:
        if self.media_pool is None:
            return None
        return JobStats(waiting=self.media_pool.pool.num_waiting, killed=self.media_pool.pool.num_killed)

    @property
    def death(self) -> str:
        """Which rank's loss killed the engine; empty if it is alive, never started, or died of something else."""
        return "" if self._engine is None else self._engine.death

    def check_open(self) -> None:
        """Raises unless new requests are accepted."""
        if self.phase is ServerPhase.DRAINING:
            raise draining()
        _ = self.engine

    @property
    def max_model_len(self) -> int:
        return self.engine.ready.limits.max_model_len

    def image_sizing(self, kwargs: Any) -> ImageSettings | None:
        """The sizes of images that a request asks for, within the limits of the checkpoint and the encoder."""
        engine = self.engine
        return read_sizing(kwargs, engine.processor.images, max_tokens=engine.ready.limits.encoder_budget_tokens)

    @property
    def max_sequences(self) -> int:
        """Most outputs of one request: more than can run and wait together could never be accepted."""
        return min(self.settings.max_prompts, _max_inside(self.engine.ready.limits))

    def open(
        self,
        engine: ServedEngine,
        defaults: GenerationDefaults,
        tool_style: ToolStyle = "hermes",
        *,
        configuration: str = "",
    ) -> None:
        """Starts to accept requests. `configuration` is what answers depend on besides weights and vocabulary; its hash
        is in every answer, so that clients notice when it changes."""
        self.fingerprint = f"saccade-{__version__}-{sha256(configuration.encode()).hexdigest()[:12]}"
        self._engine, self.tool_style = engine, tool_style
        self.admission.max_inside = _max_inside(engine.ready.limits)
        self.admission.max_running = engine.ready.limits.max_num_seqs
        self.eos_token_ids = defaults.eos_token_ids
        self.defaults = defaults if self.settings.generation_config == "auto" else None
        self.time_to_ready_s = self.time_to_ready_s or monotonic() - self.begun
        self._revival = ""
        if self._phase is ServerPhase.STARTING:
            self._phase = ServerPhase.READY

    def revive(self) -> None:
        """Called when the engine died and is about to be restarted. Until it is ready, requests are refused."""
        if self._phase is ServerPhase.READY:
            self._revival = self.death or "the engine died"
            self._phase, self._engine = ServerPhase.STARTING, None

    def lost(self, error: EngineDeadError) -> HttpError:
        """The error for a request whose engine died."""
        if self.phase is ServerPhase.DRAINING:  # at its end it closes the engine
            return to_http(error, "") if isinstance(error, RankGoneError) else draining()
        is_restarted = self.is_replicated or self.settings.restart_engine
        return engine_restarting() if is_restarted else to_http(error, "")

    def fail(self) -> None:
        self._phase, self._revival = ServerPhase.DEAD, ""

    def drain(self) -> None:
        """Refuses new requests; those inside continue."""
        self._phase = ServerPhase.DRAINING

    async def aclose(self) -> None:
        await self.media.aclose()
        self.workers.shutdown()
        if self.media_pool is not None:
            await asyncio.to_thread(self.media_pool.close)
        if self.telemetry is not None:
            await asyncio.to_thread(self.telemetry.close)

    def check_model(self, name: str | None) -> str:
        """The name to answer with; no name, or "auto", means the served model."""
        if not name or (name == ANY_MODEL and name not in self.names):
            return self.names[0]
        if name not in self.names:
            raise no_model(name, self.names)
        return name

    def note_output(self) -> None:
        self.last_output = monotonic()

    def abort(self, public_id: str | None) -> int:
        """Aborts a request, or all of them if None; returns how many engine requests that were."""
        ids = self.requests.ids_of(public_id)
        for engine_id in ids:
            self.engine.abort(engine_id)
        return len(ids)

    @property
    def is_idle(self) -> bool:
        return self.admission.inside == 0


def _max_inside(limits: SchedulerSettings) -> int:
    """Requests that may run and wait together. Takes the engine's limits: the command line's may be unresolved."""
    return limits.max_num_seqs + limits.max_queued_requests
