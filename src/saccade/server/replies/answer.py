"""A job in the engine: its outputs as they grow, its usage and timings."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from time import monotonic
from typing import Any

from saccade.client.stream import Delta
from saccade.errors import CapacityError, EngineDeadError, RequestError
from saccade.inputs.placeholders import Prompt
from saccade.server.figures.metrics import EndedRequest
from saccade.server.figures.running_requests import PreparedRequest
from saccade.server.http.exchange import HttpExchange
from saccade.server.http_errors import HttpError, draining, too_late
from saccade.server.requests.intake import RequestJob
from saccade.server.requests.protocol import ChatRequest
from saccade.server.service import ServerPhase, Service
from saccade.wire.passes import PassCount
from saccade.wire.update import BROKEN, NO_HIDDEN_NUMBERS, NO_NUMBERS, NO_TOKEN

Piece = tuple[int, Delta]  # index of a choice and what it gained


class Answer:
    """The choices of a job: output i of prompt p is choice p * n + i. Iterate over `pieces` once; stopping early aborts
    the rest. A failed output raises. The other fields are updated as pieces are read."""

    def __init__(self, service: Service, exchange: HttpExchange, job: RequestJob[Any]) -> None:
        self._service, self._exchange, self._job = service, exchange, job
        self._n = job.params.n
        self.num_choices = self._n * len(job.prompts)
        self.num_prompt_tokens = sum(map(len, job.prompts))
        self.num_image_tokens = sum(span.length for prompt in job.prompts for span in prompt.spans)
        self.prompt_ids = [prompt.token_ids for prompt in job.prompts]
        self._cached: dict[int, int] = {}
        self._outputs = [0] * self.num_choices
        self._reasons: dict[int, str] = {}
        self._last = [exchange.arrival] * self.num_choices
        self._first_s: float | None = None
        self._is_refused = False
        self._is_computed = False  # the prompt
        self._engine_times: dict[str, float] = {}
        self.passes: list[PassCount] = []  # of all outputs that have ended

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        prompts, self._job.prompts = self._job.prompts, ()  # so that pixels are freed while the engine works
        sources = [self._one(i, prompt) for i, prompt in enumerate(prompts)]
        del prompts
        try:
            async with aclosing(sources[0] if len(sources) == 1 else _merged(sources)) as source:
                async for piece in source:
                    self._note(*piece)
                    yield piece
        except (RequestError, CapacityError) as error:  # the engine refused the request
            self._is_refused = True
            if isinstance(error, CapacityError):
                self._service.admission.num_refused += 1
                error.retry_after_s = self._service.admission.drained_s()
            else:
                names = {"prompt": self._job.prompt_param, "response_format": self._job.structure_param}
                error.param = names.get(error.param or "", error.param)
            raise
        except EngineDeadError as error:
            raise self._service.lost(error) from None
        finally:
            if not self._is_refused:
                self._end()

    def usage(self) -> dict[str, Any]:
        completion = sum(self._outputs)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.num_prompt_tokens + completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(self._cached.values()),
                "image_tokens": self.num_image_tokens,
                "multimodal_tokens": self.num_image_tokens,
            },
        }

    def timings(self) -> dict[str, float]:
        """Milliseconds of each stage."""
        seconds = {**self._job.seconds, **self._engine_times, "total": monotonic() - self._exchange.arrival}
        if self._first_s is not None:
            seconds["first_token"] = self._first_s
        return {f"{name}_ms": round(value * 1000, 3) for name, value in seconds.items()}

    async def _one(self, prompt_idx: int, prompt: Prompt) -> AsyncGenerator[Piece, None]:
        job = self._job
        prepared = PreparedRequest(job.public_id, self._exchange.arrival, job.seconds, has_media=bool(prompt.media))
        with self._service.requests.inside(prepared) as engine_id:
            source = self._service.engine.generate(engine_id, prompt, job.params, job.terms)
            del prompt
            async with aclosing(source):
                async for delta in source:
                    yield prompt_idx * self._n + delta.index, delta

    def _note(self, choice: int, delta: Delta) -> None:
        now = monotonic()
        metrics = self._service.metrics
        if not self._is_computed and (delta.token_ids or delta.finish_reason == "length"):
            self._is_computed = True
            metrics.note_tokens(prompt=self.num_prompt_tokens)
            self._charge(self.num_prompt_tokens)
        if delta.token_ids or delta.pooled is not None:
            self._service.note_output()
        if delta.token_ids:
            num_new = delta.num_output_tokens - self._outputs[choice]
            metrics.note_tokens(output=num_new)
            self._charge(num_new)
            if self._outputs[choice]:
                metrics.note_gap((now - self._last[choice]) / len(delta.token_ids))
            elif self._first_s is None:
                self._first_s = now - self._exchange.arrival
                metrics.note_first(self._first_s)
            self._last[choice] = now
            self._outputs[choice] = delta.num_output_tokens
        if choice % self._n == 0:  # the other outputs of a prompt always find it cached
            self._cached[choice // self._n] = delta.num_cached_tokens
        if delta.finish_reason is not None:
            self._reasons[choice] = delta.finish_reason
            for name, seconds in (delta.timings or {}).items():
                self._engine_times[name] = max(seconds, self._engine_times.get(name, 0.0))
            self.passes += delta.passes or ()
            self._check(delta)

    def _charge(self, num_tokens: int) -> None:
        assert self._exchange.caller is not None, "its key was checked"
        self._exchange.caller.take(num_tokens)

    def _check(self, delta: Delta) -> None:
        if delta.finish_reason == "deadline":
            raise too_late()
        if delta.finish_reason == "error" and delta.stop_reason in (NO_TOKEN, BROKEN):
            raise HttpError(400, str(delta.stop_reason), code="grammar_failed", param=self._job.structure_param)
        if delta.finish_reason == "error":
            is_sure = delta.stop_reason in (NO_NUMBERS, NO_HIDDEN_NUMBERS)
            text = "the engine failed to compute the answer" + (
                "; the model produced NaN or infinity" if is_sure else ""
            )
            raise HttpError(500, text, code="engine_error", should_retry=not is_sure)
        if delta.finish_reason == "abort" and self._service.phase is not ServerPhase.READY:
            raise draining()

    def _end(self) -> None:
        service, ended = self._service, self._ended()
        service.admission.pace.note_end()
        service.metrics.note_end(ended)
        if service.telemetry is not None:
            service.telemetry.note_end(ended)

    def _ended(self) -> EndedRequest:
        job = self._job
        reasons = [self._reasons.get(choice, "abort") for choice in range(self.num_choices)]
        return EndedRequest(
            operation="chat" if isinstance(job.request, ChatRequest) else "text_completion",
            model=job.model,
            request_id=job.public_id,
            params=job.params,
            headers=self._exchange.headers,
            finish_reasons=["error" if reason == "deadline" else reason for reason in reasons],
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=sum(self._cached.values()),
            num_output_tokens=self._outputs,
            total_s=monotonic() - self._exchange.arrival,
            first_s=self._first_s,
            timings=self._engine_times,
        )


async def _merged(sources: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
    """The pieces of all sources as they arrive. The first error ends all of them."""
    queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue(2 * len(sources))

    async def pump(source: AsyncGenerator[Piece, None]) -> None:
        try:
            async with aclosing(source):
                async for piece in source:
                    await queue.put(piece)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    pumps = [asyncio.create_task(pump(source)) for source in sources]
    try:
        left = len(pumps)
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
