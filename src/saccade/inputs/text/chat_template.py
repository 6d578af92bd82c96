"""Chat templates, rendered by minijinja with a fuel limit (see template_language.py).

The template comes with the checkpoint or is given at server start; a request cannot bring one. A failing template
raises a RequestError with a fixed text; one that refuses the messages is quoted.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from saccade.errors import ConfigError, RequestError, contained
from saccade.inputs.checkpoint_files import read_optional_json, read_text
from saccade.inputs.text.chat_messages import ROLES, Conversation, MediaRef, flatten_text, read_messages, wrap_text
from saccade.inputs.text.joined_roles import with_joined_roles
from saccade.inputs.text.special_tokens import NUM_MARKS, GuardedTokens, Segment, SpecialTokenGuard, unused_marks
from saccade.inputs.text.template_language import (
    TEMPLATE,
    RefusalError,
    compile_template,
    with_exact_floats,
    with_text_arguments,
)

MAX_REASON_CHARS = 200
_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize", "continue_final_message"}
    | {"raise_exception", "strftime_now", "bos_token", "eos_token", "pad_token", "unk_token"}
)
# A loop over the content itself, not over messages filtered by it (for m in messages if m.content) or over its lines.
_PARTS_LOOP = re.compile(r"\bfor\s+\w+\s+in\s+(?:(?!\bif\b)[^%])*?\bcontent\b(?:['\"]\])?(?!\s*[.(])")
# DeepSeek's templates ask so which messages have tool calls to print; those with an empty text have none.
_NULL_TEST = re.compile(r"message\[['\"]content['\"]\]\s+is\s+(?:not\s+)?none\b")
_STRING_TEST = re.compile(r"content(?:['\"]\])?\s+is\s+(?:not\s+)?string\b")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt's text and its media, in order. Special tokens that a user typed are in plain segments."""

    segments: tuple[Segment, ...]
    media: tuple[MediaRef, ...]

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)


class ChatTemplate:
    """A compiled template. Rendering keeps no state, so threads may share it."""

    def __init__(
        self, source: str, guarded: GuardedTokens | None = None, *, named_tokens: Mapping[str, str] | None = None
    ) -> None:
        """A user's `guarded` tokens stay plain text. `named_tokens` are variables such as bos_token."""
        self._guarded = guarded or GuardedTokens()
        self._named_tokens = dict(named_tokens or {})
        self.source = source
        self._takes_parts = _PARTS_LOOP.search(source) is not None
        self._takes_strings = not self._takes_parts or _STRING_TEST.search(source) is not None
        self._takes_null = _NULL_TEST.search(source) is not None
        self._marks = "".join(unused_marks(source))
        self._environment = compile_template(source)

    def render(
        self,
        messages: Any,
        *,
        tools: Any = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        check: Callable[[Any], None] = lambda context: None,
        roles: frozenset[str] = ROLES,
        joins_roles: bool = False,
    ) -> Rendered:
        """`variables` are the request's chat_template_kwargs. `check` is called with everything the template will see,
        before any work is done, and raises if that is too much. With `joins_roles`, messages that the template refuses
        are tried again with joined roles (see `with_joined_roles`)."""
        conversation = read_messages(messages, roles)
        context = {"messages": self._shape(conversation), "tools": _check_tools(tools), **_check_variables(variables)}
        check(context)
        *marks, end = self._choose_marks(context)
        guard = SpecialTokenGuard(self._guarded, marks)
        protected = [guard.protect_message(message) for message in context.pop("messages")]
        context = {"messages": protected, "documents": None, **guard.protect(context)}
        context["tools"] = with_exact_floats(context["tools"])
        for message in protected:
            if "tool_calls" in message:
                message["tool_calls"] = with_exact_floats(message["tool_calls"])
                if self._takes_null and message["content"] == "":
                    message["content"] = None
        if continue_final_message:
            _end_final_message(context["messages"], end)
        has_prompt = add_generation_prompt and not continue_final_message
        context |= self._named_tokens | {"add_generation_prompt": has_prompt}
        text = self._print_joined(context) if joins_roles else self._print(context)
        if continue_final_message:
            text = _cut_final_message(text, end)
        return Rendered(guard.split(text), conversation.media)

    def _choose_marks(self, context: dict[str, Any]) -> list[str]:
        found = list(islice(unused_marks(context, self._marks), NUM_MARKS + 1))
        if len(found) <= NUM_MARKS:
            raise RequestError("the request uses every Unicode noncharacter; send text", code="invalid_request")
        return found

    def _shape(self, conversation: Conversation) -> list[dict[str, Any]]:
        if not self._takes_parts:
            if conversation.media:
                message = "this model's chat template takes no images or videos; send text"
                raise RequestError(message, param=conversation.media[0].param, code="media_unsupported")
            return flatten_text(conversation.messages)
        return conversation.messages if self._takes_strings else wrap_text(conversation.messages)

    def _print_joined(self, context: dict[str, Any]) -> str:
        try:
            return self._print(context)
        except RequestError as error:
            if error.code != "chat_template_refused":
                raise
        return self._print(context | {"messages": with_joined_roles(context["messages"])})

    def _print(self, context: dict[str, Any]) -> str:
        """Most templates take the arguments of calls as objects; some, such as DeepSeek-R1's, only as text."""
        try:
            return self._run(context)
        except RequestError as error:
            has_calls = any("tool_calls" in message for message in context["messages"])
            if error.code != "chat_template_failed" or not has_calls:
                raise
        return self._run(context | {"messages": [with_text_arguments(message) for message in context["messages"]]})

    def _run(self, context: dict[str, Any]) -> str:
        try:
            with contained():
                return self._environment.render_template(TEMPLATE, **context)
        except RefusalError as error:
            reason = "".join(char for char in str(error) if char.isprintable())[:MAX_REASON_CHARS]
            message = f"the model's chat template refuses these messages: {reason or 'it gives no reason'}; check the "
            message += "order of roles and the kinds of content"
            raise RequestError(message, param="messages", code="chat_template_refused") from None
        except Exception:  # minijinja, and any Python code a template reaches
            message = "the model's chat template cannot be rendered with these messages"
            raise RequestError(message, param="messages", code="chat_template_failed") from None


def read_template(folder: Path, file: str = "") -> str | None:
    """Reads `file` if given, else chat_template.jinja, chat_template.json or tokenizer_config.json, in this order. As
    in transformers, a template named tool_use replaces the default one for requests with tools."""
    if file:
        path = Path(file).expanduser()
        if not path.is_file():
            problem = f"chat_template is {file}, which is not a file"
            raise ConfigError(f"{problem}; give one with a template (--chat-template)")
        return read_text(path)
    found = _templates(folder)
    default, for_tools = found.get("default"), found.get("tool_use")
    return default if default is None or for_tools is None else _either(for_tools, default)


def _templates(folder: Path) -> dict[str, str]:
    """The templates of a checkpoint by name, from the first file that has any."""
    if (folder / "chat_template.jinja").is_file():
        others = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        return {"default": read_text(folder / "chat_template.jinja")} | {file.stem: read_text(file) for file in others}
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = read_optional_json(folder / name).get("chat_template")
        if isinstance(found, str):
            found = {"default": found}
        elif isinstance(found, list):
            found = {str(item.get("name")): item.get("template") for item in found if isinstance(item, dict)}
        named = found.items() if isinstance(found, dict) else ()
        if texts := {key: text for key, text in named if isinstance(text, str)}:
            return texts
    return {}


def _either(for_tools: str, default: str) -> str:
    """One template that acts like the first if there are tools, else like the second. Tags drop the line break behind
    them, and an empty print keeps blanks in front of them; the last line break of a template is never printed."""
    first, second = ("\n" + text.removesuffix("\n") + '{{ "" }}' for text in (for_tools, default))
    return "{% if tools %}" + first + "{% else %}" + second + "{% endif %}"


def _check_tools(tools: Any) -> list[Any] | None:
    if tools is None:
        return None
    if not isinstance(tools, list | tuple) or not tools or not all(isinstance(tool, dict) for tool in tools):
        raise RequestError("tools must be a list with at least one object", param="tools", code="invalid_tools")
    return list(tools)


def _check_variables(variables: object) -> dict[str, Any]:
    name, code = "chat_template_kwargs", "invalid_chat_template_kwargs"
    if not isinstance(variables, Mapping | None):
        raise RequestError(f"{name} must be an object", param=name, code=code)
    if taken := sorted(_RESERVED.intersection(variables or {})):
        raise RequestError(f"{name} may not set {', '.join(taken)}", param=name, code=code)
    return dict(variables or {})


def _end_final_message(messages: list[dict[str, Any]], end: str) -> None:
    """Marks the end of the last message's text. The prompt is cut there, and the model continues it."""
    final, param = messages[-1], f"messages[{len(messages) - 1}]"
    if final.get("tool_calls"):
        raise _not_continuable("tool_calls follow the text", f"{param}.tool_calls")
    if isinstance(final["content"], str):
        final["content"] += end
        return
    kinds = [part["type"] for part in final["content"]]
    if "text" not in kinds:
        raise _not_continuable("it has no text", f"{param}.content")
    if kinds[-1] != "text":
        raise _not_continuable(f"a part of type {kinds[-1]} follows the text", f"{param}.content[{len(kinds) - 1}]")
    final["content"][-1]["text"] += end


def _not_continuable(reason: str, param: str) -> RequestError:
    message = f"{param}: the final message cannot be continued because {reason} (continue_final_message)"
    return RequestError(message, param=param, code="invalid_messages")


def _cut_final_message(text: str, end: str) -> str:
    kept, sign, _ = text.rpartition(end)
    if not sign:
        message = "the model's chat template leaves out the final message, so it cannot be continued"
        raise RequestError(message, param="continue_final_message", code="chat_template_failed")
    return kept
