"""Grammars that outputs must match: their form in a request, and their limits.

llguidance turns a grammar into token masks. The fuel set here bounds its work at run time; it neither fetches
references nor backtracks. Sizes are checked first: within these limits nearly all grammars compile in a few hundred
milliseconds. llguidance has no bound for the rest, so a server first tries grammars in a process that can be killed
(see `saccade.scheduling.trials`).
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Literal, cast

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import gbnf_to_lark

from saccade.errors import RequestError
from saccade.wire.bounded_schemas import bound_schema
from saccade.wire.schemas import MAX_NESTING, check_schemas

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark"]
KINDS = ("json_schema", "json_object", "regex", "choice", "lark")

MAX_SCHEMA_CHARS = 256 * 1024
MAX_TEXT_CHARS = 32 * 1024  # of regular expressions, and of Lark without its schemas
MAX_CHOICES = 4096
MAX_EBNF_RULES = 256
MAX_REPEATS = 1_000_000  # of a part of a regular expression
PARAM = "response_format"  # default `param` of errors
_MESSAGE_CHARS = 200
# One space, or a line break and an indent: enough for readable JSON, but no endless whitespace.
_SPACED: dict[str, Any] = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"( |\n[ \t]{0,8})",
    "lenient": False,
}
_COMPACT: dict[str, Any] = {"whitespace_flexible": False, "lenient": False}


@dataclass(frozen=True, slots=True)
class Grammar:
    """`text` is a JSON schema, empty ("json_object"), a regular expression, a JSON list of strings ("choice"), or, for
    "lark", Lark in llguidance's dialect or EBNF with a rule `root ::= ...` as in llama.cpp, vLLM and SGLang. The whole
    output must match. JSON is compact unless `has_whitespace`, and its objects have only properties that the schema
    mentions (see `bound_schema`)."""

    kind: GrammarKind
    text: str = ""
    has_whitespace: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS or not isinstance(self.text, str):
            raise _refuse(f"its kind must be one of {', '.join(KINDS)}, and its text a string")


def check_grammar(grammar: Grammar, *, param: str = PARAM) -> None:
    """Raises a RequestError about the field `param` for a broken or too large grammar. May be slow, so keep it off
    event loops. A grammar that passes may still be refused when it is compiled for a vocabulary."""
    try:
        try:
            message = str(LLMatcher.validate_grammar(to_llguidance(grammar), limits=parser_limits()))
        except (RequestError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # the library's panics derive from BaseException
            message = "it cannot be read"
        if message and not message.startswith("WARNING"):
            raise broken(message)
    except RequestError as error:
        error.param = param
        raise


def to_llguidance(grammar: Grammar) -> str:
    """The grammar in llguidance's own form. Raises a RequestError if it exceeds a limit."""
    text = grammar.text
    _hold("it has {} characters", len(text), MAX_TEXT_CHARS if grammar.kind == "regex" else MAX_SCHEMA_CHARS)
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise _refuse("it is not valid Unicode")
    return _CONVERT[grammar.kind](grammar)


def json_rule(schema: dict[str, Any], *, has_whitespace: bool = False) -> str:
    """A Lark expression for JSON that matches a schema. Raises a ValueError for NaN and infinity."""
    options = _SPACED if has_whitespace else _COMPACT
    text = json.dumps({**bound_schema(schema), "x-guidance": options}, ensure_ascii=False, allow_nan=False)
    return f"%json {text}"


def parser_limits() -> LLParserLimits:
    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        max_lexer_states=50_000,
        max_items_in_row=2400,  # four for each of an object's optional properties (see MAX_PROPERTIES)
        step_max_items=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def broken(message: str) -> RequestError:
    """llguidance's message is about the client's own text, so the client gets its first line, without control
    characters. That of a pattern says only that there is an error; a later line says which."""
    lines = [part.strip() for part in message.splitlines() if part.strip()] or ["it cannot be read"]
    reasons = [line.removeprefix("error:") for line in lines[1:] if line.startswith("error:")]
    shown = ["".join(char for char in line if char.isprintable())[:_MESSAGE_CHARS] for line in (lines[0], *reasons[:1])]
    return _refuse("".join(shown))


def _from_schema(grammar: Grammar) -> str:
    schema = _read_json(grammar.text) if grammar.kind == "json_schema" else {"type": "object"}
    if not isinstance(schema, dict):
        raise _refuse("a JSON schema must be an object")
    check_schemas([schema], _hold_schema)
    options = _SPACED if grammar.has_whitespace else _COMPACT
    try:
        text = json.dumps(bound_schema(schema), allow_nan=False)
    except ValueError:
        raise _refuse("it has numbers that are too large") from None
    return LLMatcher.grammar_from_json_schema(text, overrides=cast(Any, options))


def _from_choice(grammar: Grammar) -> str:
    choices = _read_json(grammar.text)
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise _refuse("choices must be a list of at least one string, none of them empty")
    _hold("it has {} choices", len(choices), MAX_CHOICES)
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(c, ensure_ascii=False) for c in choices))


def _from_regex(grammar: Grammar) -> str:
    text = grammar.text
    _check_nesting(text)
    _hold("it repeats parts {} times", _repeats(text), MAX_REPEATS)
    return LLMatcher.grammar_from_regex(text)


def _repeats(text: str) -> int:
    """How often the most repeated part of a regular expression occurs once counts such as {2,5} are expanded."""
    most = 1
    groups = [1]  # by depth: the maximum over the parts of a group so far
    last = 1  # repeats of the previous part
    for piece in _REGEX_PIECES.findall(text):
        if piece == "(":
            groups.append(1)
        elif piece == ")":
            last = groups.pop() if len(groups) > 1 else 1
        elif count := _COUNT.fullmatch(piece):
            last *= max(1, *(min(int(number[:9]), 10**9) for number in count.groups() if number))
        else:
            last = 1
        groups[-1] = max(groups[-1], last)
        most = max(most, last)
    return most


_REGEX_PIECES = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{\d+,?\d*\}|.", re.DOTALL)
_COUNT = re.compile(r"\{(\d+),?(\d*)\}")


def _from_lark(grammar: Grammar) -> str:
    """Schemas inside Lark have the same limits as other schemas."""
    text = _from_ebnf(grammar.text) if _EBNF.search(grammar.text) else grammar.text
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    schemas, rest, end = [], "", 0
    for match in re.finditer(r"%json\s*", text):
        if match.start() < end:  # inside a schema
            continue
        rest += text[end : match.start()]
        try:
            schema, end = decoder.raw_decode(text, match.end())
        except (ValueError, RecursionError):
            raise _refuse("%json must be followed by a JSON schema") from None
        schemas.append(schema)
    rest += text[end:]
    _hold("it has {} characters", len(rest), MAX_TEXT_CHARS)
    _check_nesting(rest)
    check_schemas(schemas, _hold_schema)
    return LLMatcher.grammar_from_lark(text)


def _from_ebnf(text: str) -> str:
    """Converts EBNF to Lark. This takes time quadratic in the number of rules."""
    _hold("it has {} characters", len(text), MAX_TEXT_CHARS)
    _check_nesting(text)
    _hold("it has {} rules", text.count("::="), MAX_EBNF_RULES)
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # several types, all about the client's own text
        raise broken(str(error)) from None


_EBNF = re.compile(r"^\s*root\s*::=", re.MULTILINE)
_CONVERT = {
    "json_schema": _from_schema,
    "json_object": _from_schema,
    "regex": _from_regex,
    "choice": _from_choice,
    "lark": _from_lark,
}


def _read_json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):  # numbers with thousands of digits are a ValueError too
        raise _refuse("it is not valid JSON, or nested too deeply") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _hold(said: str, count: int, limit: int) -> None:
    if count > limit:
        raise _refuse(f"{said.format(count)}; the limit is {limit}", code="grammar_too_large")


def _hold_schema(what: str, count: int, limit: int) -> None:
    _hold("the schema has {} " + what, count, limit)


def _check_nesting(text: str) -> None:
    """Limits nested groups. Literal brackets count too, so this is stricter than necessary."""
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        depth = max(depth, 0)
        deepest = max(deepest, depth)
    _hold("it is nested {} levels deep", deepest, MAX_NESTING)


def _refuse(what: str, *, code: str = "invalid_grammar") -> RequestError:
    return RequestError(f"the grammar of the output is refused: {what}", param=PARAM, code=code)
