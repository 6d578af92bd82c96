"""From a request of OpenAI's Responses API to a chat request."""

from typing import Any

import orjson

from saccade.server.requests.protocol import JsonSchema, ResponseFormat
from saccade.server.requests.responses_protocol import ResponsesRequest
from saccade.server.requests.responses_tools import CallName, kept_tools, model_name, read_tools, tool_choice
from saccade.server.requests.translated import ChatBuilder, TranslatedChat, same_fields, shown, unsupported, wrong
from saccade.server.response_store import StoredConversation

NAMES = (
    (r"tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"max_tokens", "max_output_tokens"),
    (r"response_format.*", "text.format"),
    (r"messages$", "input"),
)
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_ROLES = ("user", "assistant", "system", "developer")
LOGPROBS = "message.output_text.logprobs"
# Nothing is encrypted here, and nothing is searched for, so nothing is missing.
HARMLESS_INCLUDES = frozenset(
    {"reasoning.encrypted_content", "web_search_call.action.sources", "web_search_call.results"}
)


class ResponsesChat(TranslatedChat):
    """`asked` is what the client sent, without its input. `kept` is the conversation to store, if any. `call_names` has
    the client's names of its tools."""

    asked: ResponsesRequest
    kept: Any  # a StoredConversation, which pydantic would copy
    call_names: dict[str, CallName]


def to_chat(asked: ResponsesRequest, before: StoredConversation, *, is_kept: bool) -> ResponsesChat:
    """`before` is the conversation that the input continues."""
    _check(asked)
    is_text = isinstance(asked.input, str)
    items = [{"type": "message", "role": "user", "content": asked.input}] if is_text else asked.input
    builder = ChatBuilder()
    if asked.instructions:
        builder.add({"role": "system", "content": asked.instructions}, "instructions")
    for item in before.items:
        _add_item(builder, item, "previous_response_id")
    for i, item in enumerate(items):
        _add_item(builder, item, "input" if is_text else f"input[{i}]")
    if not items or not builder.messages:
        raise wrong("it must have at least one message", "input")
    fields = same_fields(asked) | {"messages": builder.messages, "places": builder.places}
    read = read_tools(asked.tools)
    fields |= {"tools": read.tools or None, "tool_choice": tool_choice(asked.tool_choice), "call_names": read.names}
    fields["places"] |= read.places
    fields |= _format_fields(asked)
    fields["max_tokens"] = asked.max_output_tokens
    fields["reasoning_effort"] = asked.reasoning.effort if asked.reasoning is not None else None
    fields["logprobs"] = LOGPROBS in (asked.include or ())
    fields["top_logprobs"] = asked.top_logprobs if fields["logprobs"] else None
    fields["asked"] = asked.model_copy(update={"input": "", "tools": kept_tools(asked.tools)})  # without images
    return ResponsesChat(kept=before.then(items) if is_kept else None, **fields)


def _check(asked: ResponsesRequest) -> None:
    if asked.truncation == "auto":
        text = "auto is not supported; send disabled, and leave out of the input what does not fit"
        raise unsupported(text, "truncation")
    try:  # every reply repeats them
        orjson.dumps([[[asked.tools, asked.tool_choice, asked.text and asked.text.model_dump()]]])
    except TypeError:
        raise wrong("tools, tool_choice or text are nested too deeply", "tools") from None
    for i, name in enumerate(asked.include or ()):
        if name != LOGPROBS and name not in HARMLESS_INCLUDES:
            raise unsupported(f"{shown(name)} is not supported; leave it out", f"include[{i}]")
    if asked.top_logprobs and LOGPROBS not in (asked.include or ()):
        raise wrong(f'it needs include: ["{LOGPROBS}"]', "top_logprobs")


def _add_item(builder: ChatBuilder, item: Any, at: str) -> None:
    if not isinstance(item, dict):
        raise wrong("an item must be an object", at)
    match item.get("type") or "message":
        case "message":
            _add_message(builder, item, at)
        case "function_call":
            _add_call(builder, item, at)
        case "function_call_output":
            _add_output(builder, item, at)
        case "reasoning":
            _add_reasoning(builder, item, at)
        case kind:
            allowed = "message, function_call, function_call_output and reasoning can be sent"
            raise unsupported(f"an item of type {shown(kind)} is not supported; {allowed}", at)


def _add_message(builder: ChatBuilder, item: dict[str, Any], at: str) -> None:
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong(f"it must be one of {', '.join(_ROLES)}", f"{at}.role")
    parts, places = (content, []) if isinstance(content, str) else _parts(content, f"{at}.content")
    if role == "assistant":
        if not isinstance(parts, str):
            parts = "".join(_text_of(part, place) for part, place in zip(parts, places, strict=True))
        last = builder.messages[-1] if builder.messages else {}
        if last.get("role") == "assistant" and not last["content"] and not last.get("tool_calls"):
            last["content"] = parts  # the answer that follows the reasoning
            return
        places = []
    builder.add({"role": role, "content": parts}, at, parts=places)


def _parts(content: Any, at: str) -> tuple[list[dict[str, Any]], list[str]]:
    if not isinstance(content, list):
        raise wrong("it must be a string or a list of parts", at)
    places = [f"{at}[{j}]" for j in range(len(content))]
    return [_part(part, place) for part, place in zip(content, places, strict=True)], places


def _part(part: Any, at: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise wrong("a part must be an object with a type", at)
    if kind in _TEXT_PARTS:
        text = part.get(_TEXT_PARTS[kind])
        if not isinstance(text, str):
            raise wrong(f"a part of type {kind} needs a text", at)
        return {"type": "text", "text": text}
    if kind != "input_image":
        raise unsupported(f"a part of type {shown(kind)} is not supported; send input_text or input_image", at)
    url = part.get("image_url")
    if not isinstance(url, str) or not url:
        raise unsupported("an image needs an image_url: a URL or a data URL; files are not stored here", at)
    detail = {"original": "high"}.get(part["detail"], part["detail"]) if isinstance(part.get("detail"), str) else None
    return {"type": "image_url", "image_url": {"url": url} | ({"detail": detail} if detail else {})}


def _text_of(part: dict[str, Any], at: str) -> str:
    if part["type"] != "text":
        raise wrong("an assistant message can only have text", at)
    text: str = part["text"]
    return text


def _add_call(builder: ChatBuilder, item: dict[str, Any], at: str) -> None:
    """Adds a call to the assistant's message before it."""
    call_id, name, arguments = item.get("call_id"), item.get("name"), item.get("arguments")
    if not isinstance(call_id, str) or not isinstance(name, str) or not isinstance(arguments, str):
        raise wrong("function_call needs call_id, name and arguments, which is text", at)
    function = {"name": model_name(name, item.get("namespace")), "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    if not builder.messages or builder.messages[-1]["role"] != "assistant":
        builder.add({"role": "assistant", "content": ""}, at)
    builder.messages[-1].setdefault("tool_calls", []).append(call)


def _add_output(builder: ChatBuilder, item: dict[str, Any], at: str) -> None:
    call_id, output = item.get("call_id"), item.get("output")
    if not isinstance(call_id, str):
        raise wrong("function_call_output needs the call_id that it answers", at)
    content, places = (output, []) if isinstance(output, str) else _parts(output, f"{at}.output")
    builder.add({"role": "tool", "tool_call_id": call_id, "content": content}, at, parts=places)


def _add_reasoning(builder: ChatBuilder, item: dict[str, Any], at: str) -> None:
    """Adds the reasoning before an answer, if the item has it in plain text."""
    content = item.get("content")
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
    if texts:
        builder.add({"role": "assistant", "content": "", "reasoning_content": "".join(texts)}, at)


def _format_fields(asked: ResponsesRequest) -> dict[str, Any]:
    wanted = asked.text.format if asked.text is not None else None
    if wanted is None:
        return {}
    if wanted.type == "json_schema" and wanted.schema_ is None:
        raise wrong("a format of type json_schema needs a schema", "text.format.schema")
    schema = JsonSchema(schema=wanted.schema_) if wanted.schema_ is not None else None
    return {"response_format": ResponseFormat(type=wanted.type, json_schema=schema)}
