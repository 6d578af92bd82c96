"""Inputs of `LLM.embed`, `LLM.score` and `LLM.rerank`, and their results, which are shaped like vLLM's."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from saccade.errors import RequestError
from saccade.inputs.placeholders import Prompt
from saccade.inputs.processor import Processor
from saccade.inputs.text.rank_prompts import Content, read_content
from saccade.offline.llm_inputs import list_conversations, list_prompts, read_prompt, with_files
from saccade.offline.prompt_reader import PromptReader

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    embedding: list[float]


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(Generic[T]):
    request_id: str
    prompt_token_ids: list[int]
    outputs: T


@dataclass(frozen=True, slots=True)
class RankedDocument:
    index: int
    relevance_score: float


def read_embedded(prompts: Any, processor: Processor, **template: Any) -> PromptReader[Any]:
    """Reads prompts like `generate`, or conversations. Texts end as the checkpoint's tokenizer ends them."""
    if _is_talk(prompts) or (_is_list(prompts) and len(prompts) > 0 and all(map(_is_talk, prompts))):
        options = {"add_generation_prompt": False} | template
        return PromptReader(list_conversations(prompts), lambda talk: processor.chat(talk, **options))
    return PromptReader(list_prompts(prompts), lambda prompt: _ended(prompt, read_prompt(prompt, processor), processor))


def read_pairs(first: Any, second: Any) -> list[tuple[Content, Content]]:
    """Pairs one text with each of several, or equally many texts one by one."""
    firsts, seconds = _contents(first, "text_1"), _contents(second, "text_2")
    if len(firsts) not in (1, len(seconds)):
        message = f"text_1 has {len(firsts)} texts and text_2 has {len(seconds)}; give one text_1, or as many as text_2"
        raise RequestError(message, param="text_1")
    return list(zip(firsts * len(seconds) if len(firsts) == 1 else firsts, seconds, strict=True))


def check_ranking(query: Any, top_n: int | None) -> None:
    if not _is_one(query):
        raise RequestError("query must be one text or object", param="query")
    if top_n is not None and top_n < 1:
        raise RequestError(f"top_n is {top_n}; it must be at least 1", param="top_n")


def _contents(items: Any, param: str) -> list[Content]:
    found = [read_content(item, param) for item in ([items] if _is_one(items) else items)]
    return [_with_files(content) for content in found]


def _is_one(items: Any) -> bool:
    return isinstance(items, str | bytes | Mapping) or not isinstance(items, Iterable)


def _with_files(content: Content) -> Content:
    if isinstance(content, str):
        return content
    read: Content = with_files([{"role": "user", "content": content}])[0]["content"]
    return read


def _ended(given: Any, prompt: Prompt, processor: Processor) -> Prompt:
    is_text = isinstance(given, str) or (isinstance(given, Mapping) and "prompt_token_ids" not in given)
    return processor.ended(prompt) if is_text else prompt


def _is_talk(value: Any) -> bool:
    return _is_list(value) and len(value) > 0 and all(isinstance(m, Mapping) and "role" in m for m in value)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
