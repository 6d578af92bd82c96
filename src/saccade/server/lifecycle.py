"""From loading the model to the last reply: start, serve, drain, end."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic

from saccade.client.process import AsyncEngine
from saccade.client.spare import Spare
from saccade.errors import SaccadeError
from saccade.inputs.embedding import EmbeddingSettings
from saccade.inputs.generation import GenerationDefaults
from saccade.inputs.media_loader import MediaSettings
from saccade.inputs.media_pool import MediaPool
from saccade.inputs.processor import Processor
from saccade.inputs.template_trial import try_template
from saccade.models.folder import find_folder
from saccade.server.service import Service
from saccade.server.tools import tool_style
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings
from saccade.wire.messages import Stage

POLL_S = 0.02
COUNTED_BYTES = 10**6  # larger totals are bytes
END_S = 10.0  # to write the replies of aborted requests

FIRST_DELAY_S, MOST_DELAY_S, MAX_TRIES = 1.0, 60.0, 5
STEADY_S = 600.0  # of an engine's life after which its death counts as the first

Say = Callable[[str], None]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launch:
    model: str
    engine: EngineSettings
    limits: SchedulerSettings
    media: MediaSettings
    spare: Spare | None = None


class Stages:
    """Reports each start-up stage with its seconds, and shows progress meanwhile."""

    def __init__(self, say: Say, first: str, since: float, show: Say = lambda text: None) -> None:
        """`since` is when the first stage began (monotonic clock). Each shown text replaces the one before."""
        self._say, self._show = say, show
        self._name, self._since = first, since

    def enter(self, name: str) -> None:
        if name == self._name:
            return
        now = monotonic()
        if self._name:
            self._say(f"{self._name}: {now - self._since:.2f} s")
        self._name, self._since = name, now
        self._show(name)

    def note(self, stage: Stage) -> None:
        self.enter(stage.name)
        if stage.total > COUNTED_BYTES:
            self._show(f"{stage.name}: {stage.done / 1e9:.1f} of {stage.total / 1e9:.1f} GB")
        elif stage.total:
            self._show(f"{stage.name}: {stage.done} of {stage.total}")


async def start(service: Service, plan: Launch, stages: Stages) -> AsyncEngine:
    """The engine, open for requests. Raises the ConfigError of a wrong model or setting."""
    stages.enter("finding the model")
    chosen = plan.engine
    folder = await asyncio.to_thread(
        find_folder, plan.model, revision=chosen.revision, download_dir=chosen.download_dir
    )
    stages.enter("reading tokenizer and template")
    processor, _ = await asyncio.gather(
        asyncio.to_thread(
            Processor.from_folder, folder, limits=plan.media.limits(), chat_template=chosen.chat_template
        ),
        asyncio.to_thread(try_template, folder, chosen.chat_template),
    )
    if processor.images is not None and MediaPool.is_supported():
        processor.pool = service.media_pool = MediaPool(service.settings.media_processes)
    defaults = await asyncio.to_thread(GenerationDefaults.from_folder, folder)
    service.embedding = await asyncio.to_thread(EmbeddingSettings.from_folder, folder, chosen.pooling)
    await asyncio.to_thread(processor.rehearse)
    stages.enter("starting the engine")
    found = replace(chosen, revision="")  # the folder is that revision
    engine = await AsyncEngine.start(
        folder, found, plan.limits, processor=processor, report=stages.note, spare=plan.spare
    )
    stages.enter("")
    template = None if processor.template is None else processor.template.source
    config = await asyncio.to_thread((folder / "config.json").read_bytes)
    configuration = config + repr((chosen, engine.limits, template)).encode()
    service.open(engine, defaults, tool_style(template), configuration=configuration)
    return engine


class BackOff:
    """When to start an engine again that died, and when to give up. An engine that lived long enough starts anew."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._num_tries, self._ready_at = 0, clock()

    def note_ready(self) -> None:
        self._ready_at = self._clock()

    def note_death(self) -> None:
        if self._clock() - self._ready_at >= STEADY_S:
            self._num_tries = 0

    def next_delay_s(self) -> float | None:
        """Seconds to wait before the next try; None if there is none."""
        if self._num_tries == MAX_TRIES:
            return None
        self._num_tries += 1
        doubled: float = FIRST_DELAY_S * 2 ** (self._num_tries - 1)
        return min(doubled, MOST_DELAY_S)


async def restart(service: Service, plan: Launch, back_off: BackOff, stages: Stages) -> AsyncEngine | None:
    """Another engine, open for requests; None if it will not start. Its predecessor was closed."""
    while (delay_s := back_off.next_delay_s()) is not None:
        await asyncio.sleep(delay_s)
        try:
            engine = await start(service, replace(plan, spare=None), stages)
        except (SaccadeError, OSError) as error:
            _log.error("the engine could not be started again: %s", error)
        else:
            back_off.note_ready()
            return engine
    service.fail()
    return None


async def drain(service: Service, engine: AsyncEngine | None, hurry: asyncio.Event) -> None:
    """Refuses new requests; waits until those inside have ended, time is up or `hurry` is set; ends the engine, and
    waits until the aborted ones have their replies."""
    service.drain()
    await _until_idle(service, service.settings.shutdown_timeout_s, hurry)
    if engine is not None:
        await engine.aclose()
    await _until_idle(service, END_S, asyncio.Event())
    await service.aclose()


async def _until_idle(service: Service, limit_s: float, hurry: asyncio.Event) -> None:
    end = monotonic() + limit_s
    while not service.is_idle and not hurry.is_set() and monotonic() < end:
        await asyncio.sleep(POLL_S)
