"""POST /tokenize, /detokenize and /v1/chat/completions/render: what a prompt becomes, without running it."""

from typing import Any

from starlette.responses import Response

from saccade.errors import RequestError
from saccade.inputs.allowance import Allowance
from saccade.inputs.placeholders import Prompt
from saccade.server.http.exchange import HttpExchange
from saccade.server.http.json_body import json_reply
from saccade.server.replies.logprobs import token_text
from saccade.server.requests.intake import PromptRoute, RequestJob
from saccade.server.requests.protocol import ChatRequest, DetokenizeRequest, TokenizeRequest
from saccade.server.routes.chat import ChatRoute, chat_prompt
from saccade.server.service import Service
from saccade.server.text.tools import check_tools
from saccade.wire.sampling_params import SamplingParams

MAX_DETOKENIZED = 2**20


class TokenizeRoute(PromptRoute[TokenizeRequest]):
    kind = TokenizeRequest
    is_count = True

    async def reply(self, exchange: HttpExchange, job: RequestJob[TokenizeRequest]) -> Response:
        has_strings = bool(job.request.return_token_strs)
        prompt, caller = job.prompts[0], job.caller
        return json_reply(await self.service.workers.in_thread(caller, self._tokens, prompt, has_strings=has_strings))

    def params(self, request: TokenizeRequest) -> SamplingParams:
        if request.tools is not None:
            check_tools(request.tools)
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("send exactly one of prompt and messages", param="prompt", code="invalid_value")
        return SamplingParams()

    def messages(self, request: TokenizeRequest) -> list[Any]:
        return request.messages or []

    def prompts(self, request: TokenizeRequest, messages: list[Any], allowance: Allowance) -> tuple[Prompt, ...]:
        """A template writes special tokens itself, so `add_special_tokens` is for plain text only."""
        if request.prompt is not None:
            has_bos = request.add_special_tokens is not False
            return (self.service.engine.processor.text(request.prompt, has_bos=has_bos, allowance=allowance),)
        variables = request.chat_template_kwargs
        return (chat_prompt(self.service, request, messages, allowance, variables=variables, tools=request.tools),)

    def _tokens(self, prompt: Prompt, *, has_strings: bool) -> dict[str, Any]:
        tokenizer = self.service.engine.processor.tokenizer
        strings = [token_text(tokenizer, token) for token in prompt.token_ids.tolist()] if has_strings else None
        return _counted(self.service, prompt) | {"token_strs": strings}


class DetokenizeRoute(PromptRoute[DetokenizeRequest]):
    kind = DetokenizeRequest

    async def reply(self, exchange: HttpExchange, job: RequestJob[DetokenizeRequest]) -> Response:
        tokenizer = self.service.engine.processor.tokenizer
        tokens, caller = job.request.tokens, job.caller
        text = await self.service.workers.in_thread(caller, tokenizer.decode, tokens, skip_special_tokens=False)
        return json_reply({"prompt": text})

    def params(self, request: DetokenizeRequest) -> SamplingParams:
        """Refuses ids without a text: skipping them would give the text of other ids."""
        num_tokens, tokenizer = len(request.tokens), self.service.engine.processor.tokenizer
        if num_tokens > MAX_DETOKENIZED:
            text = f"there are {num_tokens} tokens; the limit is {MAX_DETOKENIZED}"
            raise RequestError(text, param="tokens", code="invalid_value")
        unknown = {token for token in set(request.tokens) if tokenizer.token_text(token) is None}
        for i, token in enumerate(request.tokens if unknown else ()):
            if token in unknown:
                text = f"tokens[{i}] is {token}, which is not in the vocabulary"
                raise RequestError(text, param=f"tokens[{i}]", code="invalid_value")
        return SamplingParams()

    def prompts(self, request: DetokenizeRequest, messages: list[Any], allowance: Allowance) -> tuple[Prompt, ...]:
        return ()


class RenderRoute(ChatRoute):
    """A chat request as the model would see it: checked but not run."""

    is_count = True

    async def reply(self, exchange: HttpExchange, job: RequestJob[ChatRequest]) -> Response:
        rendered = await self.service.workers.in_thread(job.caller, self._rendered, job.prompts[0])
        return json_reply({"model": job.model, **rendered})

    def _rendered(self, prompt: Prompt) -> dict[str, Any]:
        tokenizer = self.service.engine.processor.tokenizer
        media = [
            {"kind": item.kind, "size_hw": item.plan.size_hw, "grid_thw": item.plan.grid_thw} for item in prompt.media
        ]
        text = tokenizer.decode(prompt.token_ids.tolist(), skip_special_tokens=False)
        return {"prompt": text, "media": media, **_counted(self.service, prompt)}


def _counted(service: Service, prompt: Prompt) -> dict[str, Any]:
    return {
        "count": len(prompt),
        "max_model_len": service.max_model_len,
        "tokens": prompt.token_ids.tolist(),
        "image_tokens": sum(span.length for span in prompt.spans),
    }
