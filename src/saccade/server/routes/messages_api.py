"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API over chat completions."""

from typing import Any

from starlette.responses import Response

from saccade.server.http.body_scan import Body
from saccade.server.http.exchange import HttpExchange
from saccade.server.http.json_body import json_reply
from saccade.server.http_errors import HttpError
from saccade.server.requests.intake import RequestJob
from saccade.server.requests.messages_protocol import CountTokensRequest, MessagesRequest
from saccade.server.requests.messages_request import NAMES, to_chat
from saccade.server.requests.protocol import ChatRequest
from saccade.server.requests.reading import read_request
from saccade.server.routes.chat import TranslatedRoute
from saccade.server.routes.messages_reply import MessagesReply, messages_error

PATH = "/v1/messages"


class MessagesRoute(TranslatedRoute):
    names, format_param = NAMES, "output_config.format"
    asked: type[CountTokensRequest] = MessagesRequest

    async def reply(self, exchange: HttpExchange, job: RequestJob[ChatRequest]) -> Response:
        return await MessagesReply(self.service, exchange, job).response()

    def read(self, exchange: HttpExchange, body: Body) -> tuple[ChatRequest, tuple[str, ...]]:
        settings = self.service.settings
        asked, ignored = read_request(self.asked, body, settings.max_body_values)
        return to_chat(asked, has_reasoning=bool(settings.reasoning_parser)), ignored


class CountTokensRoute(MessagesRoute):
    asked = CountTokensRequest
    is_count = True

    async def reply(self, exchange: HttpExchange, job: RequestJob[ChatRequest]) -> Response:
        return json_reply({"input_tokens": len(job.prompts[0])})


def is_messages_path(path: str) -> bool:
    return path == PATH or path.startswith(f"{PATH}/")


def use_messages_errors(exchange: HttpExchange) -> None:
    """Makes all errors, even about the key, look as this API's clients expect."""

    def envelope(error: HttpError) -> dict[str, Any]:
        return messages_error(error, exchange.id)

    exchange.envelope = envelope
    exchange.extra_headers.append((b"request-id", exchange.id.encode()))
