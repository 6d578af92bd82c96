"""POST /tokenize, /detokenize and /v1/chat/completions/render: what a prompt becomes, before anything is paid for."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from saccade.errors import RequestError
from saccade.inputs.allowance import Allowance
from saccade.inputs.placeholders import Prompt
from saccade.server.chat import ChatRecipe, sized
from saccade.server.exchange import HttpExchange
from saccade.server.intake import Recipe, needs_loading, take_in
from saccade.server.logprobs import token_text
from saccade.server.ops import json_reply
from saccade.server.protocol import DetokenizeRequest, TokenizeRequest
from saccade.server.service import Service
from saccade.server.tools import check_tools
from saccade.wire.sampling_params import SamplingParams

MAX_DETOKENIZED = 2**20


class TokenizeRecipe(Recipe[TokenizeRequest]):
    request = TokenizeRequest
    is_count = True

    def params(self, request: TokenizeRequest) -> SamplingParams:
        if request.tools is not None:
            check_tools(request.tools)
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("send exactly one of prompt and messages", param="prompt", code="invalid_value")
        return SamplingParams()

    def messages(self, request: TokenizeRequest) -> list[Any] | None:
        return request.messages if request.messages is not None and needs_loading(request.messages) else None

    def prompts(self, request: TokenizeRequest, messages: list[Any] | None, allowance: Allowance) -> tuple[Prompt, ...]:
        """A template writes special tokens itself: `add_special_tokens` is for text alone."""
        processor = self.service.engine.processor
        if request.prompt is not None:
            has_bos = request.add_special_tokens is not False
            return (processor.text(request.prompt, has_bos=has_bos, allowance=allowance),)
        return (
            processor.chat(
                request.messages if messages is None else messages,
                tools=request.tools,
                add_generation_prompt=request.add_generation_prompt is not False,
                continue_final_message=bool(request.continue_final_message),
                variables=request.chat_template_kwargs,
                images=sized(self.service, request.mm_processor_kwargs),
                allowance=allowance,
            ),
        )


class DetokenizeRecipe(Recipe[DetokenizeRequest]):
    request = DetokenizeRequest

    def params(self, request: DetokenizeRequest) -> SamplingParams:
        """Ids without a text are refused: left out, they would make the text that of other ids."""
        num_tokens, tokenizer = len(request.tokens), self.service.engine.processor.tokenizer
        if num_tokens > MAX_DETOKENIZED:
            text = f"there are {num_tokens} tokens; the limit is {MAX_DETOKENIZED}"
            raise RequestError(text, param="tokens", code="invalid_value")
        unknown = {token for token in set(request.tokens) if tokenizer.token_text(token) is None}
        for i, token in enumerate(request.tokens if unknown else ()):
            if token in unknown:
                text = f"tokens[{i}] is {token}, which is no token of the vocabulary"
                raise RequestError(text, param=f"tokens[{i}]", code="invalid_value")
        return SamplingParams()

    def messages(self, request: DetokenizeRequest) -> None:
        return None

    def prompts(
        self, request: DetokenizeRequest, messages: list[Any] | None, allowance: Allowance
    ) -> tuple[Prompt, ...]:
        return ()


class RenderRecipe(ChatRecipe):
    is_count = True


class TokenRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._tokenize = TokenizeRecipe(service)
        self._detokenize = DetokenizeRecipe(service)
        self._render = RenderRecipe(service)

    async def tokenize(self, request: Request) -> Response:
        job = await take_in(self._service, HttpExchange.of(request), self._tokenize)
        return json_reply(await self._service.in_thread(self._tokens, job.prompts[0], job.request.return_token_strs))

    async def detokenize(self, request: Request) -> Response:
        job = await take_in(self._service, HttpExchange.of(request), self._detokenize)
        tokenizer = self._service.engine.processor.tokenizer
        text = await self._service.in_thread(tokenizer.decode, job.request.tokens, skip_special_tokens=False)
        return json_reply({"prompt": text})

    async def render(self, request: Request) -> Response:
        """A chat request as the model would see it; it is checked like one and not run."""
        job = await take_in(self._service, HttpExchange.of(request), self._render)
        found = await self._service.in_thread(self._rendered, job.prompts[0])
        return json_reply({"model": job.model, **found})

    def _tokens(self, prompt: Prompt, has_strings: bool | None) -> dict[str, Any]:
        tokenizer = self._service.engine.processor.tokenizer
        ids = prompt.token_ids.tolist()
        return {
            "count": len(ids),
            "max_model_len": self._service.max_model_len,
            "tokens": ids,
            "token_strs": [token_text(tokenizer, token) for token in ids] if has_strings else None,
            "image_tokens": sum(span.length for span in prompt.spans),
        }

    def _rendered(self, prompt: Prompt) -> dict[str, Any]:
        tokenizer = self._service.engine.processor.tokenizer
        media = [
            {"kind": item.kind, "size_hw": item.plan.size_hw, "grid_thw": item.plan.grid_thw} for item in prompt.media
        ]
        found = self._tokens(prompt, False)
        del found["token_strs"]
        text = tokenizer.decode(prompt.token_ids.tolist(), skip_special_tokens=False)
        return {"prompt": text, "media": media, **found}
