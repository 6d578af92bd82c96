"""POST /v1/score and /v1/rerank: how well documents match a query, judged by the model's own yes or no."""

import re
from abc import abstractmethod
from dataclasses import dataclass
from time import time
from typing import Any, TypeVar

from starlette.responses import Response

from saccade.errors import RequestError
from saccade.inputs.allowance import Allowance
from saccade.inputs.media.media_loader import Hold
from saccade.inputs.placeholders import Prompt
from saccade.inputs.text.rank_prompts import Content, find_answers, plain_text, read_content, score_of
from saccade.server.http.exchange import HttpExchange
from saccade.server.replies.pooling_reply import VectorReply
from saccade.server.requests.intake import PromptRoute, RequestJob
from saccade.server.requests.pooling_protocol import RerankRequest, ScoreRequest
from saccade.server.service import Service
from saccade.wire.sampling_params import SamplingParams

R = TypeVar("R", ScoreRequest, RerankRequest)
_MESSAGE = re.compile(r"messages\[(\d+)\](?:\.content)?")


@dataclass(frozen=True, slots=True)
class JudgedPairs:
    """The contents of a request, the client's name of each, and the pairs to judge."""

    contents: list[Content]
    names: list[str]
    pairs: list[tuple[int, int]]


class RankingRoute(PromptRoute[R]):
    """Every pair is a separate prompt; pairs with the same query share its blocks in the prefix cache."""

    has_answer = False

    @abstractmethod
    def compared(self, request: R) -> JudgedPairs: ...

    def params(self, request: R) -> SamplingParams:
        compared = self.compared(request)
        limit = self.service.max_sequences
        if not 1 <= len(compared.pairs) <= limit:
            text = f"there are {len(compared.pairs)} documents; allowed are 1..{limit} (--max-prompts)"
            raise RequestError(text, param=self.prompt_param, code="invalid_value")
        answers = find_answers(self.service.engine.processor.tokenizer)
        return SamplingParams(max_tokens=0, pooling="logits", pooled_token_ids=answers)

    def messages(self, request: R) -> list[Any]:
        """Each content as a message, which the media loader can read."""
        return [{"role": "user", "content": content} for content in self.compared(request).contents]

    async def load(self, messages: list[Any], hold: Hold) -> list[Any]:
        """Loads messages one by one, because the limit on media is per prompt."""
        loaded = []
        for i, message in enumerate(messages):
            try:
                loaded += await self.service.media.resolve([message], hold)
            except RequestError as error:
                error.param = (error.param or "messages[0]").replace("messages[0]", f"messages[{i}]")
                raise
        return loaded

    def prompts(self, request: R, messages: list[Any], allowance: Allowance) -> tuple[Prompt, ...]:
        processor, compared = self.service.engine.processor, self.compared(request)
        images = self.service.image_sizing(request.mm_processor_kwargs)
        contents = [message["content"] for message in messages]
        found = []
        for first, second in compared.pairs:
            allowance.check_cancelled()
            try:
                sides, instruction = (contents[first], contents[second]), request.instruction
                found.append(processor.pair(*sides, instruction=instruction, images=images, allowance=allowance))
            except RequestError as error:
                places = {"query": first, "document": second, "messages": second}
                if error.param in places:
                    error.param = compared.names[places[error.param]]
                raise
        return tuple(found)

    def rename(self, error: RequestError, request: R) -> None:
        found = _MESSAGE.match(error.param or "")
        if found is not None:
            error.param = self.compared(request).names[int(found[1])] + (error.param or "")[found.end() :]


class ScoreRoute(RankingRoute[ScoreRequest]):
    kind = ScoreRequest
    prompt_param = "text_2"

    async def reply(self, exchange: HttpExchange, job: RequestJob[ScoreRequest]) -> Response:
        return await ScoreReply(self.service, exchange, job).response()

    def compared(self, request: ScoreRequest) -> JudgedPairs:
        first_name, firsts = _either("text_1", request.text_1, "queries", request.queries)
        second_name, seconds = _either("text_2", request.text_2, "documents", request.documents)
        if len(firsts) not in (1, len(seconds)):
            text = f"{first_name} has {len(firsts)} texts and {second_name} has {len(seconds)}"
            text = f"{text}; send one {first_name}, or as many as {second_name}"
            raise RequestError(text, param=first_name, code="invalid_value")
        contents, names = _read([(first_name, firsts), (second_name, seconds)])
        step = int(len(firsts) > 1)
        return JudgedPairs(contents, names, [(i * step, len(firsts) + i) for i in range(len(seconds))])


class RerankRoute(RankingRoute[RerankRequest]):
    kind = RerankRequest
    prompt_param = "documents"

    async def reply(self, exchange: HttpExchange, job: RequestJob[RerankRequest]) -> Response:
        return await RerankReply(self.service, exchange, job, self.compared(job.request)).response()

    def params(self, request: RerankRequest) -> SamplingParams:
        if request.top_n is not None and request.top_n < 1:
            raise RequestError(f"top_n is {request.top_n}; it must be at least 1", param="top_n", code="invalid_value")
        return super().params(request)

    def compared(self, request: RerankRequest) -> JudgedPairs:
        documents = _listed(request.documents)
        if isinstance(request.query, list):
            raise RequestError("query must be one text or object", param="query", code="invalid_value")
        contents, names = _read([("query", [request.query]), ("documents", documents)])
        return JudgedPairs(contents, names, [(0, i + 1) for i in range(len(documents))])


class ScoreReply(VectorReply):
    job: RequestJob[ScoreRequest]

    def body(self) -> Any:
        scores = [score_of(vector) for vector in self.vectors]
        return {
            "id": f"score-{self.job.public_id}",
            "object": "list",
            "created": int(time()),
            "model": self.job.model,
            "data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)],
            "usage": self.usage(),
            **self.timings(),
        }


class RerankReply(VectorReply):
    job: RequestJob[RerankRequest]

    def __init__(
        self, service: Service, exchange: HttpExchange, job: RequestJob[RerankRequest], compared: JudgedPairs
    ) -> None:
        super().__init__(service, exchange, job)
        wants_documents = job.request.return_documents is not False
        self._texts = [plain_text(compared.contents[second]) for _, second in compared.pairs] if wants_documents else []
        job.request.documents, job.request.query = [], ""  # they may have megabytes of media

    def body(self) -> Any:
        scores = [score_of(vector) for vector in self.vectors]
        order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: self.job.request.top_n]
        return {
            "id": f"rerank-{self.job.public_id}",
            "model": self.job.model,
            "results": [{"index": i, "relevance_score": scores[i], **self._document(i)} for i in order],
            "usage": self.usage(),
            **self.timings(),
        }

    def _document(self, index: int) -> dict[str, Any]:
        """Only the text; media are not sent back."""
        return {"document": {"text": self._texts[index]}} if self._texts else {}


def _either(name: str, value: Any, other: str, alternative: Any) -> tuple[str, list[Any]]:
    if (value is None) == (alternative is None):
        text = f"send exactly one of {name} and {other}"
        raise RequestError(text, param=name, code="missing_parameter" if value is None else "invalid_value")
    return (name, _listed(value)) if value is not None else (other, _listed(alternative))


def _listed(items: Any) -> list[Any]:
    return items if isinstance(items, list) else [items]


def _read(groups: list[tuple[str, list[Any]]]) -> tuple[list[Content], list[str]]:
    """The contents and names of all items. An empty text is judged like any other."""
    named = [(name, i, item) for name, items in groups for i, item in enumerate(items)]
    sizes = {name: len(items) for name, items in groups}
    names = [f"{name}[{i}]" if sizes[name] > 1 else name for name, i, _ in named]
    return [read_content(item, name) for (_, _, item), name in zip(named, names, strict=True)], names
