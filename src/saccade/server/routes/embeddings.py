"""POST /v1/embeddings: OpenAI's form, and vLLM's with messages for images and videos."""

from base64 import b64encode
from time import time
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.responses import Response

from saccade.errors import RequestError
from saccade.inputs.allowance import Allowance
from saccade.inputs.placeholders import Prompt
from saccade.server.http.exchange import HttpExchange
from saccade.server.replies.pooling_reply import VectorReply
from saccade.server.requests.intake import PromptRoute, RequestJob
from saccade.server.requests.pooling_protocol import EmbeddingRequest
from saccade.server.routes.chat import chat_prompt
from saccade.server.routes.completions import PromptText, listed_prompts
from saccade.wire.sampling_params import SamplingParams


class EmbeddingRoute(PromptRoute[EmbeddingRequest]):
    kind = EmbeddingRequest
    prompt_param = "input"
    has_answer = False

    async def reply(self, exchange: HttpExchange, job: RequestJob[EmbeddingRequest]) -> Response:
        return await EmbeddingReply(self.service, exchange, job).response()

    def params(self, request: EmbeddingRequest) -> SamplingParams:
        if (request.input is None) == (request.messages is None):
            raise RequestError("send exactly one of input and messages", param="input", code="invalid_value")
        settings = self.service.embedding
        settings.check_dimensions(request.dimensions)
        return SamplingParams(max_tokens=0, pooling=request.pooling or settings.pooling)

    def messages(self, request: EmbeddingRequest) -> list[Any]:
        return request.messages or []

    def prompts(self, request: EmbeddingRequest, messages: list[Any], allowance: Allowance) -> tuple[Prompt, ...]:
        if request.messages is not None:
            prompt = self._chat(request, messages, allowance)
            request.messages = []  # the images are in the prompt now
            return (prompt,)
        assert request.input is not None, "one of the two was sent"
        given, limit = listed_prompts(request.input), self.service.max_sequences
        if not 1 <= len(given) <= limit:
            text = f"input is a list of {len(given)}; allowed are 1..{limit} texts (--max-prompts)"
            raise RequestError(text, param="input", code="invalid_value")
        names = [f"input[{i}]" for i in range(len(given))] if given != [request.input] else ["input"]
        return tuple(self._one(text, name, request, allowance) for text, name in zip(given, names, strict=True))

    def _one(self, given: PromptText, name: str, request: EmbeddingRequest, allowance: Allowance) -> Prompt:
        allowance.check_cancelled()
        processor, is_text = self.service.engine.processor, isinstance(given, str)
        if not given:
            text = f"{name} is empty; at least one {'character' if is_text else 'token'} is needed"
            raise RequestError(text, param=name, code="invalid_value")
        has_specials = request.add_special_tokens is not False
        try:
            if not isinstance(given, str):
                return processor.tokens(given, allowance=allowance)
            prompt = processor.text(given, has_bos=has_specials, allowance=allowance)
            return processor.ended(prompt, allowance=allowance) if has_specials else prompt
        except RequestError as error:
            error.param = name if error.param == "prompt" else error.param
            raise

    def _chat(self, request: EmbeddingRequest, messages: list[Any], allowance: Allowance) -> Prompt:
        variables = request.chat_template_kwargs
        prompt = chat_prompt(self.service, request, messages, allowance, variables=variables, has_prompt=False)
        if not request.add_special_tokens:
            return prompt
        return self.service.engine.processor.ended(prompt, allowance=allowance, param="messages")

    def settle(self, job: RequestJob[EmbeddingRequest]) -> None:
        if job.request.messages is not None:
            job.prompt_param = "messages"


class EmbeddingReply(VectorReply):
    job: RequestJob[EmbeddingRequest]

    def body(self) -> Any:
        return {
            "id": f"embd-{self.job.public_id}",
            "object": "list",
            "created": int(time()),
            "model": self.job.model,
            "data": [
                {"object": "embedding", "index": i, "embedding": self._embedding(vector)}
                for i, vector in enumerate(self.vectors)
            ],
            "usage": self.usage(),
            **self.timings(),
        }

    def _embedding(self, vector: NDArray[Any]) -> str | NDArray[np.float32]:
        request = self.job.request
        finished = self.service.embedding.finish(
            vector, dimensions=request.dimensions, normalize=request.normalize is not False
        )
        return b64encode(finished.astype("<f4").tobytes()).decode() if request.encoding_format == "base64" else finished
