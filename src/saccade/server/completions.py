"""POST /v1/completions: raw text or token ids, one prompt or many."""

from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from saccade.client.output import Logprobs
from saccade.client.stream import Delta
from saccade.errors import RequestError
from saccade.inputs.allowance import Allowance
from saccade.inputs.placeholders import Prompt
from saccade.server.chunks import NULL, ChunkWriter
from saccade.server.exchange import HttpExchange
from saccade.server.intake import Recipe, RequestJob, take_in
from saccade.server.logprobs import CompletionScores, prompt_entries
from saccade.server.protocol import CompletionRequest
from saccade.server.reply import Reply
from saccade.server.request_params import completion_params
from saccade.server.service import Service
from saccade.wire.sampling_params import SamplingParams

PromptText = str | list[int]


class CompletionRecipe(Recipe[CompletionRequest]):
    request = CompletionRequest

    def params(self, request: CompletionRequest) -> SamplingParams:
        if request.stream and request.echo and request.logprobs is not None:
            raise RequestError("echo with logprobs cannot be streamed", param="stream", code="invalid_value")
        return completion_params(request, self.service.limits)

    def messages(self, request: CompletionRequest) -> None:
        return None

    def prompts(
        self, request: CompletionRequest, messages: list[Any] | None, allowance: Allowance
    ) -> tuple[Prompt, ...]:
        given = listed_prompts(request.prompt)
        limit, n = self.service.max_sequences, request.n or 1
        if not 1 <= len(given) <= limit:
            text = f"prompt is a list of {len(given)}; allowed are 1..{limit} prompts (--max-prompts)"
            raise RequestError(text, param="prompt", code="invalid_value")
        if len(given) * n > limit:
            text = f"{len(given)} prompts with n {n} ask for {len(given) * n} outputs; the limit is {limit}"
            raise RequestError(f"{text} (--max-prompts)", param="n", code="invalid_value")
        return tuple(self._prompt(text, allowance) for text in given)

    def _prompt(self, given: PromptText, allowance: Allowance) -> Prompt:
        if not given:
            text = "the prompt is empty; at least one token is needed"
            raise RequestError(text, param="prompt", code="invalid_value")
        allowance.go_on()
        processor = self.service.engine.processor
        if isinstance(given, str):
            return processor.text(given, allowance=allowance)
        return processor.tokens(given, allowance=allowance)


class CompletionRoute:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._recipe = CompletionRecipe(service)

    async def create(self, request: Request) -> Response:
        exchange = HttpExchange.of(request)
        job = await take_in(self._service, exchange, self._recipe)
        return await CompletionReply(self._service, exchange, job).response()


@dataclass(slots=True)
class Choice:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    scores: list[Logprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class CompletionReply(Reply):
    """With `echo`, the prompt stands before the text."""

    id_prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"
    job: RequestJob[CompletionRequest]

    def __init__(self, service: Service, exchange: HttpExchange, job: RequestJob[CompletionRequest]) -> None:
        super().__init__(service, exchange, job)
        self._choices = [Choice() for _ in range(self.answer.num_choices)]
        self._num_top = job.params.logprobs or 0
        self._is_continued = [prompt.is_continued for prompt in job.prompts]
        self._streamed: dict[int, CompletionScores] = {}

    def take(self, index: int, delta: Delta) -> None:
        choice = self._choices[index]
        choice.text.append(delta.text)
        choice.token_ids += delta.token_ids
        choice.scores += delta.logprobs or ()
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason

    def choices(self) -> list[dict[str, Any]]:
        return [self._choice(index, choice) for index, choice in enumerate(self._choices)]

    def opening(self, writer: ChunkWriter, index: int, *, is_first: bool) -> list[bytes]:
        if not self.job.request.echo:
            return []
        value = b'"text":' + orjson.dumps(self._echo(index))
        return [writer.choice(index, value, usage=self.running_usage())]

    def contents(self, writer: ChunkWriter, index: int, delta: Delta) -> list[bytes]:
        logprobs, more = NULL, b""
        if delta.logprobs is not None:
            if index not in self._streamed:
                self._streamed[index] = self._new_scores(index)
            scores = self._streamed[index]
            scores.clear()
            scores.add(delta.token_ids, delta.logprobs)
            logprobs = orjson.dumps(scores.to_json())
        if self.job.request.return_token_ids:
            more = b',"token_ids":' + orjson.dumps(delta.token_ids)
        if not delta.text and logprobs is NULL and not more:
            return []
        value = b'"text":' + orjson.dumps(delta.text)
        return [writer.choice(index, value, logprobs=logprobs, usage=self.running_usage(), more=more)]

    def closing(self, writer: ChunkWriter, index: int, delta: Delta) -> bytes:
        more = b',"stop_reason":' + orjson.dumps(delta.stop_reason)
        finish = orjson.dumps(delta.finish_reason)
        return writer.choice(index, b'"text":""', finish=finish, usage=self.running_usage(), more=more)

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        prompt_ids = self.answer.prompt_ids[self._prompt_idx(index)].tolist()
        echo = self._echo(index) if self.job.request.echo else ""
        found: dict[str, Any] = {
            "index": index,
            "text": echo + "".join(choice.text),
            "logprobs": self._logprobs(index, choice, prompt_ids) if self.job.request.logprobs is not None else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.job.request.prompt_logprobs is not None:
            scores = self.prompt_scores.get(self._prompt_idx(index), ())
            found["prompt_logprobs"] = prompt_entries(self.tokenizer, scores)
        if self.job.request.return_token_ids:
            found |= {"token_ids": choice.token_ids, "prompt_token_ids": prompt_ids}
        return found

    def _logprobs(self, index: int, choice: Choice, prompt_ids: list[int]) -> dict[str, Any]:
        scores = self._new_scores(index)
        if self.job.request.echo:
            scores.add_prompt(prompt_ids, self.prompt_scores.get(self._prompt_idx(index), ()), self._echo(index))
        scores.add(choice.token_ids, choice.scores)
        return scores.to_json()

    def _new_scores(self, index: int) -> CompletionScores:
        return CompletionScores(
            self.tokenizer,
            self._num_top,
            skip_special_tokens=self.job.params.skip_special_tokens,
            is_continued=self._is_continued[self._prompt_idx(index)],
        )

    def _echo(self, index: int) -> str:
        given = listed_prompts(self.job.request.prompt)[self._prompt_idx(index)]
        return given if isinstance(given, str) else self.tokenizer.decode(given, skip_special_tokens=False)

    def _prompt_idx(self, index: int) -> int:
        return index // self.job.params.n


def listed_prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[PromptText]:
    """One prompt or many, each text or ids."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)  # type: ignore[arg-type]
