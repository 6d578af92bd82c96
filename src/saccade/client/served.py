"""What a server needs of an engine, whether that is one process or many."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from saccade.client.stream import Delta
from saccade.inputs.placeholders import Prompt
from saccade.inputs.processor import Processor
from saccade.wire.engine_settings import SchedulerSettings
from saccade.wire.messages import Ready, StatsReply
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.trace_records import EngineTrace
from saccade.wire.turn import NEXT, Turn


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Of one process with a scheduler: what it found at its start, and its numbers now."""

    ready: Ready
    stats: StatsReply


class ServedEngine(Protocol):
    """See `AsyncEngine`, which is one engine, and `Replicas`, which are many."""

    @property
    def is_replicated(self) -> bool: ...
    @property
    def processor(self) -> Processor: ...
    @property
    def ready(self) -> Ready: ...
    @property
    def limits(self) -> SchedulerSettings: ...
    @property
    def is_alive(self) -> bool: ...
    @property
    def death(self) -> str: ...
    @property
    def degraded(self) -> list[str]: ...

    async def wait_dead(self) -> str: ...

    def generate(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        turn: Turn = NEXT,
        deadline: float | None = None,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[Delta, None]: ...

    def abort(self, request_id: str) -> None: ...

    async def reports(self, passes_since: int | None = None) -> dict[str, EngineReport]:
        """By the name of each engine that answers; one that stands alone is "0"."""
        ...

    async def flush_cache(self) -> bool: ...

    async def aclose(self, *, drain_s: float = 0.0) -> None: ...


@runtime_checkable
class WatchedEngine(Protocol):
    """One engine that can be traced and profiled; several cannot, as their times are not of one device."""

    async def begin_trace(self, limit_s: float) -> None: ...

    async def end_trace(self) -> EngineTrace | None: ...

    async def start_profile(self, folder: str, limit_s: float) -> None: ...

    async def stop_profile(self) -> str: ...
