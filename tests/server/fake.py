"""An engine that follows a test's script, and a client that speaks ASGI without a socket."""

import asyncio
from collections.abc import AsyncGenerator, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from saccade.client.served import EngineReport, ServedEngine
from saccade.client.stream import Delta
from saccade.errors import EngineDeadError, RequestError
from saccade.inputs.media.media_loader import MediaSettings
from saccade.inputs.placeholders import Prompt
from saccade.inputs.processor import Processor
from saccade.inputs.text.generation import GenerationDefaults
from saccade.server.app import build_app
from saccade.server.server_settings import ServerSettings
from saccade.server.service import Service
from saccade.wire.engine_metrics import JobStats, SchedulerStats
from saccade.wire.engine_settings import SchedulerSettings
from saccade.wire.messages import Ready, StatsReply
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.turn import USUAL, Terms

HANG_S = 120.0  # a longer wait is a hang, even on a busy machine
Script = Callable[[Prompt, SamplingParams], AsyncGenerator[dict[str, Any], None]]


async def two_words(prompt: Prompt, params: SamplingParams) -> AsyncGenerator[dict[str, Any], None]:
    yield {"text": "two", "token_ids": (5,)}
    yield {"text": " words", "token_ids": (6,), "finish_reason": "stop"}


class FakeEngine:
    """The part of AsyncEngine that the server uses."""

    is_replicated = False

    def __init__(self, processor: Processor, script: Script = two_words, *, max_model_len: int = 512) -> None:
        self.processor, self.script = processor, script
        limits = SchedulerSettings().resolved(is_cuda=False, max_position=max_model_len)
        self.ready = Ready(limits, kv_cache_tokens=1600, block_size=16)
        self.is_alive, self.death, self.gpu_bytes, self.gpu_reserved_bytes = True, "", 0, 0
        self.grammar_jobs = JobStats()
        self.running: set[str] = set()
        self.seen: list[tuple[Prompt, SamplingParams, Terms]] = []
        self.aborted: list[str] = []
        self.num_flushes = 0
        self.degraded: list[str] = []
        self.profiles: list[tuple[str, float]] = []

    async def generate(
        self, request_id: str, prompt: Prompt, params: SamplingParams, terms: Terms = USUAL
    ) -> AsyncGenerator[Delta, None]:
        self.seen.append((prompt, params, terms))
        self.running.add(request_id)
        counts: dict[int, int] = {}
        try:
            async for said in self.script(prompt, params):
                index = said.get("index", 0)
                counts[index] = counts.get(index, 0) + len(said.get("token_ids", ()))
                base = {"index": 0, "token_ids": (), "text": "", "logprobs": None}
                numbers = {"num_prompt_tokens": len(prompt), "num_cached_tokens": 0, "num_output_tokens": counts[index]}
                yield Delta(request_id=request_id, **{**base, **numbers, **said})
        finally:
            self.running.discard(request_id)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def flush_cache(self) -> bool:
        self.num_flushes += not self.running
        return not self.running

    async def begin_trace(self, limit_s: float) -> None:
        raise EngineDeadError("a script has no passes")

    async def end_trace(self) -> None:
        return None

    async def start_profile(self, folder: str, limit_s: float) -> None:
        self.profiles = [*self.profiles, (folder, limit_s)]

    async def stop_profile(self) -> str:
        if not self.profiles:
            raise RequestError("no profile runs", code="profile_refused")
        return f"{self.profiles.pop()[0]}/a.json"

    async def reports(self, passes_since: int | None = None) -> dict[str, EngineReport]:
        return {"0": EngineReport(self.ready, await self.stats(passes_since))}

    async def wait_dead(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def aclose(self) -> None:
        self.is_alive = False

    async def stats(self, passes_since: int | None = None) -> StatsReply:
        if not self.is_alive:
            raise EngineDeadError("gone")
        numbers = dict.fromkeys(SchedulerStats.__dataclass_fields__, 0)
        graph = {"key": "decode full rows=8", "tier": "capacity", "bytes": 10, "capture_seconds": 0.5, "replays": 3}
        phase = {"phase": "decode", "fallbacks": {"too_large": 2}, "real_rows": 9, "padded_rows": 1, "graphs": [graph]}
        graph["out_of_service"] = "a shadow check found it wrong"
        phase |= {"selfcheck": 0.25, "shadow": {"equal": 7, "different": 1}}
        scheduler = SchedulerStats(**(numbers | {"running": len(self.running)}))
        gpu = self.gpu_bytes, self.gpu_reserved_bytes
        return StatsReply(0, scheduler, {"decode": phase}, *gpu, grammar_jobs=self.grammar_jobs)


def service_for(engine: ServedEngine | None, scheduler: SchedulerSettings | None = None, **settings: Any) -> Service:
    service = Service("m", ServerSettings(**settings), scheduler or SchedulerSettings(), MediaSettings())
    if engine is not None:
        service.open(engine, GenerationDefaults(eos_token_ids=frozenset(), temperature=0.25, top_k=7))
    return service


@dataclass
class Answer:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    is_complete: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def events(self) -> list[Any]:
        lines = [line for line in self.body.decode().split("\n\n") if line and not line.startswith(":")]
        assert all(line.startswith("data: ") for line in lines)
        return [line[6:] if line[6:] == "[DONE]" else orjson.loads(line[6:]) for line in lines]


class Caller:
    """Calls an app. `gone` makes the client leave."""

    def __init__(self, service: Service) -> None:
        self._app = build_app(service)

    async def get(self, path: str, **headers: str) -> Answer:
        return await self.call("GET", path, b"", headers)

    async def post(self, path: str, body: Any, **headers: str) -> Answer:
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        return await self.call("POST", path, data, {"content-type": "application/json", **headers})

    async def call(
        self,
        method: str,
        path: str,
        body: bytes | list[bytes],
        headers: dict[str, str],
        *,
        gone: asyncio.Event | None = None,
        answer: Answer | None = None,
        is_endless: bool = False,
        query: bytes = b"",
    ) -> Answer:
        parts = [body] if isinstance(body, bytes) else list(body)
        answer = Answer() if answer is None else answer
        left = gone or asyncio.Event()

        async def receive() -> dict[str, Any]:
            if parts:
                part = parts.pop(0)
                return {"type": "http.request", "body": part, "more_body": bool(parts) or is_endless}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            await asyncio.sleep(0)
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                answer.parts.append(message.get("body", b""))
                answer.is_complete = not message.get("more_body", False)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query,
            "root_path": "",
            "headers": [(name.replace("_", "-").lower().encode(), value.encode()) for name, value in headers.items()],
            "client": ("test", 1),
            "server": ("test", 80),
        }
        async with asyncio.timeout(HANG_S):
            await self._app(scope, receive, send)
        return answer
