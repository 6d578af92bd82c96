"""The engine interface that a server needs, whether that is one process or many."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from saccade.client.stream import Delta
from saccade.inputs.placeholders import Prompt
from saccade.inputs.processor import Processor
from saccade.wire.messages import Ready, StatsReply
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.trace_records import EngineTrace
from saccade.wire.turn import USUAL, Terms


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What one engine found at its start, and its numbers now."""

    ready: Ready
    stats: StatsReply


class ServedEngine(Protocol):
    """Implemented by `AsyncEngine`, which is one engine, and by `Replicas` and `RemoteEngine`, which are several."""

    @property
    def is_replicated(self) -> bool: ...
    @property
    def processor(self) -> Processor: ...
    @property
    def ready(self) -> Ready: ...
    @property
    def is_alive(self) -> bool: ...
    @property
    def death(self) -> str: ...
    @property
    def degraded(self) -> list[str]: ...

    async def wait_dead(self) -> str: ...

    def generate(
        self, request_id: str, prompt: Prompt, params: SamplingParams, terms: Terms = USUAL
    ) -> AsyncGenerator[Delta, None]: ...

    def abort(self, request_id: str) -> None: ...

    async def reports(self, passes_since: int | None = None) -> dict[str, EngineReport]:
        """Reports of the engines that answer, by name; a single engine is called "0"."""
        ...

    async def flush_cache(self) -> bool: ...

    async def aclose(self) -> None: ...


@runtime_checkable
class WatchedEngine(Protocol):
    """An engine that can be traced and profiled. Several together cannot: they run on different devices."""

    async def begin_trace(self, limit_s: float) -> None: ...

    async def end_trace(self) -> EngineTrace | None: ...

    async def start_profile(self, folder: str, limit_s: float) -> None: ...

    async def stop_profile(self) -> str: ...
