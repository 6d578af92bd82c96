"""From a request of Anthropic's Messages API to a chat request."""

import re
from collections.abc import Callable
from typing import Any

from saccade.server.requests.messages_protocol import CountTokensRequest, MessagesRequest, MessagesToolChoice, Thinking
from saccade.server.requests.protocol import JsonSchema, ResponseFormat
from saccade.server.requests.translated import ChatBuilder, TranslatedChat, same_fields, shown, unsupported, wrong

NAMES = (
    (r"tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
    (r"tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"stop(?![a-z_])", "stop_sequences"),
    (r"response_format.*", "output_config.format"),
    (r"continue_final_message", "messages"),
)
# Claude Code's first block, which is not for the model. It differs between conversations, so their system prompts would
# share nothing in the prefix cache.
_BILLING = "x-anthropic-billing-header:"
_MEDIA_TYPE = re.compile(r"image/[A-Za-z0-9.+-]{1,64}")


def to_chat(asked: CountTokensRequest, *, has_reasoning: bool) -> TranslatedChat:
    """`has_reasoning`: the server separates reasoning from the text, so it can return thinking."""
    builder = ChatBuilder()
    if system := _system(asked.system):
        builder.add({"role": "system", "content": system}, "system")
    for i, message in enumerate(asked.messages):
        _add_message(builder, message, f"messages[{i}]")
    is_continued = bool(asked.messages) and asked.messages[-1]["role"] == "assistant"
    if is_continued and builder.messages[-1].get("tool_calls"):
        raise wrong("a tool_use must be followed by its tool_result", f"messages[{len(asked.messages) - 1}]")
    fields = same_fields(asked) | {"messages": builder.messages, "places": builder.places}
    fields |= _tool_fields(asked) | _thinking_fields(asked, has_reasoning=has_reasoning)
    if isinstance(asked, MessagesRequest):
        fields["stop"] = asked.stop_sequences
    if asked.output_config is not None and asked.output_config.format is not None:
        schema = JsonSchema(schema=asked.output_config.format.schema_)
        fields["response_format"] = ResponseFormat(type="json_schema", json_schema=schema)
    fields |= {"continue_final_message": is_continued, "add_generation_prompt": not is_continued}
    return TranslatedChat(**fields)


def _system(system: Any) -> str | list[dict[str, Any]]:
    if not system or isinstance(system, str):
        return system or ""
    if not isinstance(system, list):
        raise wrong("it must be a string or a list of text blocks", "system")
    return [part for part in _texts(system, "system") if not part["text"].startswith(_BILLING)]


def _texts(blocks: list[Any], at: str) -> list[dict[str, Any]]:
    return [_text_part(block, f"{at}[{i}]", _kind(block, f"{at}[{i}]")) for i, block in enumerate(blocks)]


def _add_message(builder: ChatBuilder, message: Any, at: str) -> None:
    if not isinstance(message, dict):
        raise wrong("a message must be an object with role and content", at)
    role = message.get("role")
    add = _ADDERS.get(role) if isinstance(role, str) else None
    if add is None:
        raise wrong("it must be user, assistant or system", f"{at}.role")
    content = message.get("content")
    if isinstance(content, str):
        builder.add({"role": message["role"], "content": content}, f"{at}.content")
    elif isinstance(content, list):
        add(builder, content, f"{at}.content")
    else:
        raise wrong("it must be a string or a list of blocks", f"{at}.content")


def _add_system(builder: ChatBuilder, blocks: list[Any], at: str) -> None:
    """An instruction inside the conversation."""
    builder.add({"role": "system", "content": _texts(blocks, at)}, at)


def _add_user(builder: ChatBuilder, blocks: list[Any], at: str) -> None:
    """Tool results become separate messages; the order is kept."""
    parts: list[dict[str, Any]] = []
    places: list[str] = []
    for j, block in enumerate(blocks):
        place = f"{at}[{j}]"
        if _kind(block, place) == "tool_result":
            if parts:
                builder.add({"role": "user", "content": parts}, at, parts=places)
                parts, places = [], []
            _add_result(builder, block, place)
        else:
            parts.append(_user_part(block, place))
            places.append(place)
    if parts or not blocks:
        builder.add({"role": "user", "content": parts}, at, parts=places)


def _add_result(builder: ChatBuilder, block: dict[str, Any], at: str) -> None:
    call_id, content = block.get("tool_use_id"), block.get("content")
    if not isinstance(call_id, str):
        raise wrong("tool_result needs the tool_use_id that it answers", at)
    message: dict[str, Any] = {"role": "tool", "tool_call_id": call_id}
    if content is None or isinstance(content, str):
        builder.add(message | {"content": content or ""}, at)
    elif isinstance(content, list):
        places = [f"{at}.content[{j}]" for j in range(len(content))]
        parts = [_user_part(part, place) for part, place in zip(content, places, strict=True)]
        builder.add(message | {"content": parts}, at, parts=places)
    else:
        raise wrong("it must be a string or a list of blocks", f"{at}.content")


def _add_assistant(builder: ChatBuilder, blocks: list[Any], at: str) -> None:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for j, block in enumerate(blocks):
        place = f"{at}[{j}]"
        match _kind(block, place):
            case "tool_use":
                calls.append(_call(block, place))
            case "thinking" if isinstance(block.get("thinking"), str):
                thoughts.append(block["thinking"])
            case "redacted_thinking":
                pass
            case kind:
                texts.append(_text_part(block, place, kind, "text, thinking and tool_use")["text"])
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    builder.add(message, at)


_ADDERS: dict[str, Callable[[ChatBuilder, list[Any], str], None]] = {
    "user": _add_user,
    "assistant": _add_assistant,
    "system": _add_system,
}


def _call(block: dict[str, Any], at: str) -> dict[str, Any]:
    call_id, name, arguments = block.get("id"), block.get("name"), block.get("input", {})
    if not isinstance(call_id, str) or not isinstance(name, str) or not isinstance(arguments, dict):
        raise wrong("tool_use needs an id, a name and an input that is an object", at)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _user_part(block: Any, at: str) -> dict[str, Any]:
    kind = _kind(block, at)
    return _image_part(block, at) if kind == "image" else _text_part(block, at, kind, "text, image and tool_result")


def _text_part(block: dict[str, Any], at: str, kind: str, allowed: str = "text") -> dict[str, Any]:
    if kind != "text":
        raise unsupported(f"a block of type {kind} is not supported here; {allowed} can be sent", at)
    if not isinstance(block.get("text"), str):
        raise wrong("a text block needs a text", at)
    return {"type": "text", "text": block["text"]}


def _image_part(block: dict[str, Any], at: str) -> dict[str, Any]:
    source = block.get("source")
    at = f"{at}.source"
    if not isinstance(source, dict):
        raise wrong("an image needs a source of type base64 or url", at)
    match source.get("type"):
        case "base64":
            kind, data = source.get("media_type"), source.get("data")
            if not isinstance(kind, str) or not _MEDIA_TYPE.fullmatch(kind) or not isinstance(data, str):
                raise wrong("a base64 source needs data and a media_type such as image/png", at)
            url = f"data:{kind};base64,{data}"
        case "url":
            if not isinstance(source.get("url"), str) or not source["url"]:
                raise wrong("a url source needs a url", at)
            url = source["url"]
        case kind:
            raise unsupported(f"a source of type {shown(kind)} is not supported; use base64 or url", at)
    return {"type": "image_url", "image_url": {"url": url}}


def _kind(block: Any, at: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise wrong("a block must be an object with a type", at)
    return shown(kind)


def _tool_fields(asked: CountTokensRequest) -> dict[str, Any]:
    choice = asked.tool_choice or MessagesToolChoice(type="auto")
    is_given = asked.tool_choice is not None
    if choice.type == "tool" and choice.name is None:
        raise wrong("tool_choice of type tool needs the name of one", "tool_choice.name")
    names: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none", "tool": {"name": choice.name}}
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(asked.tools or ())]
    return {
        "tools": tools or None,
        "tool_choice": names[choice.type] if is_given else None,
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
    }


def _tool(tool: dict[str, Any], at: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        kind = shown(tool["type"])
        raise unsupported(f"a tool of type {kind} is not supported; only tools that the client runs are", at)
    if not isinstance(tool.get("input_schema"), dict):
        raise wrong("a tool needs an input_schema that is a JSON schema", f"{at}.input_schema")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _thinking_fields(asked: CountTokensRequest, *, has_reasoning: bool) -> dict[str, Any]:
    """Templates that can switch thinking read enable_thinking. Without `thinking`, or if adaptive, they use their
    default."""
    thinking: Thinking | None = asked.thinking
    variables = asked.chat_template_kwargs
    if thinking is None:
        return {"chat_template_kwargs": variables}
    if thinking.type == "enabled" and not has_reasoning:
        raise unsupported("the server must be started with --reasoning-parser to show thinking", "thinking")
    if thinking.type != "adaptive":
        variables = {"enable_thinking": thinking.type == "enabled"} | (variables or {})
    return {"chat_template_kwargs": variables, "include_reasoning": thinking.display != "omitted"}
