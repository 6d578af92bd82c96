"""Templates render as in transformers, which uses Jinja."""

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from saccade.errors import RequestError
from saccade.inputs.text.chat_template import ChatTemplate
from saccade.inputs.text.special_tokens import GuardedTokens

NUMBERS = {"whole": 2.0, "zero": 0.0, "tiny": 1e-07, "large": 1e22, "half": 2.5, "below": -0.0, "count": 3, "no": None}
SCHEMA = {"type": "object", "properties": {"n": {"type": ["number", "null"], "minimum": 1.0}}}
CALL = {"type": "function", "function": {"name": "f", "arguments": NUMBERS | {"list": [1.0, {"a": 1e-9}]}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "user", "content": "bye"},
]
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"parameters": {}}},
]
ARGUMENTS = "{% for key, value in messages[1].tool_calls[0].function.arguments.items() %}"
TRAINING = "{% for m in messages %}\n  {% generation %}\n  {{ m.content }}\n  {% endgeneration %}\n{% endfor %}\n"


def assert_same(source: str, **given: Any) -> str:
    (expected,), _ = render_jinja_template([MESSAGES], chat_template=source, **given)
    found = ChatTemplate(source).render(MESSAGES, add_generation_prompt=False, **given).text
    assert found == expected
    return found


@pytest.mark.parametrize(
    "source",
    [
        TRAINING,
        TRAINING.replace("{%", "{%-"),
        TRAINING.replace("%}", "-%}"),
        TRAINING.replace("{%", "{%+"),
        TRAINING.replace("% generation %", "%generation%"),
        "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}",
    ],
)
def test_tags_for_training_leave_no_blanks(source: str) -> None:
    """Checkpoints trained with TRL have them; the tags take line breaks and blanks with them."""
    assert assert_same(source)


@pytest.mark.parametrize("source", ["a\r\nb\rc\n", "{% if messages %}\r\na\r\n{% endif %}\r\nb", "{{ 'a\r\nb' }}"])
def test_line_ends_of_windows_become_usual_ones(source: str) -> None:
    assert "\r" not in assert_same(source)


@pytest.mark.parametrize("source", ["a{% raw %}\nb{% endraw %}\nc", " {%- raw %}\n{{ a }}\n{% endraw %}b"])
def test_the_line_break_behind_raw_is_kept(source: str) -> None:
    assert "\n" in assert_same(source)


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize(
    "source",
    [
        "{% if tools is iterable and tools | length > 0 %}{{ tools | length }} tools{% endif %}|",  # Qwen3-Coder
        "{{ tools is iterable }}{{ tools is sequence }}{{ tools is mapping }}{{ documents is defined }}",
        "{% for t in tools or [] %}{% for name, _ in t.function.parameters.properties | items %}{{ name }}"
        "{% endfor %}{% endfor %}|",
    ],
)
def test_tools_may_be_missing(source: str, tools: Any) -> None:
    assert_same(source, tools=tools)


def test_undefined_values_are_empty() -> None:
    assert assert_same("{{ messages[0].tool_calls | length }}{{ messages[0].nothing | items | list | count }}") == "00"


@pytest.mark.parametrize("value", ["messages", "messages[0]", "messages[0].role", "3", "true", "none", "[]", "{}"])
def test_kinds_of_values_are_told_apart(value: str) -> None:
    tests = ("iterable", "sequence", "mapping", "string", "number", "none", "boolean")
    assert_same("".join(f"{{{{ {value} is {test} }}}} " for test in tests))


@pytest.mark.parametrize(
    "shown",
    [
        *("value", "value | tojson", "value | string", "'' ~ value", "[value]", "value is number", "value is float"),
        "'yes' if value else 'no'",
    ],
)
def test_arguments_of_calls_are_printed_as_in_python(shown: str) -> None:
    """A history with other numbers than the model wrote would not be what it was trained on."""
    assert "no=" in assert_same(ARGUMENTS + "{{ key }}={{ " + shown + " }};{% endfor %}")


def test_arguments_of_calls_are_text_for_templates_that_join_them() -> None:
    """Such as DeepSeek-R1's."""
    source = "{% for m in messages %}{% for call in m.tool_calls or [] %}"
    source += "{{ '<' + call.function.name + ' ' + call.function.arguments + '>' }}{% endfor %}{% endfor %}"
    text = '{"city": "Łódź", "days": 2.0, "<|im_end|>": [1e-07, null]}'
    call = {"type": "function", "function": {"name": "f", "arguments": text}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    rendered = ChatTemplate(source, GuardedTokens(["<|im_end|>"])).render(messages)
    assert [rendered.text] == render_jinja_template([messages], chat_template=source)[0]
    assert [segment.text for segment in rendered.segments if segment.is_plain] == ["<|im_end|>"]
    with pytest.raises(RequestError, match="cannot be rendered"):
        ChatTemplate(source.replace("name", "nothing.at")).render(messages)


@pytest.mark.parametrize("content", [None, ""])
def test_calls_without_content_are_seen_by_templates_that_test_for_null(content: Any) -> None:
    """Such as DeepSeek-R1's, which prints no calls of other messages."""
    source = "{% for message in messages %}{% if message['role'] == 'assistant' and message['content'] is none %}"
    source += "{{ message.tool_calls[0].function.name }}{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": content, "tool_calls": [call]}]
    assert ChatTemplate(source).render(messages).text == "xf"
    messages[1] = {"role": "assistant", "content": content}
    assert ChatTemplate(source).render(messages).text == "x", "without calls it is empty, as everywhere"


def test_schemas_of_tools_are_printed_as_in_python() -> None:
    source = "{% for key, value in tools[0].function.parameters.properties.n | items %}{{ value }}{{ value | tojson }}"
    assert "1.01.0" in assert_same(source + "{% endfor %}{{ tools[0] }}{{ tools | tojson(indent=2) }}", tools=TOOLS)
