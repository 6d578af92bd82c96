"""A reply to one job, whole or in chunks. What a route's replies look like is for its own class to say."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from time import time
from typing import Any, ClassVar

import orjson
from starlette.responses import Response

from saccade.client.output import Logprobs
from saccade.client.stream import Delta
from saccade.inputs.tokenizer import Tokenizer
from saccade.server.answer import Answer
from saccade.server.chunks import ChunkWriter
from saccade.server.events import event_stream
from saccade.server.exchange import HttpExchange
from saccade.server.intake import RequestJob
from saccade.server.logprobs import prompt_entries
from saccade.server.protocol import StreamOptions
from saccade.server.service import Service


class Reply(ABC):
    """OpenAI's replies. `take` grows a choice for a whole reply; `opening`, `contents` and `closing` write chunks."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, service: Service, exchange: HttpExchange, job: RequestJob[Any]) -> None:
        self._service, self._exchange, self.job = service, exchange, job
        self.tokenizer: Tokenizer = service.engine.processor.tokenizer
        self.answer = Answer(service, exchange, job)
        self.prompt_scores: dict[int, Sequence[Logprobs | None]] = {}
        self._options: StreamOptions = job.request.stream_options or StreamOptions()
        self._head = {
            "id": f"{self.id_prefix}-{job.public_id}",
            "object": self.whole_object,
            "created": int(time()),
            "model": job.model,
            "system_fingerprint": service.fingerprint,
        }

    @abstractmethod
    def take(self, index: int, delta: Delta) -> None: ...

    @abstractmethod
    def choices(self) -> list[dict[str, Any]]: ...

    @abstractmethod
    def opening(self, writer: ChunkWriter, index: int, *, is_first: bool) -> list[bytes]: ...

    @abstractmethod
    def contents(self, writer: ChunkWriter, index: int, delta: Delta) -> list[bytes]: ...

    @abstractmethod
    def closing(self, writer: ChunkWriter, index: int, delta: Delta) -> bytes: ...

    async def response(self) -> Response:
        if self.job.request.stream:
            settings = self._service.settings
            return await event_stream(self._exchange, self.chunks(), ping_s=settings.sse_ping_s)
        return Response(await self.whole(), media_type="application/json")

    async def whole(self) -> bytes:
        async with aclosing(self.answer.pieces()) as pieces:
            async for index, delta in pieces:
                self.take(index, delta)
                if delta.prompt_logprobs is not None:
                    self.prompt_scores[index // self.job.params.n] = delta.prompt_logprobs
        if self.prompt_scores or self.job.params.logprobs is not None:  # many numbers to write
            return await self._service.in_thread(self._body)
        return self._body()

    def _body(self) -> bytes:
        reply = {**self._head, "choices": self.choices(), "usage": self.usage()}
        if self.job.request.prompt_logprobs is not None:
            reply["prompt_logprobs"] = prompt_entries(self.tokenizer, self.prompt_scores.get(0, ()))
        if self.job.request.return_token_ids:
            reply["prompt_token_ids"] = self.answer.prompt_ids[0].tolist()
        return orjson.dumps(reply | self._timings())

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        writer = ChunkWriter({**self._head, "object": self.chunk_object}, has_usage=bool(self._options.include_usage))
        seen: set[int] = set()
        async with aclosing(self.answer.pieces()) as pieces:
            async for index, delta in pieces:
                parts = [] if index in seen else self.opening(writer, index, is_first=not seen)
                seen.add(index)
                parts += self.contents(writer, index, delta)
                if delta.finish_reason is not None:
                    parts.append(self.closing(writer, index, delta))
                if parts:
                    yield b"".join(parts)
        fields = {"usage": self.usage()} if self._options.include_usage else {}
        if fields | self._timings():
            yield writer.last(fields | self._timings())

    def usage(self) -> dict[str, Any]:
        return self.answer.usage()

    def running_usage(self) -> bytes:
        """What stands in `usage` of a chunk that is not the last; empty: what the stream has there by default."""
        is_wanted = self._options.include_usage and self._options.continuous_usage_stats
        return orjson.dumps(self.usage()) if is_wanted else b""

    def _timings(self) -> dict[str, Any]:
        return {"timings": self.answer.timings()} if self.job.wants_timings else {}
