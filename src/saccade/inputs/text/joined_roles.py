"""Conversations for templates that take one system message, at the beginning, and then insist on alternating roles."""

from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]
_GAP = "\n\n"


def with_joined_roles(messages: Sequence[Message]) -> list[Message]:
    """The same texts and media in the same order: a later system message becomes the user's, and neighbours of one role
    become one message. Results of tools stay apart, and so do messages that would lose a field."""
    joined: list[Message] = []
    for message in messages:
        if message["role"] == "system" and any(one["role"] != "system" for one in joined):
            message = message | {"role": "user"}
        if joined and _fit(joined[-1], message):
            content = _both(joined[-1]["content"], message["content"])
            joined[-1] = joined[-1] | message | {"content": content}
        else:
            joined.append(message)
    return joined


def _fit(first: Message, second: Message) -> bool:
    is_same = first["role"] == second["role"] != "tool"
    return is_same and "tool_calls" not in first and first.keys() & second.keys() == {"role", "content"}


def _both(first: str | list[Message], second: str | list[Message]) -> str | list[Message]:
    """Templates print parts without anything between them, so texts that meet become one part."""
    if isinstance(first, str) and isinstance(second, str):
        return _GAP.join(text for text in (first, second) if text)
    before, after = _parts(first), _parts(second)
    if not before or not after or not before[-1]["type"] == after[0]["type"] == "text":
        return [*before, *after]
    middle = {"type": "text", "text": before[-1]["text"] + _GAP + after[0]["text"]}
    return [*before[:-1], middle, *after[1:]]


def _parts(content: str | list[Message]) -> list[Message]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []
