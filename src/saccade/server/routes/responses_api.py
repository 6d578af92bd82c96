"""POST /v1/responses and /v1/responses/input_tokens: OpenAI's Responses API over chat completions."""

from collections import Counter
from typing import Any

from starlette.responses import Response

from saccade.errors import RequestError
from saccade.server.http.body_scan import Body
from saccade.server.http.exchange import HttpExchange
from saccade.server.http.json_body import json_reply
from saccade.server.requests.intake import RequestJob
from saccade.server.requests.protocol import ChatRequest
from saccade.server.requests.reading import read_request
from saccade.server.requests.responses_protocol import ResponsesRequest
from saccade.server.requests.responses_request import NAMES, ResponsesChat, to_chat
from saccade.server.requests.responses_tools import left_out
from saccade.server.response_store import EMPTY_CONVERSATION, StoredConversation
from saccade.server.routes.chat import TranslatedRoute
from saccade.server.routes.responses_reply import ResponsesReply, response_key, response_of

NO_STORE = "this server does not store responses; start it with --response-store-bytes"


class ResponsesRoute(TranslatedRoute):
    names, format_param = NAMES, "text.format"
    prompt_param = "input"

    @property
    def may_continue(self) -> bool:
        return self.service.responses.is_on

    async def reply(self, exchange: HttpExchange, job: RequestJob[ChatRequest]) -> Response:
        reply, chat, store = ResponsesReply(self.service, exchange, job), job.request, self.service.responses
        assert isinstance(chat, ResponsesChat), "see `read`"
        if chat.kept is not None:
            key = response_key(exchange)
            exchange.exits.callback(store.drop, *key)
            store.begin(*key, chat.kept)
            chat.kept = None  # only the store holds it, which may evict it
        return await reply.response()

    def read(self, exchange: HttpExchange, body: Body) -> tuple[ChatRequest, tuple[str, ...]]:
        asked, ignored = read_request(ResponsesRequest, body, self.service.settings.max_body_values)
        store = self.service.responses
        if asked.store and not store.is_on:
            raise _no_store("store", "or send store: false")
        asked = self._with_referenced(exchange, asked)
        is_kept = store.is_on and asked.store is not False
        chat = to_chat(asked, self._before(exchange, asked), is_kept=is_kept)
        return chat, (*ignored, *left_out(asked.tools))

    def _with_referenced(self, exchange: HttpExchange, asked: ResponsesRequest) -> ResponsesRequest:
        """The request with items of earlier answers in place of references to them. One may come once: many short
        references to a long item would make a prompt larger than any body may be."""
        references = [] if isinstance(asked.input, str) else [*map(_reference, asked.input)]
        counts = Counter(filter(None, references))
        if not counts:
            return asked
        name, count = counts.most_common(1)[0]
        if count > 1:
            first = references.index(name)
            at = f"input[{references.index(name, first + 1)}]"
            raise RequestError(f"{at} refers to the same item as input[{first}]", param=at, code="duplicate_item")
        items = [
            item if (found := _reference(item)) is None else self._item(exchange, found, f"input[{i}]")
            for i, item in enumerate(asked.input)
        ]
        return asked.model_copy(update={"input": items})

    def _item(self, exchange: HttpExchange, item_id: str, at: str) -> Any:
        store = self.service.responses
        if not store.is_on:
            raise _no_store(at, "or send the item itself, as clients do with store: false")
        assert exchange.caller is not None, "its key was checked"
        found = store.get(exchange.caller.name, response_of(item_id))
        for item in reversed(found.items if found is not None else ()):
            if isinstance(item, dict) and item.get("id") == item_id:
                return item
        text = f"{at}: this caller has no such item; its response was not stored, or was evicted"
        raise RequestError(text, param=at, code="item_not_found", status=404)

    def _before(self, exchange: HttpExchange, asked: ResponsesRequest) -> StoredConversation:
        if asked.previous_response_id is None:
            return EMPTY_CONVERSATION
        store = self.service.responses
        if not store.is_on:
            raise _no_store("previous_response_id", "or send the whole conversation as input")
        assert exchange.caller is not None, "its key was checked"
        found = store.get(exchange.caller.name, asked.previous_response_id)
        if found is None:
            text = "previous_response_id: this caller has no such response; it was not stored, or was evicted"
            code = "previous_response_not_found"
            raise RequestError(text, param="previous_response_id", code=code, status=404)
        return found


class InputTokensRoute(ResponsesRoute):
    is_count = True

    async def reply(self, exchange: HttpExchange, job: RequestJob[ChatRequest]) -> Response:
        return json_reply({"object": "response.input_tokens", "input_tokens": len(job.prompts[0])})


def _reference(item: Any) -> str | None:
    """The id of an earlier item, if this is a reference to one."""
    found = item.get("id") if isinstance(item, dict) and item.get("type") == "item_reference" else None
    return found if isinstance(found, str) else None


def _no_store(param: str, way: str) -> RequestError:
    return RequestError(f"{param}: {NO_STORE}, {way}", param=param, code="unsupported_parameter")
