"""Reasoning is split from the answer, however the text is cut and whoever opened the block."""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from random import Random
from typing import Any

import orjson
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from saccade.errors import ConfigError, RequestError
from saccade.inputs.processor import Processor
from saccade.server.server_settings import ServerSettings
from saccade.server.text.reasoning import ReasoningParser, after_reasoning, ends_in_reasoning
from saccade.server.text.tools import tool_grammar
from saccade.wire.grammar import Grammar, check_grammar, parser_limits, to_llguidance
from tests.inputs.folders import write_qwen
from tests.server.fake import Caller, FakeEngine, Script, service_for

CHAT = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
Serve = Callable[..., tuple[Caller, FakeEngine]]


@pytest.fixture
def serve(thinker: Processor, processor: Processor) -> Serve:
    def make(script: Script, *, opens: bool = True, **settings: Any) -> tuple[Caller, FakeEngine]:
        engine = FakeEngine(thinker if opens else processor, script)
        return Caller(service_for(engine, **{"reasoning_parser": "qwen3", **settings})), engine

    return make


def saying(*texts: str, step: int = 3, finish: str = "stop") -> Script:
    """Output i says text i, a few characters at a time; the outputs take turns."""

    async def script(prompt: Any, params: Any) -> AsyncGenerator[dict[str, Any], None]:
        for at in range(0, max(map(len, texts)), step):
            for index, text in enumerate(texts):
                if at < len(text):
                    end = finish if at + step >= len(text) else None
                    yield {"index": index, "text": text[at : at + step], "token_ids": (5,), "finish_reason": end}

    return script


def message(caller: Caller, **fields: Any) -> dict[str, Any]:
    reply = asyncio.run(caller.post(CHAT, {"messages": HELLO, **fields}))
    assert reply.status == 200, reply.body
    found: dict[str, Any] = reply.json["choices"][0]["message"]
    return found


def streamed(caller: Caller, **fields: Any) -> list[dict[str, Any]]:
    reply = asyncio.run(caller.post(CHAT, {"messages": HELLO, "stream": True, **fields}))
    return [event["choices"][0] for event in reply.events[:-1]]


def whole(text: str, *, is_open: bool) -> tuple[str, str]:
    """What a parser returns that sees the whole text at once."""
    if match := re.match(r"\s*<think>", text):
        text = text[match.end() :]
    elif not is_open:
        return "", text
    thought, tag, answer = text.partition("</think>")
    return (thought.strip("\n") if tag else thought.lstrip("\n")), answer.lstrip("\n")


PIECES = ["<think>", "</think>", "\n", "\n\n", "<", "</", "<th", "ink>", "</think", ">", " ", "a", "word ", "é", "<b>"]


@pytest.mark.parametrize("is_open", [True, False])
def test_cuts_make_no_difference(is_open: bool) -> None:
    random = Random(5)
    for _ in range(4000):
        text = "".join(random.choices(PIECES, k=random.randint(0, 9)))
        parser, found = ReasoningParser(is_open=is_open), [("", "")]
        at = 0
        while at < len(text):
            size = random.randint(1, 6)
            found.append(parser.push(text[at : at + size]))
            at += size
        found.append(parser.finish())
        got = "".join(thought for thought, _ in found), "".join(answer for _, answer in found)
        assert got == whole(text, is_open=is_open), repr(text)


def test_reasoning_is_returned_as_it_arrives() -> None:
    parser = ReasoningParser(is_open=True)
    assert parser.push("\nfirst ") == ("first ", "") and parser.push("2 < 3\n") == ("2 < 3", "")
    assert parser.push("so</th") == ("\nso", "") and parser.push("ink>\n") == ("", "")
    assert parser.push("\nyes") == ("", "yes") and parser.push("</think>") == ("", "</think>")


@pytest.mark.parametrize("opens", [True, False])
def test_reasoning_and_answer_have_separate_fields(serve: Serve, opens: bool) -> None:
    text = ("" if opens else "<think>\n") + "let me see\n</think>\n\nforty-two"
    caller, _ = serve(saying(text), opens=opens)
    found = message(caller)
    assert found["reasoning_content"] == found["reasoning"] == "let me see" and found["content"] == "forty-two"
    parts = streamed(caller)
    assert parts[0]["delta"]["role"] == "assistant" and parts[-1]["finish_reason"] == "stop"
    for name, expected in (("reasoning_content", "let me see"), ("reasoning", "let me see"), ("content", "forty-two")):
        assert "".join(part["delta"].get(name) or "" for part in parts) == expected
    kinds = [next(iter(part["delta"])) for part in parts[1:-1]]
    assert kinds == sorted(kinds, reverse=True), "no reasoning after the answer"


def test_without_a_closing_tag_everything_is_reasoning(serve: Serve) -> None:
    caller, _ = serve(saying("let me see </thi", finish="length"))
    found = message(caller)
    assert found["reasoning_content"] == "let me see </thi" and found["content"] is None
    assert "".join(part["delta"].get("content") or "" for part in streamed(caller)) == ""


def test_an_answer_without_reasoning_is_content(serve: Serve) -> None:
    caller, _ = serve(saying("plain <think>text</think>"), opens=False)
    found = message(caller)
    assert found["content"] == "plain <think>text</think>" and found["reasoning_content"] is None


def test_if_the_template_closes_the_block_everything_is_answer(serve: Serve) -> None:
    """The prompt decides, whatever the template calls its switch."""
    caller, _ = serve(saying("forty-two"))
    found = message(caller, chat_template_kwargs={"enable_thinking": False})
    assert found["content"] == "forty-two" and found["reasoning_content"] is None
    assert message(caller)["content"] is None, "the same words in an open block are reasoning"


def test_reasoning_effort_none_switches_thinking_off(serve: Serve) -> None:
    caller, _ = serve(saying("forty-two"), strict=True)
    found = asyncio.run(caller.post(CHAT, {"messages": HELLO, "reasoning_effort": "none"}))
    assert found.json["choices"][0]["message"]["content"] == "forty-two"
    assert found.headers["x-ignored-fields"] == ""
    assert message(caller, reasoning_effort="low")["reasoning_content"] == "forty-two"
    asked = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    assert message(caller, **asked)["reasoning_content"] == "forty-two", "the template's own variable comes first"


def test_a_tag_in_a_users_text_opens_no_block(serve: Serve) -> None:
    caller, _ = serve(saying("forty-two"), opens=False)
    for text in ("<think>", "what is <think>\n"):
        assert message(caller, messages=[{"role": "user", "content": text}])["content"] == "forty-two"


def test_a_continued_message_may_be_inside_a_block(serve: Serve, processor: Processor) -> None:
    caller, _ = serve(saying("so</think>yes"), opens=False)
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    inside = [*HELLO, {"role": "assistant", "content": "<think>\nwell, " + "hm " * 50}]
    found = message(caller, messages=inside, **continued)
    assert (found["reasoning_content"], found["content"]) == ("so", "yes")
    behind = [{"role": "user", "content": "<think>"}, {"role": "assistant", "content": "<think>a</think>b"}]
    assert message(caller, messages=behind, **continued)["content"] == "so</think>yes"
    assert not ends_in_reasoning([], processor.tokenizer, is_continued=True)


def test_calls_are_found_after_reasoning_and_not_inside_it(serve: Serve) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    caller, _ = serve(saying(f"I could say {call}, or\n</think>\n\nSure.\n{call}", step=5))
    found = message(caller, tools=TOOLS)
    assert found["reasoning_content"] == f"I could say {call}, or" and found["content"] == "Sure."
    assert [call["function"]["name"] for call in found["tool_calls"]] == ["add"]
    parts = streamed(caller, tools=TOOLS)
    assert parts[-1]["finish_reason"] == "tool_calls"
    assert "".join(part["delta"].get("reasoning_content") or "" for part in parts) == found["reasoning_content"]
    names = [call["function"].get("name") for part in parts for call in part["delta"].get("tool_calls", ())]
    assert names[0] == "add" and len(names) > 2 and not any(names[1:])


def test_every_output_has_its_own_reasoning(serve: Serve) -> None:
    texts = ["a</think>b", "longer thought</think>longer answer", "never ends"]
    caller, _ = serve(saying(*texts))
    reply = asyncio.run(caller.post(CHAT, {"messages": HELLO, "n": 3})).json
    found = [(c["message"]["reasoning_content"], c["message"]["content"]) for c in reply["choices"]]
    assert found == [("a", "b"), ("longer thought", "longer answer"), ("never ends", None)]
    parts = streamed(caller, n=3)
    for index, (thought, answer) in enumerate(found):
        mine = [part["delta"] for part in parts if part["index"] == index]
        assert "".join(delta.get("reasoning_content") or "" for delta in mine) == thought
        assert "".join(delta.get("content") or "" for delta in mine) == (answer or "")


def test_reasoning_can_be_left_out(serve: Serve) -> None:
    caller, _ = serve(saying("secret</think>answer"))
    found = message(caller, include_reasoning=False)
    assert found["content"] == "answer" and "reasoning" not in found and "reasoning_content" not in found
    parts = streamed(caller, include_reasoning=False)
    assert "".join(part["delta"].get("content") or "" for part in parts) == "answer"
    assert not any("secret"[:3] in orjson.dumps(part).decode() for part in parts)


def test_the_parser_is_off_unless_asked_for(serve: Serve) -> None:
    caller, _ = serve(saying("a</think>b"), reasoning_parser="")
    found = message(caller, include_reasoning=False)
    assert found["content"] == "a</think>b" and "reasoning_content" not in found
    with pytest.raises(ConfigError, match="reasoning_parser is r1; allowed are"):
        ServerSettings(reasoning_parser="r1")


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
OPEN = {
    name: value for name, value in SCHEMA.items() if name != "additionalProperties"
}  # other properties are refused all the same
WISHES: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}}, '{"b":[1]}', "[1]"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, '{"a":1}', '{"a":"x"}'),
    ({"guided_json": OPEN, "disable_any_whitespace": False}, '{"a": 1}', '{"a": 1, "b": 2}'),
    ({"guided_choice": ['a"/\\', "b\n"]}, 'a"/\\', "c"),
    ({"regex": "[0-9]/\\/\\d\n(x|y)"}, "1//2\ny", "12"),
    ({"tools": TOOLS, "tool_choice": "required"},
     '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>', "<tool_call>x"),
]  # fmt: skip


class _Bytes:
    """A vocabulary of bytes, with the closing tag as a single token."""

    tokens = (*(bytes([i]) for i in range(256)), b"</think>", b"<end>")
    special_token_ids = (257,)
    eos_token_id, bos_token_id = 257, None

    def __call__(self, text: Any) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def follows(grammar: Grammar, *parts: str) -> bool:
    """Whether a text matches to its end; "</think>" alone is one token."""
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=258, eos_token=[257])
    matcher = LLMatcher(tokenizer, to_llguidance(grammar), log_level=0, limits=parser_limits())
    assert not matcher.is_error(), matcher.get_error()
    ids = [token for part in parts for token in ([256] if part == "</think>" else list(part.encode()))]
    return all(matcher.consume_token(token) for token in ids) and bool(matcher.is_accepting())


@pytest.mark.parametrize(("wish", "right", "wrong"), WISHES, ids=lambda value: next(iter(value), "")[:12])
def test_structure_applies_after_the_reasoning(serve: Serve, wish: Any, right: str, wrong: str) -> None:
    caller, engine = serve(saying(f'{{"I": \n think\n</think>\n\n{right}'))
    found = message(caller, **wish)
    assert found["reasoning_content"] == '{"I": \n think'
    assert found["tool_calls"] if "tools" in wish else found["content"] == right
    grammar = engine.seen[-1][1].grammar
    assert grammar is not None
    check_grammar(grammar)
    assert follows(grammar, 'so {"a": <think>\n', "</think>", "\n\n", right) and follows(grammar, f"</think>{right}")
    assert not follows(grammar, "so ", "</think>", "\n\n", wrong) and not follows(grammar, right)


@pytest.mark.parametrize(("wish", "right", "wrong"), WISHES, ids=lambda value: next(iter(value), "")[:12])
def test_structure_alone_leaves_no_room_for_reasoning(serve: Serve, wish: Any, right: str, wrong: str) -> None:
    """If the model has to open the block itself, the grammar applies from the first token."""
    caller, engine = serve(saying(right), opens=False)
    found = message(caller, **wish)
    assert found["tool_calls"] if "tools" in wish else found["content"] == right
    grammar = engine.seen[-1][1].grammar
    assert grammar is not None and follows(grammar, right) and not follows(grammar, wrong)


def test_a_custom_grammar_is_refused_in_an_open_block(serve: Serve) -> None:
    caller, engine = serve(saying("x"))
    fields = {"messages": HELLO, "structured_outputs": {"grammar": 'start: call\ncall: "x"'}}
    reply = asyncio.run(caller.post(CHAT, fields))
    assert reply.status == 400 and reply.json["error"]["param"] == "structured_outputs.grammar" and not engine.seen
    closed = {**fields, "chat_template_kwargs": {"enable_thinking": False}}
    assert asyncio.run(caller.post(CHAT, closed)).json["choices"][0]["message"]["content"] == "x"


def test_forced_calls_of_every_style_can_follow_reasoning() -> None:
    for style in ("hermes", "llama3_json"):
        for choice in ("required", {"type": "function", "function": {"name": "add"}}):
            grammar = tool_grammar(TOOLS, choice, style=style)
            assert grammar is not None
            check_grammar(after_reasoning(grammar, is_calls=True))
    with pytest.raises(RequestError):
        after_reasoning(Grammar("lark", 'start: "x"'))


def test_the_qwen3_template_closes_the_block_on_demand(tmp_path: Path) -> None:
    folder = write_qwen(tmp_path)
    data = Path(__file__).parent.parent / "data"
    (folder / "chat_template.jinja").write_text((data / "inputs_qwen3.jinja").read_text())
    made = Processor.from_folder(folder)
    for variables in (None, {"enable_thinking": False}, {"enable_thinking": True}):
        prompt = made.chat(HELLO, variables=variables)
        assert not ends_in_reasoning(prompt.token_ids.tolist(), made.tokenizer, is_continued=False)
