"""Several engines behind the interface of one. The routing policy picks the engine that probably has a request's
images or prefix cached. An engine that dies is restarted while the others serve."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from msgspec.structs import replace as replace_struct

from saccade.client.back_off import BackOff
from saccade.client.served import EngineReport, ServedEngine
from saccade.client.stream import Delta
from saccade.errors import CapacityError, EngineDeadError, RequestError, SaccadeError
from saccade.inputs.placeholders import Prompt
from saccade.routing import Policy, Router, affinity_key, request_tokens
from saccade.wire.messages import Ready
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.turn import USUAL, Terms

RETRY_AFTER_S = 5.0  # while no engine is up

StartOne = Callable[[], Awaitable[ServedEngine]]
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Replica:
    """`engine` is None while the replica is down, and `trouble` says why."""

    name: str
    start: StartOne
    engine: ServedEngine | None
    trouble: str = ""
    is_given_up: bool = False
    back_off: BackOff = field(default_factory=BackOff)


@dataclass(slots=True)
class _Running:
    engine: ServedEngine
    is_aborted: bool = False


class Replicas:
    """Created by `start`, ended by `aclose`, used in one event loop. It counts as dead when no engine is up and none
    will be restarted."""

    is_replicated = True
    death = ""

    def __init__(self, replicas: Sequence[_Replica], policy: Policy) -> None:
        self._replicas = {replica.name: replica for replica in replicas}
        self._router = Router(policy)
        for name in self._replicas:
            self._router.join(name)
        engines = [replica.engine for replica in replicas if replica.engine is not None]
        self.processor, self.ready = engines[0].processor, sum_of([engine.ready for engine in engines])
        self._running: dict[str, _Running] = {}
        self._dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._is_closing = False
        self._keepers = [asyncio.create_task(self._keep(replica)) for replica in replicas]

    @classmethod
    async def start(cls, starts: Sequence[StartOne], new_policy: Callable[[Ready], Policy]) -> "Replicas":
        """Starts all engines at once; the same functions restart them later. If one fails to start, all are closed.
        `new_policy` receives what the first engine found."""
        tasks = [asyncio.ensure_future(start()) for start in starts]
        try:
            engines = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(engine.aclose() for engine in found if not isinstance(engine, BaseException)))
            raise
        pairs = enumerate(zip(starts, engines, strict=True))
        return cls([_Replica(str(i), start, engine) for i, (start, engine) in pairs], new_policy(engines[0].ready))

    @property
    def is_alive(self) -> bool:
        return not self._is_closing and not self._dead.done()

    @property
    def degraded(self) -> list[str]:
        found = []
        for replica in self._replicas.values():
            if replica.engine is None:
                end = "it could not be restarted" if replica.is_given_up else "it is being restarted"
                found.append(f"replica {replica.name} of {len(self._replicas)} is down; {end}")
            else:
                found += [f"replica {replica.name}: {reason}" for reason in replica.engine.degraded]
        return found

    @property
    def loads(self) -> dict[str, int]:
        """Tokens queued and running on each living replica, by its name."""
        return self._router.loads

    async def wait_dead(self) -> str:
        return await asyncio.shield(self._dead)

    async def generate(
        self, request_id: str, prompt: Prompt, params: SamplingParams, terms: Terms = USUAL
    ) -> AsyncGenerator[Delta, None]:
        """Like `AsyncEngine.generate`. If the engine is full or dies before the first delta, the request moves to
        another one, though only once after a death. After the first delta it ends with the EngineDeadError."""
        if request_id in self._running:
            raise RequestError(f"request {request_id!r} is still running; ids must be unique", param="request_id")
        key, tokens = affinity_key(prompt, terms.cache_salt), request_tokens(len(prompt), params)
        tried, num_deaths = dict[str, SaccadeError](), 0
        held: Prompt | None = prompt
        del prompt
        while True:
            taken = self._router.assign(key, tokens, avoid=tried)
            if taken is None:
                raise self._nobody(list(tried.values()))
            engine = self._replicas[taken.replica].engine
            assert engine is not None and held is not None, "the router has only living engines"
            self._running[request_id] = running = _Running(engine)
            try:
                source = engine.generate(request_id, held, params, terms)
                async with aclosing(source):
                    async for delta in source:
                        held = None  # its pixels are no longer needed
                        yield delta
                return
            except (EngineDeadError, CapacityError) as error:
                has_died = isinstance(error, EngineDeadError)
                if held is None or running.is_aborted or (has_died and num_deaths):
                    raise
                num_deaths += has_died
                tried[taken.replica] = error
            finally:
                del self._running[request_id]
                self._router.finish(taken)

    def abort(self, request_id: str) -> None:
        running = self._running.get(request_id)
        if running is not None:
            running.is_aborted = True
            running.engine.abort(request_id)

    async def reports(self, passes_since: int | None = None) -> dict[str, EngineReport]:
        """Engines that are down are left out; if all are, raises EngineDeadError."""
        living = {replica.name: replica.engine for replica in self._replicas.values() if replica.engine is not None}
        asked = (engine.reports(passes_since) for engine in living.values())
        answers = await asyncio.gather(*asked, return_exceptions=True)
        found = {}
        for name, answer in zip(living, answers, strict=True):
            if isinstance(answer, dict):
                [found[name]] = answer.values()
            elif not isinstance(answer, EngineDeadError):
                raise answer
        if not found:
            raise EngineDeadError("no engine is running")
        return found

    async def flush_cache(self) -> bool:
        """Flushes every living engine. Returns False if one of them had requests."""
        living = [replica.engine for replica in self._replicas.values() if replica.engine is not None]
        return all(await asyncio.gather(*(engine.flush_cache() for engine in living)))

    async def aclose(self) -> None:
        self._is_closing = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        living = [replica.engine for replica in self._replicas.values() if replica.engine is not None]
        await asyncio.gather(*(engine.aclose() for engine in living))
        if not self._dead.done():
            self._dead.set_result("the engines were closed")

    async def _keep(self, replica: _Replica) -> None:
        """Restarts the engine whenever it dies, until it cannot be restarted."""
        while replica.engine is not None:
            reason = await replica.engine.wait_dead()
            self._router.leave(replica.name)
            dead, replica.engine, replica.trouble = replica.engine, None, reason
            _log.error("replica %s: %s; the others keep serving", replica.name, reason)
            replica.back_off.note_death()
            await dead.aclose()
            replica.engine = await replica.back_off.restarted(replica.start, f"replica {replica.name}")
            if replica.engine is not None:
                replica.trouble = ""
                self._router.join(replica.name)
                _log.warning("replica %s is running again", replica.name)
        replica.is_given_up = True
        if all(other.is_given_up for other in self._replicas.values()) and not self._dead.done():
            self._dead.set_result(f"all engines died; the last one: {replica.trouble}")

    def _nobody(self, errors: list[SaccadeError]) -> SaccadeError:
        """The error for a request that no engine takes."""
        if errors:
            return errors[-1]
        if not self.is_alive:
            return EngineDeadError("the engines are gone")
        return CapacityError("all replicas are being restarted", retry_after_s=RETRY_AFTER_S)


def devices_of(device: str, count: int, ranks: int) -> list[str]:
    """The first device of each of `count` engines with `ranks` ranks; a CPU serves all."""
    kind, _, index = device.partition(":")
    if kind == "cpu" or count == 1 or not (index or "0").isdecimal():  # the engine reports a bad device itself
        return [device] * count
    return [f"{kind}:{int(index or 0) + i * ranks}" for i in range(count)]


def sum_of(found: Sequence[Ready]) -> Ready:
    """What all engines offer together. Limits on concurrent work add up; limits of one request or step do not."""
    limits = [one.limits for one in found]
    sums = {name: sum(getattr(one, name) for one in limits) for name in _ADD_UP}
    least = {name: min(getattr(one, name) for one in limits) for name in ("max_model_len", "encoder_budget_tokens")}
    return replace_struct(
        found[0],
        limits=replace(limits[0], **sums, **least),
        kv_cache_tokens=sum(one.kv_cache_tokens for one in found),
        gpu_bytes=sum(one.gpu_bytes for one in found),
    )


_ADD_UP = ("max_num_seqs", "max_num_batched_tokens", "max_queued_requests", "max_queued_tokens", "max_media_bytes")
