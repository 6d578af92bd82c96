"""Reasoning in a model's text: what Qwen writes between <think> and </think> before the answer. Some chat templates
open the block in the prompt, some leave that to the model, some close it at once when thinking is off. We look at the
prompt itself, not at the request's switches, which differ between templates."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from saccade.errors import RequestError
from saccade.inputs.text.markers import split_undecided
from saccade.inputs.text.tokenizer import Tokenizer
from saccade.wire.grammar import Grammar, json_rule

OPEN, CLOSE = "<think>", "</think>"
TAIL_TOKENS = 32  # enough for an opening tag and the white space after it
_PLACES = Literal["start", "reasoning", "gap", "answer"]


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


class ReasoningParser:
    """Splits one output into reasoning and answer, no matter how the text is cut into pieces. Only a block at the
    beginning counts. With `is_open` the prompt opened it, and another opening tag is dropped. Without a closing tag
    everything is reasoning. Line breaks next to the tags belong to the format."""

    def __init__(self, *, is_open: bool) -> None:
        self._is_open = is_open
        self._place: _PLACES = "start"
        self._has_begun = False
        self._held = ""  # may be a tag, or a line break next to one

    def push(self, text: str) -> tuple[str, str]:
        """Returns the reasoning and the answer that a piece adds."""
        if self._place == "answer":
            return "", text
        self._held += text
        if self._place == "start" and not self._begin():
            return "", ""
        reasoning = self._reason() if self._place == "reasoning" else ""
        return reasoning, self._answer()

    def finish(self) -> tuple[str, str]:
        held, self._held = self._held, ""
        is_reasoning = self._place == "reasoning" or (self._place == "start" and self._is_open)
        if not self._has_begun and is_reasoning:
            held = held.lstrip("\n")
        return (held, "") if is_reasoning else ("", held)

    def _begin(self) -> bool:
        """Decides what the text begins with; False if that takes more of it."""
        begin = self._held.lstrip()
        if begin.startswith(OPEN):
            self._held, self._place = begin.removeprefix(OPEN), "reasoning"
        elif OPEN.startswith(begin):
            return False
        else:
            self._place = "reasoning" if self._is_open else "answer"
        return True

    def _reason(self) -> str:
        reasoning, tag, behind = self._held.partition(CLOSE)
        if tag:
            self._held, self._place = behind, "gap"
            reasoning = reasoning.rstrip("\n")
        else:
            reasoning, self._held = split_undecided(reasoning, [CLOSE], "\n")
        if not self._has_begun:
            reasoning = reasoning.lstrip("\n")
            self._has_begun = bool(reasoning)
        return reasoning

    def _answer(self) -> str:
        if self._place == "gap":
            self._held = self._held.lstrip("\n")
            self._place = "answer" if self._held else "gap"
        if self._place != "answer":
            return ""
        answer, self._held = self._held, ""
        return answer


def ends_in_reasoning(token_ids: Sequence[int], tokenizer: Tokenizer, *, is_continued: bool) -> bool:
    """Whether a prompt leaves a reasoning block open. A continued answer may be far inside one, so it is searched from
    the last special token on, which excludes what users wrote."""
    if not is_continued:
        tail = tokenizer.decode(list(token_ids[-TAIL_TOKENS:]), skip_special_tokens=False)
        return tail.rstrip().endswith(OPEN)
    last = max((i for i, token in enumerate(token_ids) if token in tokenizer.special_ids), default=-1)
    text = tokenizer.decode(list(token_ids[last + 1 :]), skip_special_tokens=False)
    return text.rfind(OPEN) > text.rfind(CLOSE)


def after_reasoning(grammar: Grammar, *, is_calls: bool = False) -> Grammar:
    """A grammar of any text up to the end of a reasoning block, then `grammar`, which with `is_calls` forces calls."""
    lines = ["start: thought answer", f'thought[suffix="{CLOSE}"]: /(?s:.*)/']
    return Grammar("lark", "\n".join([*lines, *_answer_lines(grammar, is_calls=is_calls)]))


def _answer_lines(grammar: Grammar, *, is_calls: bool) -> list[str]:
    gap = r"answer: /\n*/ "
    match grammar.kind:
        case "json_object":
            return [gap + json_rule({"type": "object"}, has_whitespace=grammar.has_whitespace)]
        case "json_schema":
            return [gap + json_rule(json.loads(grammar.text), has_whitespace=grammar.has_whitespace)]
        case "choice":
            return [gap + "(" + " | ".join(json.dumps(c, ensure_ascii=False) for c in json.loads(grammar.text)) + ")"]
        case "regex":
            return [gap + "/" + re.sub(r"\\.|/|\n", _escaped, grammar.text, flags=re.DOTALL) + "/"]
        case "lark" if is_calls:
            return [gap + "calls", "calls: " + grammar.text.removeprefix("start: ")]
    raise RequestError(
        "a custom grammar cannot follow reasoning; "
        "use json or regex, or turn thinking off if the model allows it (chat_template_kwargs)",
        param="structured_outputs.grammar",
        code="unsupported_parameter",
    )


def _escaped(match: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(match.group(), match.group())
