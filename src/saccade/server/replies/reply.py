"""A reply to one job, whole or streamed; subclasses define the format of each route."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from time import time
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
import orjson
from starlette.responses import Response

from saccade.client.output import Logprobs
from saccade.client.stream import Delta
from saccade.inputs.text.tokenizer import Tokenizer
from saccade.server.http.events import CHUNKS, StreamFormat, event_stream
from saccade.server.http.exchange import HttpExchange
from saccade.server.replies.answer import Answer
from saccade.server.replies.logprobs import prompt_entries
from saccade.server.requests.intake import RequestJob
from saccade.server.requests.protocol import StreamOptions
from saccade.server.service import Service

NULL = b"null"


class Reply(ABC):
    """`take` adds a piece and returns what a stream sends for it; `body` is the complete reply."""

    def __init__(self, service: Service, exchange: HttpExchange, job: RequestJob[Any]) -> None:
        self.service, self.exchange, self.job = service, exchange, job
        self.tokenizer: Tokenizer = service.engine.processor.tokenizer
        self.answer = Answer(service, exchange, job)

    @abstractmethod
    def take(self, index: int, delta: Delta) -> bytes: ...

    @abstractmethod
    def body(self) -> Any: ...

    def ending(self) -> bytes:
        """What a stream sends after the last piece."""
        return b""

    def stream_format(self) -> StreamFormat:
        return CHUNKS

    def timings(self) -> dict[str, Any]:
        return {"timings": self.answer.timings()} if self.job.wants_timings else {}

    async def response(self) -> Response:
        if getattr(self.job.request, "stream", False):
            ping_s = self.service.settings.sse_ping_s
            return await event_stream(self.exchange, self._chunks(), ping_s=ping_s, format=self.stream_format())
        async for _ in self._chunks():
            pass
        params = self.job.params
        numbers = (params.logprobs, params.prompt_logprobs, params.pooling)
        is_long = any(one is not None for one in numbers)  # takes a thread to write
        in_thread, caller = self.service.workers.in_thread, self.job.caller
        body = await in_thread(caller, self._json) if is_long else self._json()
        return Response(body, media_type="application/json")

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self.answer.pieces()) as pieces:
            async for index, delta in pieces:
                if chunk := self.take(index, delta):
                    yield chunk
        if chunk := self.ending():
            yield chunk

    def _json(self) -> bytes:
        return orjson.dumps(self.body(), option=orjson.OPT_SERIALIZE_NUMPY)


@dataclass(slots=True)
class ReplyChoice:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    scores: list[Logprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


C = TypeVar("C", bound=ReplyChoice)


class OpenAIReply(Reply, Generic[C]):
    """`grow` and `fields` make a whole reply, `opening` and `values` the chunks of a stream. A value is the part of a
    chunk that is specific to this kind of reply, such as b'"delta":{}'."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    closing: ClassVar[bytes]  # the value of a choice's last chunk

    def __init__(self, service: Service, exchange: HttpExchange, job: RequestJob[Any]) -> None:
        super().__init__(service, exchange, job)
        self.prompt_scores: dict[int, Sequence[Logprobs | None]] = {}
        self.choices: list[C] = [self.new_choice() for _ in range(self.answer.num_choices)]
        self._options: StreamOptions = job.request.stream_options or StreamOptions()
        self._head = {
            "id": f"{self.id_prefix}-{job.public_id}",
            "object": self.chunk_object if job.request.stream else self.whole_object,
            "created": int(time()),
            "model": job.model,
            "system_fingerprint": service.fingerprint,
        }
        self._writer = ChunkWriter(self._head, has_usage=bool(self._options.include_usage))
        self._seen: set[int] = set()

    @abstractmethod
    def new_choice(self) -> C: ...

    @abstractmethod
    def grow(self, choice: C, delta: Delta) -> None: ...

    @abstractmethod
    def fields(self, index: int, choice: C) -> dict[str, Any]: ...

    @abstractmethod
    def opening(self, index: int, *, is_first: bool) -> tuple[bytes, bytes]:
        """The value of a choice's first chunk, or b"" for none, and more fields of that chunk."""

    @abstractmethod
    def values(self, index: int, delta: Delta) -> list[bytes]: ...

    @abstractmethod
    def chunk_scores(self, index: int, delta: Delta) -> Any: ...

    def finish_reason(self, choice: C, delta: Delta) -> str | None:
        return delta.finish_reason

    def take(self, index: int, delta: Delta) -> bytes:
        if self.job.request.stream:
            return b"".join(self._write(index, delta))
        choice = self.choices[index]
        self.grow(choice, delta)
        choice.token_ids += delta.token_ids
        choice.scores += delta.logprobs or ()
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = self.finish_reason(choice, delta), delta.stop_reason
        if delta.prompt_logprobs is not None:
            self.prompt_scores[index // self.job.params.n] = delta.prompt_logprobs
        return b""

    def body(self) -> Any:
        reply = {**self._head, "choices": [*map(self._choice, range(len(self.choices)))], "usage": self.answer.usage()}
        if self.job.request.prompt_logprobs is not None:
            reply["prompt_logprobs"] = self.prompt_entries(0)
        if self.job.request.return_token_ids:
            reply["prompt_token_ids"] = self.answer.prompt_ids[0].tolist()
        return reply | self.timings()

    def prompt_entries(self, prompt_idx: int) -> list[dict[str, Any] | None]:
        ids, scores = self.answer.prompt_ids[prompt_idx].tolist(), self.prompt_scores.get(prompt_idx, ())
        return prompt_entries(self.tokenizer, ids, scores, self.job.request.prompt_logprobs)

    def ending(self) -> bytes:
        fields = {"usage": self.answer.usage()} if self._options.include_usage else {}
        fields |= self.timings()
        return self._writer.last(fields) if fields else b""

    def _choice(self, index: int) -> dict[str, Any]:
        choice = self.choices[index]
        found = {"index": index, **self.fields(index, choice)}
        found |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return found | ({"token_ids": choice.token_ids} if self.job.request.return_token_ids else {})

    def _write(self, index: int, delta: Delta) -> list[bytes]:
        """One chunk per value; scores and token ids go with the first."""
        chunks = []
        usage = self._running_usage()
        if index not in self._seen:
            value, more = self.opening(index, is_first=not self._seen)
            chunks += [self._writer.choice(index, value, usage=usage, more=more)] if value else []
            self._seen.add(index)
        more = b',"token_ids":' + orjson.dumps(delta.token_ids) if self.job.request.return_token_ids else b""
        values = self.values(index, delta)
        logprobs = NULL if delta.logprobs is None else orjson.dumps(self.chunk_scores(index, delta))
        for value in values:
            chunks.append(self._writer.choice(index, value, logprobs=logprobs, usage=usage, more=more))
            logprobs, more = NULL, b""
        if delta.finish_reason is not None:
            finish = orjson.dumps(self.finish_reason(self.choices[index], delta))
            more = b',"stop_reason":' + orjson.dumps(delta.stop_reason)
            chunks.append(self._writer.choice(index, self.closing, finish=finish, usage=usage, more=more))
        return chunks

    def _running_usage(self) -> bytes:
        """The `usage` field of a chunk before the last; empty for the stream's default."""
        is_wanted = self._options.include_usage and self._options.continuous_usage_stats
        return orjson.dumps(self.answer.usage()) if is_wanted else b""

    def timings(self) -> dict[str, Any]:
        found = super().timings()
        return found and {**found, "passes": msgspec.to_builtins(self.answer.passes)}


class ChunkWriter:
    """Writes the JSON of a stream's chunks. All share id, time and model, which are encoded once. There is a `usage`
    field only if the client asked for it."""

    def __init__(self, head: dict[str, Any], *, has_usage: bool) -> None:
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._tail = b',"usage":null}\n\n' if has_usage else b"}\n\n"

    def choice(
        self,
        index: int,
        value: bytes,
        *,
        logprobs: bytes = NULL,
        finish: bytes = NULL,
        usage: bytes = b"",
        more: bytes = b"",
    ) -> bytes:
        tail = b',"usage":' + usage + b"}\n\n" if usage else self._tail
        reason = b',"finish_reason":' + finish + more + b"}]"
        return b"".join((self._head, b'{"index":%d,' % index, value, b',"logprobs":', logprobs, reason, tail))

    def last(self, fields: dict[str, Any]) -> bytes:
        """The chunk without choices that ends a stream with usage."""
        return self._head + b"]," + orjson.dumps(fields)[1:-1] + b"}\n\n"
