"""Tool calls: found however the text is cut, returned as text if invalid, forced by a grammar."""

import json
from collections.abc import Callable
from itertools import count, pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from saccade.errors import RequestError
from saccade.scheduling.matcher import GrammarCompiler
from saccade.server.text.tool_parser import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    HermesParser,
    LlamaParser,
    ToolEvent,
    ToolParser,
    new_tool_parser,
)
from saccade.server.text.tools import MAX_TOOLS, check_tools, tool_grammar, tool_style
from saccade.wire.grammar import Grammar, check_grammar

Calls = list[tuple[str, Any]]


def call(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {compact(arguments)}}}\n</tool_call>'


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def collect(events: list[ToolEvent]) -> tuple[str, Calls]:
    """The text, and the calls with parsed arguments. Checks the order of events, and that ids differ."""
    content, calls, ids, num_ended = "", list[tuple[str, str]](), set[str](), 0
    for event in events:
        match event:
            case Content(text):
                assert text
                content += text
            case CallBegin(index, id_, name):
                assert index == len(calls) == num_ended and id_ not in ids
                ids.add(id_)
                calls.append((name, ""))
            case CallArguments(index, text):
                assert text and index == len(calls) - 1 == num_ended
                calls[index] = (calls[index][0], calls[index][1] + text)
            case CallEnd(index):
                assert index == len(calls) - 1 == num_ended
                num_ended += 1
    assert num_ended == len(calls)
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


def parse(text: str, cuts: list[int] | None = None, parser: ToolParser | None = None) -> tuple[str, Calls]:
    parser = parser or HermesParser()
    places = sorted({0, len(text), *(cuts or [])})
    pieces = [text[a:b] for a, b in pairwise(places)]
    events = [event for piece in pieces for event in parser.push(piece)]
    return collect(events + parser.finish())


WEATHER = call("get_weather", {"city": "Zürich", "days": 3})
TEXTS: dict[str, tuple[str, str, Calls]] = {
    "plain": ("Hello, <b>you</b>.\n", "Hello, <b>you</b>.\n", []),
    "empty": ("", "", []),
    "blank": (" \n ", " \n ", []),
    "one": (WEATHER, "", [("get_weather", {"city": "Zürich", "days": 3})]),
    "with text": (f"Let me see.\n{WEATHER}\n", "Let me see.", [("get_weather", {"city": "Zürich", "days": 3})]),
    "two": (f"{call('a', {})}\n{call('b', {'x': [1]})}", "", [("a", {}), ("b", {"x": [1]})]),
    "text behind": (f"{call('a', {})}\nDone.", "\nDone.", [("a", {})]),
    "no blanks": ('<tool_call>{"name":"a","arguments":{}}</tool_call>', "", [("a", {})]),
    "no arguments": ('<tool_call>{"name":"a"}</tool_call>', "", [("a", {})]),
    "arguments as text": (
        '<tool_call>{"name":"a","arguments":"{\\"x\\": 1}"}</tool_call>',
        "",
        [("a", {"x": 1})],
    ),
    "never closed": ('x <tool_call>\n{"name": "a", "arguments": {}}', "x", [("a", {})]),
    "tags in strings": (
        call("a", {"x": "</tool_call><tool_call>\\", "y": '"'}),
        "",
        [("a", {"x": "</tool_call><tool_call>\\", "y": '"'})],
    ),
    "broken": ('a\n<tool_call>{"name": "a", </tool_call> b', 'a\n<tool_call>{"name": "a", </tool_call> b', []),
    "cut off": ('<tool_call>{"name": "a", "argu', '<tool_call>{"name": "a", "argu', []),
    "not an object": ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    "bad arguments": ('<tool_call>{"name":"a","arguments":[]}</tool_call>',) * 2 + ([],),
    "NaN": ('<tool_call>{"name":"a","arguments":{"x":NaN}}</tool_call>',) * 2 + ([],),
    "code": ('<tool_call>__import__("os").system("x")</tool_call>',) * 2 + ([],),
    "deep": ("<tool_call>" + "[" * 100_000 + "</tool_call>",) * 2 + ([],),
    "broken then good": (f"<tool_call>no</tool_call>{call('a', {})}", "<tool_call>no</tool_call>", [("a", {})]),
    "half a tag": ("1 < 2 <tool_ <tool_cal", "1 < 2 <tool_ <tool_cal", []),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_calls_and_text_are_the_same_however_the_text_is_cut(name: str) -> None:
    """Also in a stream, except for a call that turns out to be invalid after part of it was reported."""
    text, content, calls = TEXTS[name]
    random = Random(name)
    for is_streamed in (False, True) if name != "NaN" else (False,):
        cuts: list[list[int]] = [[]]
        if len(text) < 1000:
            cuts += [list(range(len(text)))] + [[random.randrange(len(text) + 1) for _ in range(6)] for _ in range(30)]
        for places in cuts:
            assert parse(text, places, HermesParser(is_streamed=is_streamed)) == (content, calls)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "{", '"', "name", "\\", " ", "\n", "<", "x", WEATHER])))
def test_nothing_is_lost_and_nothing_raises(pieces: list[str]) -> None:
    text = "".join(pieces)
    whole = HermesParser()
    content, calls = collect([event for piece in pieces for event in whole.push(piece)] + whole.finish())
    assert (content, calls) == parse(text)
    if not calls:
        assert content == text


def test_text_is_reported_at_once_unless_it_may_begin_a_call() -> None:
    parser = HermesParser()
    assert parser.push("Hello <b") == [Content("Hello <b")]
    assert parser.push("> <tool") == [Content(">")]
    assert parser.push("box>") == [Content(" <toolbox>")]
    assert parser.push(" \n<tool_call>\n") == []
    assert parser.push('{"name": "f", "arguments": {}}\n</tool_cal') == []
    assert parser.num_calls == 0
    assert [type(event) for event in parser.push("l>")] == [CallBegin, CallArguments, CallEnd]
    assert parser.num_calls == 1 and parser.finish() == []


def test_a_stream_reports_a_call_as_soon_as_its_arguments_begin() -> None:
    parser = HermesParser(is_streamed=True, new_id=lambda: "id")
    assert parser.push('Hm.\n<tool_call>\n{"name": "f", "arguments": ') == [Content("Hm.")]
    assert parser.push("{") == [CallBegin(0, "id", "f"), CallArguments(0, "{")] and parser.num_calls == 1
    assert parser.push('"a": "<') == [CallArguments(0, '"a": "<')]
    assert parser.push('/tool_call>}", ') == [CallArguments(0, '/tool_call>}", ')]
    assert parser.push('"b": [1]} ') == [CallArguments(0, '"b": [1]}'), CallEnd(0)]
    assert parser.push(', "more": "</tool_call>"}\n</tool_ca') == []
    assert parser.push('ll>\n<tool_call>{"name": "g", "parameters": {}}') == [
        CallBegin(1, "id", "g"), CallArguments(1, "{}"), CallEnd(1)]  # fmt: skip
    assert parser.push("</tool_call>") == [] and parser.finish() == []


def test_a_stream_reports_llama_calls_as_soon_as_their_arguments_begin() -> None:
    parser = LlamaParser(is_streamed=True, new_id=lambda: "id")
    assert parser.push(' {"name": "f", "parameters"') == [] and parser.push(": ") == []
    assert parser.push('{"a": ') == [CallBegin(0, "id", "f"), CallArguments(0, '{"a": ')]
    assert parser.push('"};"}') == [CallArguments(0, '"};"}'), CallEnd(0)]
    assert parser.push("} ") == [] and parser.push(";") == []
    assert parser.push('{"name": "g", "parameters": {}}') == [
        CallBegin(1, "id", "g"), CallArguments(1, "{}"), CallEnd(1)]  # fmt: skip
    assert parser.push(" and ") == [Content(" and ")] and parser.push("more") == [Content("more")]
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"x": NaN}}</tool_call> Hm', '{"x": NaN}'),
        ('{"x": }}</tool_call> Hm', '{"x": }'),
        ('{"x": [1</tool_call> Hm', '{"x": [1'),
        ('{"x"]}} oops</tool_call> Hm', '{"x"]'),
        ('{"x": "</tool_call> Hm', '{"x": "</tool_call> Hm'),
    ],
)
def test_a_broken_call_is_streamed_as_the_model_wrote_it(arguments: str, told: str) -> None:
    text = '<tool_call>{"name": "f", "arguments": ' + arguments
    for pieces in ([text], list(text)):
        parser = HermesParser(is_streamed=True, new_id=lambda: "id")
        events = [*(event for piece in pieces for event in parser.push(piece)), *parser.finish()]
        content = "".join(event.text for event in events if isinstance(event, Content))
        assert content == (" Hm" if told[-2:] != "Hm" else "")
        assert "".join(event.text for event in events if isinstance(event, CallArguments)) == told
        assert [type(event) for event in events].count(CallEnd) == 1
    assert parse(text) == (text, []), "a whole reply can still return it as text"


def test_ids_are_new_for_every_call() -> None:
    ids = count(1)
    parser = HermesParser(new_id=lambda: f"call_{next(ids)}")
    events = parser.push(call("a", {}) + call("b", {}))
    assert [event.id for event in events if isinstance(event, CallBegin)] == ["call_1", "call_2"]


@pytest.mark.parametrize("style", ["hermes", "llama3_json"])
def test_without_parallel_calls_only_the_first_is_reported(style: Any) -> None:
    texts = {
        "hermes": f"Hm. {call('a', {})} {call('b', {})} and so on",
        "llama3_json": '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}',
    }
    for is_streamed in (False, True):
        parser = new_tool_parser(style, is_parallel=False, is_streamed=is_streamed)
        content, calls = parse(texts[style], parser=parser)
        assert calls == [("a", {})] and content in ("Hm.", "")


@pytest.mark.parametrize(
    "text, content, calls",
    [
        ("Just text {a}", "Just text {a}", []),
        (' {"name": "f", "parameters": {"x": 1}}\n', "", [("f", {"x": 1})]),
        ('{"name": "f", "parameters": {}}; {"name": "g", "arguments": {"y": ";"}}', "", [("f", {}), ("g", {"y": ";"})]),
        ('{"name": "f", "parameters": {}} and more', '{"name": "f", "parameters": {}} and more', []),
        ('{"answer": 42}', '{"answer": 42}', []),
        ('{"name": "f", "param', '{"name": "f", "param', []),
        ('{"parameters": {"x": 1}, "name": "f"}', "", [("f", {"x": 1})]),
        ('{"name": "f", "parameters": {}};', "", [("f", {})]),
        ('{"name": "f", "parameters": {"x": "' + "y" * 3000 + '"}}', "", [("f", {"x": "y" * 3000})]),
        ('{"answer": "' + "y" * 3000 + '"}', '{"answer": "' + "y" * 3000 + '"}', []),
        ("", "", []),
    ],
)
def test_llama_calls_are_parsed(text: str, content: str, calls: Calls) -> None:
    for cuts in ([], list(range(len(text))), [1], [2, 3]):
        assert parse(text, cuts, LlamaParser()) == (content, calls)
        if not text.endswith("and more"):  # a stream has already reported the call
            assert parse(text, cuts, LlamaParser(is_streamed=True)) == (content, calls)


def test_the_template_decides_the_style() -> None:
    assert tool_style(None) == "hermes" and tool_style("{{ <tool_call> }}") == "hermes"
    assert tool_style('respond in the format {"name": function, "parameters": dictionary}') == "llama3_json"


TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"],
        "additionalProperties": False, "$defs": {"City": {"enum": ["Bern", 'A "B"', "Zürich"]}}}}},
    {"type": "function", "function": {"name": "stop.now-2", "description": "no parameters"}},
]  # fmt: skip


class Bytes:
    """A vocabulary of single bytes."""

    special_ids: frozenset[int] = frozenset({256})

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def encode_plain(self, text: str) -> list[int]:
        return list(text.encode())


@pytest.fixture(scope="module")
def accepts() -> Callable[[Grammar, str], bool]:
    """Whether a grammar accepts a text."""
    compiler = GrammarCompiler(Bytes(), 257, frozenset({256}))

    def check(grammar: Grammar, text: str) -> bool:
        check_grammar(grammar)
        matcher: LLMatcher = compiler.compile(grammar).result().deep_copy()
        ids = list(text.encode())
        return bool(matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting())

    return check


Accepts = Callable[[Grammar, str], bool]
BERN, STOP = call("get_weather", {"city": "Bern"}), call("stop.now-2", {})


def test_a_required_call_may_be_any_of_the_tools_and_is_parsed(accepts: Accepts) -> None:
    grammar = tool_grammar(TOOLS, "required")
    assert grammar is not None
    for text in (BERN, STOP, f"{BERN}\n{STOP}\n{BERN}", call("stop.now-2", {"any": 1})):
        assert accepts(grammar, text) and parse(text)[1] and not parse(text)[0]
    for text in ("", "hello", BERN + "!", call("other", {}), call("get_weather", {"city": "Rome"}), BERN[:-1]):
        assert not accepts(grammar, text)
    single = tool_grammar(TOOLS, "required", is_parallel=False)
    assert single is not None and accepts(single, BERN) and not accepts(single, f"{BERN}\n{STOP}")


@pytest.mark.parametrize("choice", [{"type": "function", "function": {"name": "get_weather"}}, {"name": "get_weather"}])
def test_a_named_tool_is_called_once(accepts: Accepts, choice: Any) -> None:
    grammar = tool_grammar(TOOLS, choice)
    assert grammar is not None
    assert accepts(grammar, BERN) and not accepts(grammar, STOP) and not accepts(grammar, f"{BERN}\n{BERN}")


def test_llama_calls_are_forced_in_its_own_form(accepts: Accepts) -> None:
    grammar = tool_grammar(TOOLS, "required", style="llama3_json")
    text = '{"name": "get_weather", "parameters": {"city":"Bern"}}; {"name": "stop.now-2", "parameters": {}}'
    assert grammar is not None and accepts(grammar, text)
    assert [name for name, _ in parse(text, parser=LlamaParser())[1]] == ["get_weather", "stop.now-2"]


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_a_free_choice_needs_no_grammar(choice: Any) -> None:
    assert tool_grammar(TOOLS, choice) is None


@pytest.mark.parametrize("choice", ["any", 3, {}, {"function": 3}, {"function": {"name": "nobody"}}, ["required"]])
def test_an_invalid_tool_choice_is_refused(choice: Any) -> None:
    with pytest.raises(RequestError) as caught:
        tool_grammar(TOOLS, choice)
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    "tools",
    [
        [],
        {},
        None,
        [1],
        [{"type": "retrieval"}],
        [{"type": "function"}],
        [{"type": "function", "function": {"name": ""}}],
        [{"type": "function", "function": {"name": 'a", "x'}}],
        [{"type": "function", "function": {"name": "a" * 129}}],
        [{"type": "function", "function": {"name": "a", "parameters": [1]}}],
        [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}],
        [TOOLS[0], TOOLS[0]],
        [{"type": "function", "function": {"name": f"f{i}"}} for i in range(MAX_TOOLS + 1)],
    ],
)
def test_bad_tools_are_refused(tools: Any) -> None:
    with pytest.raises(RequestError) as caught:
        check_tools(tools)
    assert str(caught.value.param).startswith("tools")
    with pytest.raises(RequestError):
        tool_grammar(tools, "required")


def test_many_tools_of_ordinary_size_pass() -> None:
    field = {"anyOf": [{"type": "string", "description": "x" * 200}, {"type": "null"}]}
    parameters = {"type": "object", "properties": {f"field_{i}": field for i in range(8)}}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": parameters}} for i in range(60)]
    grammar = tool_grammar(tools, "required")
    assert grammar is not None
    check_grammar(grammar)


@pytest.mark.parametrize("schema", [{"type": "integer", "multipleOf": 1_000_003}, {"const": float("nan")}, {"type": 3}])
def test_tool_schemas_are_limited_like_other_schemas(schema: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}]
    with pytest.raises(RequestError):
        grammar = tool_grammar(tools, "required")
        assert grammar is not None
        check_grammar(grammar)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("end", range(1, 70))
def test_a_hermes_call_may_be_cut_off_anywhere(end: int, is_streamed: bool) -> None:
    """Once its arguments have begun, it is reported with those so far; before that it is text."""
    whole = '<tool_call>\n{"name": "f", "arguments": {"a": [1, {"b": 2}]}}\n</tool_call>'
    begin = whole.index('{"a"')
    parser = HermesParser(new_id=lambda: "id", is_streamed=is_streamed)
    events = [*parser.push(whole[:end]), *parser.finish(is_cut=True)]
    if end <= begin:
        assert events == [Content(whole[:end])]
        return
    arguments = whole[begin:end][: len('{"a": [1, {"b": 2}]}')]
    assert events == [CallBegin(0, "id", "f"), CallArguments(0, arguments), CallEnd(0)]


def test_agents_with_many_servers_behind_them_may_offer_a_thousand_tools() -> None:
    def tools(count: int, num_properties: int) -> list[Any]:
        properties = {f"property_{j}": {"type": "string"} for j in range(num_properties)}
        schema = {"type": "object", "properties": properties}
        return [{"type": "function", "function": {"name": f"tool_{i}", "parameters": schema}} for i in range(count)]

    check_tools(tools(MAX_TOOLS, 16))
    few, many = tool_grammar(tools(256, 2), "required"), tool_grammar(tools(MAX_TOOLS, 16), "required")
    assert few is not None and many is not None
    check_grammar(few)
    with pytest.raises(RequestError, match="the limit is"):
        check_grammar(many)


def test_a_call_of_a_tool_with_the_longest_name_is_streamed_and_may_be_cut_off() -> None:
    name, text = "n" * 128, '<tool_call>\n{"name": "NAME", "arguments": {"a": [1'
    check_tools([{"type": "function", "function": {"name": name}}])
    for is_streamed in (False, True):
        parser = HermesParser(new_id=lambda: "id", is_streamed=is_streamed)
        begun = parser.push(text.replace("NAME", name))
        assert bool(begun) == is_streamed
        assert [*begun, *parser.finish(is_cut=True)][:1] == [CallBegin(0, "id", name)]


def test_the_last_llama_call_may_be_cut_off() -> None:
    first, second = '{"name": "f", "parameters": {"a": 1}}', '{"name": "g", "parameters": {"b; c": [2'
    for is_streamed in (False, True):
        parser = LlamaParser(new_id=lambda: "id", is_streamed=is_streamed)
        events = [*parser.push(f"{first}; {second}"), *parser.finish(is_cut=True)]
        names = [event.name for event in events if isinstance(event, CallBegin)]
        assert names == ["f", "g"] and events[-2:] == [CallArguments(1, '{"b; c": [2'), CallEnd(1)]
    parser = LlamaParser()
    parser.push(f"{first}; {second}")
    assert parser.finish() == [Content(f"{first}; {second}")]
