"""POST /v1/completions: raw text or token ids, one prompt or many."""

from typing import Any

import orjson
from starlette.responses import Response

from saccade.client.stream import Delta
from saccade.errors import RequestError
from saccade.inputs.allowance import Allowance
from saccade.inputs.placeholders import Prompt
from saccade.server.http.exchange import HttpExchange
from saccade.server.replies.logprobs import CompletionScores
from saccade.server.replies.reply import OpenAIReply, ReplyChoice
from saccade.server.requests.intake import PromptRoute, RequestJob
from saccade.server.requests.protocol import CompletionRequest
from saccade.server.requests.request_params import completion_params
from saccade.server.requests.structure import structure_param
from saccade.server.service import Service
from saccade.wire.sampling_params import SamplingParams

PromptText = str | list[int]


class CompletionRoute(PromptRoute[CompletionRequest]):
    kind = CompletionRequest

    async def reply(self, exchange: HttpExchange, job: RequestJob[CompletionRequest]) -> Response:
        return await CompletionReply(self.service, exchange, job).response()

    def params(self, request: CompletionRequest) -> SamplingParams:
        if request.stream and request.echo and request.logprobs is not None:
            raise RequestError("echo with logprobs cannot be streamed", param="stream", code="invalid_value")
        return completion_params(request, self.service.settings, self.service.defaults)

    def is_simple(self, request: CompletionRequest) -> bool:
        return isinstance(request.prompt, str) and structure_param(request) is None

    def prompts(self, request: CompletionRequest, messages: list[Any], allowance: Allowance) -> tuple[Prompt, ...]:
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
        allowance.check_cancelled()
        processor = self.service.engine.processor
        if isinstance(given, str):
            return processor.text(given, allowance=allowance)
        return processor.tokens(given, allowance=allowance)


class CompletionReply(OpenAIReply[ReplyChoice]):
    """With `echo`, the prompt precedes the text."""

    id_prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"
    closing = b'"text":""'
    job: RequestJob[CompletionRequest]

    def __init__(self, service: Service, exchange: HttpExchange, job: RequestJob[CompletionRequest]) -> None:
        super().__init__(service, exchange, job)
        self._is_continued = [prompt.is_continued for prompt in job.prompts]
        self._streamed: dict[int, CompletionScores] = {}

    def new_choice(self) -> ReplyChoice:
        return ReplyChoice()

    def grow(self, choice: ReplyChoice, delta: Delta) -> None:
        choice.text.append(delta.text)

    def fields(self, index: int, choice: ReplyChoice) -> dict[str, Any]:
        request, at = self.job.request, self._prompt_idx(index)
        prompt_ids = self.answer.prompt_ids[at].tolist()
        found: dict[str, Any] = {
            "text": (self._echo(index) if request.echo else "") + "".join(choice.text),
            "logprobs": self._logprobs(index, choice, prompt_ids) if request.logprobs is not None else None,
        }
        if request.prompt_logprobs is not None:
            found["prompt_logprobs"] = self.prompt_entries(at)
        return found | ({"prompt_token_ids": prompt_ids} if request.return_token_ids else {})

    def opening(self, index: int, *, is_first: bool) -> tuple[bytes, bytes]:
        return (b'"text":' + orjson.dumps(self._echo(index)) if self.job.request.echo else b""), b""

    def values(self, index: int, delta: Delta) -> list[bytes]:
        has_more = delta.logprobs is not None or self.job.request.return_token_ids
        return [b'"text":' + orjson.dumps(delta.text)] if delta.text or has_more else []

    def chunk_scores(self, index: int, delta: Delta) -> dict[str, Any]:
        if index not in self._streamed:
            self._streamed[index] = self._new_scores(index)
        scores = self._streamed[index]
        scores.clear()
        scores.add(delta.token_ids, delta.logprobs or ())
        return scores.to_json()

    def _logprobs(self, index: int, choice: ReplyChoice, prompt_ids: list[int]) -> dict[str, Any]:
        scores = self._new_scores(index)
        if self.job.request.echo:
            scores.add_prompt(prompt_ids, self.prompt_scores.get(self._prompt_idx(index), ()), self._echo(index))
        scores.add(choice.token_ids, choice.scores)
        return scores.to_json()

    def _new_scores(self, index: int) -> CompletionScores:
        return CompletionScores(
            self.tokenizer,
            self.job.params.logprobs or 0,
            skip_special_tokens=self.job.params.skip_special_tokens,
            is_continued=self._is_continued[self._prompt_idx(index)],
        )

    def _echo(self, index: int) -> str:
        given = listed_prompts(self.job.request.prompt)[self._prompt_idx(index)]
        return given if isinstance(given, str) else self.tokenizer.decode(given, skip_special_tokens=False)

    def _prompt_idx(self, index: int) -> int:
        return index // self.job.params.n


def listed_prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[PromptText]:
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)  # type: ignore[arg-type]
