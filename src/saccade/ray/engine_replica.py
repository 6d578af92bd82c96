"""A replica: one engine and its processes, as a Ray Serve actor."""

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from time import monotonic

from msgspec.structs import replace

from saccade.client.process import AsyncEngine
from saccade.errors import EngineDeadError
from saccade.ray.deploy_plan import decode_plan
from saccade.ray.ray_messages import ReplicaReply, Route, decode_question, encode, ended, prompt_of
from saccade.wire import messages
from saccade.wire.messages import PromptArrays


class EngineReplica:
    """Ray Serve calls `check_health`, `record_routing_stats` and `record_autoscaling_stats` regularly, and `__del__`
    when no request is left."""

    async def __init__(self, plan: bytes, name: str = "") -> None:  # type: ignore[misc]
        launch = decode_plan(plan).launch()
        self._plan = plan
        self._name = name or _own_name()
        self._tokens = Counter[str]()  # queued and running, by front end
        self._num_requests = 0
        self._engine = await AsyncEngine.start(launch.model, launch.engine, launch.limits)

    async def generate(self, question: bytes, arrays: PromptArrays, route: Route) -> AsyncGenerator[bytes, None]:
        """Yields replies as bytes. An error is one of them, so that no exception is pickled. Cancelling the call aborts
        the request."""
        _, tokens, sender, _ = route
        self._tokens[sender] += tokens
        self._num_requests += 1
        try:
            asked = decode_question(question)
            terms = replace(asked.terms, deadline=None if asked.seconds is None else monotonic() + asked.seconds)
            source = self._engine.generate(asked.request_id, prompt_of(asked, arrays), asked.params, terms)
            del arrays
            async with aclosing(source):
                async for delta in source:
                    yield encode(ReplicaReply(delta=delta))
        except Exception as error:
            yield encode(ReplicaReply(ended=ended(error, self._name)))
        finally:
            self._tokens[sender] -= tokens
            self._tokens = +self._tokens  # drops senders with no tokens left
            self._num_requests -= 1

    async def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    async def ready(self, plan: bytes) -> bytes | None:
        """What the engine found at its start; None for a front end with another plan."""
        return messages.encode(self._engine.ready) if plan == self._plan else None

    async def report(self, passes_since: int | None = None) -> tuple[str, bytes, bytes, list[str]]:
        """The replica's name, what its engine found at the start, its numbers, and what is wrong with it."""
        stats = await self._engine.stats(passes_since)
        return self._name, messages.encode(self._engine.ready), messages.encode(stats), self._engine.degraded

    async def flush_cache(self) -> bool:
        return await self._engine.flush_cache()

    async def check_health(self) -> None:
        """As for /health, a degraded engine keeps serving. A dead one is replaced."""
        if not self._engine.is_alive:
            raise EngineDeadError(self._engine.death or "the engine is gone")

    async def record_routing_stats(self) -> dict[str, dict[str, int]]:
        return {"tokens": dict(self._tokens)}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {"tokens": self._tokens.total(), "requests": self._num_requests}

    async def __del__(self) -> None:
        if (engine := getattr(self, "_engine", None)) is not None:
            await engine.aclose()


def _own_name() -> str:
    from ray import serve  # tests run replicas without Ray

    name: str = serve.get_replica_context().replica_id.unique_id
    return name
