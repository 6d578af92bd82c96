"""Prompts that ask whether a document matches a query, and scores from the model's answer. As Qwen3-Reranker and
Qwen3-VL-Reranker were trained, a score compares the logits of "yes" and "no" after the prompt."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from saccade.errors import RequestError
from saccade.inputs.text.tokenizer import Tokenizer

Content = str | list[Any]  # text, or parts as in a message

JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
TEXT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
MEDIA_INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."
RANKING_ROLES = frozenset({"system", "query", "document"})
NO_THINKING = {"enable_thinking": False}
ANSWERS = ("yes", "no")
# For checkpoints without a template: writes what the model's own template would write.
PUBLISHED_TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
<|im_start|>assistant
{{ "<think>\\n\\n</think>\\n\\n" }}"""
_HAS_ROLE = {role: re.compile(rf"""role\b[^%}}]{{0,40}}["']{role}["']""") for role in ("query", "document")}
_PART = re.compile(r"messages\[(\d+)\]\.content\[(\d+)\]")
_MEDIA_KEYS = {"video": "video_url", "video_url": "video_url", "image": "image_url", "image_url": "image_url"}


def has_ranking_roles(template: str) -> bool:
    """Whether a chat template knows the roles query and document, as vLLM's reranker templates do."""
    return all(pattern.search(template) for pattern in _HAS_ROLE.values())


def rank_messages(
    query: Content, document: Content, instruction: str | None, *, has_roles: bool, has_vision: bool
) -> list[dict[str, Any]]:
    """The conversation that a model judges. Vision models get everything in parts, as they were trained. Text models
    get media in parts, too, and refuse them."""
    if has_roles:
        system = [{"role": "system", "content": instruction}] if instruction is not None else []
        return [*system, {"role": "query", "content": query}, {"role": "document", "content": document}]
    if has_vision or not (_is_text(query) and _is_text(document)):
        content: Content = [
            _text(f"<Instruct>: {instruction if instruction is not None else MEDIA_INSTRUCTION}"),
            *(_text("<Query>:"), *_parts(query)),
            *(_text("\n<Document>:"), *_parts(document)),
        ]
    else:
        task = instruction if instruction is not None else TEXT_INSTRUCTION
        content = f"<Instruct>: {task}\n<Query>: {plain_text(query)}\n<Document>: {plain_text(document)}"
    return [{"role": "system", "content": JUDGE}, {"role": "user", "content": content}]


@contextmanager
def naming_sides(messages: Sequence[dict[str, Any]], query: Content) -> Iterator[None]:
    """Errors about a part of the messages name the query or the document that it came from."""
    try:
        yield
    except RequestError as error:
        if found := _PART.match(error.param or ""):
            part = messages[int(found[1])]["content"][int(found[2])]
            error.param = "query" if any(part is one for one in query) else "document"
        raise


def read_content(value: Any, param: str) -> Content:
    """Checks a query or document: text, parts, or an object with `text`, `image`, `video`, or parts as `content`."""
    if isinstance(value, dict) and "content" in value:
        value, param = value["content"], f"{param}.content"
    elif isinstance(value, dict):
        media = [_medium(key, value[key]) for key in _MEDIA_KEYS if value.get(key) is not None]
        value = [*media, *([_text(value["text"])] if value.get("text") is not None else [])]
    if isinstance(value, str) or (isinstance(value, list) and value and all(isinstance(part, dict) for part in value)):
        return value
    message = f"{param} must be text, or an object with text, image, video or content (a list of parts)"
    raise RequestError(message, param=param, code="invalid_value")


def plain_text(content: Content) -> str:
    """The text of a query or document, without its media."""
    if isinstance(content, str):
        return content
    texts = [part.get("text") for part in content]
    return "\n".join(text for text in texts if isinstance(text, str))


def find_answers(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The token ids of "yes" and "no"."""
    found = [tokenizer.encode_plain(word) for word in ANSWERS]
    for word, ids in zip(ANSWERS, found, strict=True):
        if len(ids) != 1:
            message = f'this model cannot rank documents: its vocabulary has no single token for "{word}"'
            raise RequestError(message, code="unsupported")
    return tuple(ids[0] for ids in found)


def score_of(logits: Iterable[float]) -> float:
    """The probability of "yes" if "yes" and "no" are the only answers."""
    yes, no = map(float, logits)
    odds = math.exp(-abs(yes - no))
    return (1.0 if yes >= no else odds) / (1.0 + odds)


def _is_text(content: Content) -> bool:
    return isinstance(content, str) or all(part.get("type") == "text" or set(part) == {"text"} for part in content)


def _parts(content: Content) -> list[Any]:
    return [_text(content)] if isinstance(content, str) else content


def _text(text: Any) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _medium(key: str, source: Any) -> dict[str, Any]:
    kind = _MEDIA_KEYS[key]
    return {"type": kind, kind: {"url": source} if isinstance(source, str) else source}
