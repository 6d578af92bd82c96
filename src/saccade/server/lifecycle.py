"""From loading the model to the last reply: start, serve, drain, end."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from saccade.client.back_off import BackOff
from saccade.client.process import AsyncEngine
from saccade.client.replicas import Replicas, StartOne, devices_of
from saccade.client.served import ServedEngine
from saccade.client.spare import Spare
from saccade.inputs.media.media_loader import MediaSettings
from saccade.inputs.media.media_pool import MediaPool
from saccade.inputs.processor import Processor
from saccade.inputs.text.embedding import EmbeddingSettings
from saccade.inputs.text.generation import GenerationDefaults
from saccade.inputs.text.template_trial import try_template
from saccade.models.folder import find_model
from saccade.models.model_config import Config
from saccade.routing import make_policy, room_of
from saccade.server.requests.request_params import usable_defaults
from saccade.server.server_settings import ServerSettings
from saccade.server.service import Service
from saccade.server.text.tools import tool_style
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings
from saccade.wire.messages import Stage

_log = logging.getLogger(__name__)
POLL_S = 0.02
COUNTED_BYTES = 10**6  # larger totals are bytes
END_S = 10.0  # for writing the replies of aborted requests

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Launch:
    """A model and how to run it. `spare` is a worker process that was started ahead of time."""

    model: str
    engine: EngineSettings = field(default_factory=EngineSettings)
    limits: SchedulerSettings = field(default_factory=SchedulerSettings)
    media: MediaSettings = field(default_factory=MediaSettings)
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


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """What the front end reads from a checkpoint. `values` are those of its config.json and its defaults."""

    folder: Path
    values: Mapping[str, Any]
    processor: Processor
    defaults: GenerationDefaults


async def start(service: Service, plan: Launch, stages: Stages) -> ServedEngine:
    """Starts the engine and opens the service for requests. Raises ConfigError for a wrong model or setting."""
    found = await prepare(service, plan, stages)
    stages.enter("starting the engine")
    launch = replace(plan, model=str(found.folder), engine=replace(plan.engine, revision=""))  # the folder has it
    warming = asyncio.create_task(asyncio.to_thread(found.processor.tokenizer.warm_up))  # while the engine starts
    engine = await _start_engines(launch, found.processor, service.settings, stages)
    await asyncio.wait({warming})
    stages.enter("")
    open_service(service, plan, found, engine)
    return engine


async def prepare(service: Service, plan: Launch, stages: Stages) -> PreparedModel:
    stages.enter("finding the model")
    chosen = plan.engine
    folder = await asyncio.to_thread(find_model, plan.model, revision=chosen.revision, download_dir=chosen.download_dir)
    stages.enter("reading tokenizer and template")
    processor, _ = await asyncio.gather(
        asyncio.to_thread(
            Processor.from_folder, folder, limits=plan.media.limits(), chat_template=chosen.chat_template
        ),
        asyncio.to_thread(try_template, folder, chosen.chat_template),
    )
    if processor.images is not None and MediaPool.is_supported():
        # An engine that starts again finds the pool of the first.
        processor.pool = service.media_pool = service.media_pool or MediaPool(service.settings.media_processes)
    defaults = await asyncio.to_thread(_read_defaults, folder, processor, service.settings)
    service.embedding = await asyncio.to_thread(EmbeddingSettings.from_folder, folder, chosen.pooling)
    config = await asyncio.to_thread(Config.read, folder / "config.json")
    await asyncio.to_thread(processor.warm_up)
    return PreparedModel(folder, config.values, processor, defaults)


def _read_defaults(folder: Path, processor: Processor, settings: ServerSettings) -> GenerationDefaults:
    usable, reasons = usable_defaults(GenerationDefaults.from_folder(folder, processor.tokenizer))
    for reason in reasons if settings.generation_config == "auto" else ():
        _log.warning("generation_config.json: %s; this value is not used", reason)
    return usable


def open_service(service: Service, plan: Launch, found: PreparedModel, engine: ServedEngine) -> None:
    """Cannot fail: nobody would close the engine."""
    inputs = found.processor
    template = None if inputs.template is None else inputs.template.source
    media = (inputs.images, inputs.videos, inputs.placeholders)
    configuration = repr((found.values, plan.engine, engine.ready.limits, template, media, found.defaults))
    service.open(engine, found.defaults, tool_style(template), configuration=configuration)


async def _start_engines(plan: Launch, processor: Processor, server: ServerSettings, stages: Stages) -> ServedEngine:
    """Starts one engine, or --data-parallel-size of them at the same time."""
    count, num_ready = server.data_parallel_size, 0
    devices = devices_of(plan.engine.device, count, plan.engine.tensor_parallel_size)

    async def start_one(place: int) -> ServedEngine:
        nonlocal num_ready
        engine = await AsyncEngine.start(
            plan.model,
            replace(plan.engine, device=devices[place]),
            plan.limits,
            processor=processor,
            report=stages.note if place == 0 else lambda stage: None,
            spare=plan.spare if place == 0 else None,
        )
        num_ready += 1
        if num_ready < count:
            stages.note(Stage("starting replicas", num_ready, count))
        return engine

    starts: list[StartOne] = [partial(start_one, place) for place in range(count)]
    if count == 1:
        return await starts[0]()
    return await Replicas.start(
        starts, lambda ready: make_policy(server.routing, room_tokens=room_of(ready.limits.max_num_batched_tokens))
    )


async def restart(service: Service, plan: Launch, back_off: BackOff, stages: Stages) -> ServedEngine | None:
    """Starts a new engine in place of a closed one and opens the service for requests; None if it will not start."""
    engine = await back_off.restarted(partial(start, service, plan, stages), "the engine")
    if engine is None:
        service.fail()
    return engine


async def drain(service: Service, engine: ServedEngine | None, hurry: asyncio.Event) -> str:
    """Refuses new requests and waits until the others have ended, time is up or `hurry` is set. Then ends the engine,
    and waits until aborted requests have their replies. Returns why the engine died meanwhile; "" if it did not."""
    was_alive, death = engine is not None and engine.is_alive, ""
    service.drain()
    await _until_idle(service, service.settings.shutdown_timeout_s, hurry)
    if engine is not None:
        if was_alive and not engine.is_alive:
            death = await engine.wait_dead()
        await engine.aclose()
    await _until_idle(service, END_S, asyncio.Event())
    await service.aclose()
    return death


async def _until_idle(service: Service, limit_s: float, hurry: asyncio.Event) -> None:
    end = monotonic() + limit_s
    while not service.is_idle and not hurry.is_set() and monotonic() < end:
        await asyncio.sleep(POLL_S)
