"""POST /generate: SGLang's native route. Streamed text is cumulative, as its clients expect."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import orjson
from starlette.responses import Response

from saccade.client.output import Logprob, Logprobs
from saccade.client.stream import Delta
from saccade.errors import RequestError
from saccade.inputs.allowance import Allowance
from saccade.inputs.placeholders import Prompt
from saccade.inputs.text.chat_messages import read_messages
from saccade.server.http.exchange import HttpExchange
from saccade.server.replies.logprobs import likeliest, number, token_text
from saccade.server.replies.reply import Reply
from saccade.server.requests.intake import PromptRoute, RequestJob
from saccade.server.requests.protocol import GenerateParams, GenerateRequest
from saccade.server.requests.request_params import generate_params
from saccade.server.requests.structure import structure_param
from saccade.server.service import Service
from saccade.wire.sampling_params import SamplingParams

Triple = list[Any]  # [log-probability, token id, text]; SGLang leaves the text out unless asked
MAX_SCHEME = 16  # a URL has a colon this early; SGLang's clients also send bare base64, which has none


class GenerateRoute(PromptRoute[GenerateRequest]):
    kind = GenerateRequest
    prompt_param = "text"

    async def reply(self, exchange: HttpExchange, job: RequestJob[GenerateRequest]) -> Response:
        return await GenerateReply(self.service, exchange, job).response()

    def params(self, request: GenerateRequest) -> SamplingParams:
        if (request.text is None) == (request.input_ids is None):
            raise RequestError("send exactly one of text and input_ids", param="text", code="invalid_value")
        if request.image_data and request.input_ids is not None:
            raise RequestError("images need text with their placeholders", param="image_data", code="invalid_value")
        return generate_params(request, self.service.settings, self.service.defaults)

    def messages(self, request: GenerateRequest) -> list[Any]:
        """The images as a message, which the media loader can read. The request no longer has them."""
        if not request.image_data:
            return []
        images = [request.image_data] if isinstance(request.image_data, str) else request.image_data
        request.image_data = None
        urls = [url if ":" in url[:MAX_SCHEME] else f"data:;base64,{url}" for url in images]
        return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}} for url in urls]}]

    def is_simple(self, request: GenerateRequest) -> bool:
        is_free = structure_param(request.sampling_params or GenerateParams()) is None
        return isinstance(request.text, str) and is_free

    def prompts(self, request: GenerateRequest, messages: list[Any], allowance: Allowance) -> tuple[Prompt, ...]:
        processor = self.service.engine.processor
        if request.input_ids is not None:
            try:
                return (processor.tokens(request.input_ids, allowance=allowance),)
            except RequestError as error:
                error.param = "input_ids"
                raise
        refs = read_messages(messages).media if messages else ()
        media = [(ref.kind, ref.source) for ref in refs]
        return (processor.text(request.text or "", media=media, allowance=allowance),)

    def settle(self, job: RequestJob[GenerateRequest]) -> None:
        if job.request.input_ids is not None:
            job.prompt_param = "input_ids"

    def structure_param(self, request: GenerateRequest) -> str:
        return f"sampling_params.{structure_param(request.sampling_params or GenerateParams())}"

    def rename(self, error: RequestError, request: GenerateRequest) -> None:
        image = _IMAGE_PARAM.match(error.param or "")
        if image is not None:
            error.param = f"image_data[{image.group(1) or image.group(2)}]"
        elif error.param == "prompt":
            error.param = "text"


_IMAGE_PARAM = re.compile(r"messages\[0\]\.content\[(\d+)\]|media\[(\d+)\]")


@dataclass(slots=True)
class _Output:
    """One growing output. Every streamed chunk has all of it, so its parts are made once and kept."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    chosen: list[Triple] = field(default_factory=list)
    tops: list[list[Triple] | None] = field(default_factory=list)
    last: Delta | None = None


class GenerateReply(Reply):
    job: RequestJob[GenerateRequest]

    def __init__(self, service: Service, exchange: HttpExchange, job: RequestJob[GenerateRequest]) -> None:
        super().__init__(service, exchange, job)
        self._outputs = [_Output() for _ in range(job.params.n)]
        self._input_scores = self._write_input(())

    def take(self, index: int, delta: Delta) -> bytes:
        output, scores = self._outputs[index], delta.logprobs or ()
        output.text += delta.text
        output.token_ids += delta.token_ids
        output.chosen += self._chosen(delta.token_ids, scores)
        output.tops += self._tops(scores)
        output.last = delta
        if delta.prompt_logprobs is not None:
            self._input_scores = self._write_input(delta.prompt_logprobs)
        if not self.job.request.stream:
            return b""
        place = {"index": index} if len(self._outputs) > 1 else {}
        return b"data: " + orjson.dumps(self._body(output) | place) + b"\n\n"

    def body(self) -> Any:
        found = [self._body(output) for output in self._outputs]
        return found[0] if len(found) == 1 else found

    def _body(self, output: _Output) -> dict[str, Any]:
        delta = output.last
        assert delta is not None, "an output without a piece"
        usage = self.answer.usage()
        meta: dict[str, Any] = {
            "id": self.job.public_id,
            "finish_reason": self._finish(output, delta),
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": len(output.token_ids),
            "cached_tokens": delta.num_cached_tokens,
            "e2e_latency": monotonic() - self.exchange.arrival,
        }
        if self.job.request.return_logprob:
            meta |= self._scores(output)
        return {"text": output.text, "output_ids": output.token_ids, "meta_info": meta | self.timings()}

    def _finish(self, output: _Output, delta: Delta) -> dict[str, Any] | None:
        """Why the text ended, if it did. For a stop, `matched` is the token or string, or the model's own end token."""
        match delta.finish_reason:
            case None:
                return None
            case "length":
                return {"type": "length", "length": delta.num_output_tokens}
            case "stop":
                end = output.token_ids[-1] if output.token_ids else None
                own = end if end in self.service.eos_token_ids else None
                return {"type": "stop", "matched": own if delta.stop_reason is None else delta.stop_reason}
            case reason:
                return {"type": reason}

    def _scores(self, output: _Output) -> dict[str, Any]:
        found = {**self._input_scores, "output_token_logprobs": output.chosen}
        return found | ({"output_top_logprobs": output.tops} if self.job.params.logprobs else {})

    def _write_input(self, scores: Sequence[Logprobs | None]) -> dict[str, Any]:
        start = max(self.job.request.logprob_start_len or 0, 0)
        ids = self.answer.prompt_ids[0].tolist()[start:]
        found = {"input_token_logprobs": self._chosen(ids, scores[start:])}
        return found | ({"input_top_logprobs": self._tops(scores[start:])} if self.job.params.logprobs else {})

    def _chosen(self, token_ids: Sequence[int], scores: Sequence[Logprobs | None]) -> list[Triple]:
        pairs = zip(token_ids, scores, strict=False)
        return [self._triple(None if found is None else found[token], token) for token, found in pairs]

    def _tops(self, scores: Sequence[Logprobs | None]) -> list[list[Triple] | None]:
        count = self.job.params.logprobs
        if not count:
            return []
        found = [None if one is None else likeliest(one, count) for one in scores]
        return [None if top is None else [self._triple(score, token) for token, score in top] for top in found]

    def _triple(self, score: Logprob | None, token: int) -> Triple:
        text = token_text(self.tokenizer, token) if self.job.request.return_text_in_logprobs else None
        return [None if score is None else number(score), token, text]
