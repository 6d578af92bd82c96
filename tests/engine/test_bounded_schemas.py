"""Objects have only the properties of their schema, however it is composed, and answers come to an end."""

import json
import re
from collections.abc import Iterator
from random import Random
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from llguidance import LLMatcher

from saccade.errors import RequestError
from saccade.scheduling.compiling import Words, build_tokenizer, compile_grammar
from saccade.scheduling.matcher import num_words
from saccade.wire.bounded_schemas import MAX_INTEGER, bound_schema
from saccade.wire.grammar import Grammar, json_rule
from saccade.wire.schemas import MAX_VALUES

END = 256
NAMES = ("a", "b", "kind", "x y", "é", "x_1")
INT: dict[str, Any] = {"type": "integer", "minimum": -5, "maximum": 120}
PLAIN: tuple[dict[str, Any], ...] = (
    INT,
    {"type": "string", "maxLength": 4},
    {"enum": ["red", 'a "b"', None, -1.5]},
    {"type": "boolean"},
    {"type": "number", "minimum": 0, "maximum": 9},
)


class Bytes:
    """A vocabulary of single bytes."""

    special_ids: frozenset[int] = frozenset({END})

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < END else b""

    def encode_plain(self, text: str) -> list[int]:
        return list(text.encode())


TOKENIZER = build_tokenizer(Words.of(Bytes(), END + 1, frozenset({END})))


def matcher_of(grammar: Grammar) -> LLMatcher:
    return compile_grammar(grammar, TOKENIZER)


def accepts(schema: Any, value: Any, *, has_whitespace: bool = False) -> bool:
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    matcher = matcher_of(Grammar("json_schema", json.dumps(schema), has_whitespace))
    ids = list(text.encode())
    return bool(matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting())


def written(grammar: Grammar, random: Random, longest: int = 400) -> str | None:
    """The answer of a model with random weights, or None if it does not end."""
    matcher, mask = matcher_of(grammar), np.zeros(num_words(END + 1), np.int32)
    text = bytearray()
    while not matcher.is_stopped() and len(text) < longest:
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: END + 1])
        token = int(random.choice(allowed.tolist()))
        assert matcher.consume_token(token)
        if token == END:
            break
        text.append(token)
    return text.decode() if matcher.is_stopped() else None


def random_schema(random: Random, depth: int = 0) -> dict[str, Any]:
    if depth and (depth > 3 or random.random() < 0.3):
        return random.choice(PLAIN)
    match random.choice(["object", "object", "allOf", "anyOf", "beside", "ref", "array", "pattern", "oneOf"]):
        case "allOf":
            return {"type": "object", "allOf": [random_object(random, depth, half) for half in (NAMES[:3], NAMES[3:])]}
        case "anyOf":
            return {"anyOf": [random_schema(random, depth + 1), random_object(random, depth)]}
        case "beside":
            branches = [random_object(random, depth, (name,)) for name in NAMES[4:]]
            return {**random_object(random, depth, NAMES[:3]), random.choice(["anyOf", "allOf"]): branches}
        case "ref":
            beside = random_object(random, depth, NAMES[3:]) if random.random() < 0.3 else {}
            return {"$ref": f"#/$defs/{random.choice('AB')}", **beside}
        case "array":
            return {"type": "array", "items": random_schema(random, depth + 1), "maxItems": 2}
        case "pattern":
            return {"type": "object", "patternProperties": {"^x_[0-9]$": random_schema(random, depth + 1)}}
        case "oneOf":
            return {"oneOf": [{"type": "null"}, random_object(random, depth)]}
    return random_object(random, depth)


def random_object(random: Random, depth: int, names: tuple[str, ...] = NAMES) -> dict[str, Any]:
    chosen = random.sample(names, random.randint(1, min(3, len(names))))
    properties = {name: random_schema(random, depth + 1) for name in chosen}
    required = [name for name in chosen if random.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required}


def whole_schema(random: Random) -> dict[str, Any]:
    definitions = {name: random_object(random, 4, NAMES[:3]) for name in "AB"}
    return {**random_schema(random), "$defs": definitions}


def keys_of(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from keys_of(inner)


def has_white_space(text: str) -> bool:
    """Outside strings."""
    return re.search(r"\s", re.sub(r'"(\\.|[^"\\])*"', "", text)) is not None


def test_random_answers_are_compact_and_have_only_the_schemas_properties() -> None:
    first, num_written = Random().getrandbits(32), 0
    for seed in range(first, first + 100):
        print(f"seed {seed}")
        random = Random(seed)
        schema = whole_schema(random)
        try:
            text = written(Grammar("json_schema", json.dumps(schema)), random)
        except RequestError:
            with pytest.raises(RequestError):  # the original is refused as well
                matcher_of(Grammar("lark", f"start: %json {json.dumps(schema)}"))
            continue
        if text is None:
            continue
        num_written += 1
        value = json.loads(text)
        assert jsonschema_rs.is_valid(schema, value), (seed, text)
        assert {key for key in keys_of(value) if not re.fullmatch("x_[0-9]", key)} <= set(NAMES), (seed, text)
        assert not has_white_space(text), (seed, text)
    assert num_written > 50, first


A = {"type": "object", "properties": {"a": INT}, "required": ["a"]}
B = {"type": "object", "properties": {"b": INT}, "required": ["b"]}
DEFS = {"$defs": {"A": A, "B": B}}
REF_A, REF_B, REF_L = ({"$ref": f"#/$defs/{name}"} for name in "ABL")
OPEN = {"a": 1, "other": 2}
CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "plain": (A, [{"a": 1}], [OPEN, {}]),
    "true as written": (A | {"additionalProperties": True}, [OPEN], []),
    "a schema as written": (A | {"additionalProperties": INT}, [OPEN], [{"a": 1, "other": "x"}]),
    "no properties": ({"type": "object"}, [OPEN, {}], []),
    "only required": ({"type": "object", "required": ["a"]}, [OPEN], [{}]),
    "an empty list of properties": ({"type": "object", "properties": {}}, [{}], [OPEN]),
    "a required one without a schema": (A | {"required": ["a", "other"]}, [OPEN], [{"a": 1}, OPEN | {"b": 1}]),
    "more than are named": (A | {"minProperties": 2}, [OPEN], [{"a": 1}]),
    "inside": ({"type": "object", "properties": {"in": {"type": "array", "items": A}}}, [{"in": [{"a": 1}]}],
               [{"in": [OPEN]}]),
    "values of an open object": ({"type": "object", "additionalProperties": A}, [{"x": {"a": 1}}], [{"x": OPEN}]),
    "allOf": ({"allOf": [REF_A, REF_B], **DEFS}, [{"a": 1, "b": 2}], [{"a": 1}, {"a": 1, "b": 2, "other": 3}]),
    "allOf of one": ({"type": "object", "properties": {"x": {"allOf": [REF_A], "description": "d"}}, **DEFS},
                     [{"x": {"a": 1}}], [{"x": OPEN}]),
    "allOf beside": (A | {"allOf": [B]}, [{"a": 1, "b": 2}], [{"a": 1}, {"a": 1, "b": 2, "other": 3}]),
    "allOf with an open part": ({"allOf": [A, B | {"additionalProperties": True}]}, [{"a": 1, "b": 2, "other": 3}],
                                [{"a": 1}]),
    "anyOf": ({"anyOf": [A, B]}, [{"a": 1}, {"b": 2}], [{"a": 1, "b": 2}, OPEN, {}]),
    "anyOf beside": (A | {"anyOf": [B, {"type": "object", "properties": {"c": INT}}]},
                     [{"a": 1, "b": 2}, {"a": 1, "c": 2}, {"a": 1}],
                     [OPEN, {"a": 1, "c": 2, "b": {}}, {"a": 1, "b": 2, "c": 2}]),
    "anyOf beside anyOf": (
        A | {"allOf": [{"anyOf": [B, {"properties": {"c": INT}, "required": ["c"]}]}],
             "anyOf": [{"properties": {"d": INT}, "required": ["d"]}, {"properties": {"e": INT}, "required": ["e"]}]},
        [{"a": 1, "b": 2, "d": 3}, {"a": 1, "c": 2, "e": 3}],
        [{"a": 1, "b": 2}, {"a": 1, "b": 2, "d": 3, "e": {}}, {"a": 1, "b": 2, "c": {}, "d": 3}]),
    "anyOf of a shared part": (
        {"type": "object", "properties": {"one": {"$ref": "#/$defs/P"}, "two": {"allOf": [{"$ref": "#/$defs/P"}, B]}},
         "$defs": {"P": A | {"anyOf": [{"properties": {"c": INT}, "required": ["c"]}, {"properties": {"d": INT}}]}}},
        [{"one": {"a": 1, "c": 2}, "two": {"a": 1, "d": 2, "b": 3}}], [{"one": OPEN}, {"two": {"a": 1, "d": 2}}]),
    "a definition alone and as a part": (
        {"type": "object", "properties": {"one": REF_A, "two": {"allOf": [REF_A, REF_B]}}, **DEFS},
        [{"one": {"a": 1}, "two": {"a": 1, "b": 2}}], [{"one": OPEN}, {"one": {"a": 1, "b": 2}}]),
    "a reference beside": (REF_A | {"properties": {"c": INT}} | DEFS, [{"a": 1}, {"a": 1, "c": 2}], [OPEN]),
    "itself": ({"type": "object", "properties": {"next": {"$ref": "#"}}}, [{}, {"next": {"next": {}}}],
               [{"next": {"other": 1}}]),
    "itself, beside another as a part": (
        {"allOf": [REF_L, B], "$defs": {"L": A | {"properties": {"a": INT, "l": REF_L}}}},
        [{"a": 1, "l": {"a": 1}, "b": 2}], [{"a": 1}, {"a": 1, "b": 2, "other": 3}]),
    "patterns": ({"type": "object", "patternProperties": {"^x": INT}}, [{"x1": 1}, {}], [{"y": 1}, {"x1": "s"}]),
    "types": ({"type": ["object", "null"], "properties": {"a": INT}}, [None, {"a": 1}], [OPEN]),
    "a discriminator": (
        {"oneOf": [{"type": "object", "properties": {"k": {"const": k}, k: INT}, "required": ["k", k]} for k in "ab"]},
        [{"k": "a", "a": 1}, {"k": "b", "b": 1}], [{"k": "a", "b": 1}, {"k": "a", "a": 1, "b": 1}]),
    "values that look like schemas": ({"enum": [{"properties": {"a": 1}}]}, [{"properties": {"a": 1}}], [{}]),
    "a property called properties": ({"type": "object", "properties": {"properties": A}}, [{"properties": {"a": 1}}],
                                     [{"properties": OPEN}]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_objects_are_closed_unless_the_schema_says_otherwise(case: str) -> None:
    schema, good, bad = CASES[case]
    before = json.dumps(schema)
    for value in good:
        assert accepts(schema, value), value
        assert jsonschema_rs.is_valid(schema, value)
    assert not [value for value in bad if accepts(schema, value)]
    assert json.dumps(schema) == before, "the schema of the request is not modified"


def test_an_ambiguous_oneof_is_refused_even_though_closing_its_branches_would_hide_it() -> None:
    schema = {"oneOf": [A, {"type": "object", "properties": {"b": INT}}]}
    assert not jsonschema_rs.is_valid(schema, {"a": 1})
    with pytest.raises(RequestError, match="oneOf"):
        matcher_of(Grammar("json_schema", json.dumps(schema)))


@pytest.mark.parametrize(
    "schema",
    [
        A | {"allOf": [{"$ref": "#somewhere"}]},
        A | {"allOf": [{"$ref": "https://a.org/schema"}]},
        A | {"allOf": [{"$ref": 3}]},
        A | {"properties": {"a": {"$id": "x", "$ref": "#"}}},
        True,
        A | {"enum": list(range(MAX_VALUES))},
    ],
)
def test_schemas_that_are_not_understood_are_left_unchanged(schema: Any) -> None:
    assert bound_schema(schema) is schema


def test_schemas_that_are_too_deep_are_left_unchanged() -> None:
    schema: Any = A
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    assert bound_schema(schema) is schema
    wide = {f"p{i}": {"allOf": [REF_A, REF_B, {"$ref": "#"}]} for i in range(3000)}
    assert isinstance(bound_schema({"type": "object", "properties": wide, **DEFS}), dict)


def test_whitespace_is_allowed_only_on_request() -> None:
    for text, is_spaced in (('{"a":1}', True), ('{"a": 1}', True), ('{\n  "a": 1\n}', True), ('{"a":  1}', False)):
        assert accepts(A, text, has_whitespace=True) is is_spaced
        assert accepts(A, text) is (text == '{"a":1}')
    assert Grammar("json_object") != Grammar("json_object", has_whitespace=True), "they are compiled separately"
    first = Random().getrandbits(32)
    texts = {seed: written(Grammar("json_object"), Random(seed)) for seed in range(first, first + 20)}
    assert not {seed: text for seed, text in texts.items() if text and has_white_space(text)}


def test_a_schema_cannot_override_the_servers_guidance_options() -> None:
    schema = A | {"x-guidance": {"whitespace_flexible": True, "lenient": True}}
    assert not accepts(schema, '{"a": 1}')
    assert '"whitespace_flexible": false' in json_rule(schema)
    with pytest.raises(RequestError, match="too large"):
        matcher_of(Grammar("json_schema", '{"type": "number", "maximum": 1e400}'))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (INT | {"minimum": 0}, ["7"], ["-1"]),
        ({"prefixItems": [{"type": "integer"}] * 65, "items": False}, ["[" + "9" * 30 + "]"], []),
        ({"type": "integer"}, ["7", "-7", str(MAX_INTEGER), str(-MAX_INTEGER)], ["9" * 20, "-" + "9" * 20]),
        ({"type": "integer", "minimum": 3}, ["7"], ["2", "9" * 20]),
        ({"type": "integer", "exclusiveMaximum": 3}, ["2", "-9"], ["3", "-" + "9" * 20]),
        ({"type": ["integer", "null"]}, ["7", "null"], ["9" * 20]),
        ({"type": "integer", "multipleOf": 3}, ["9" * 30], ["7"]),
        ({"type": ["integer", "number"]}, ["9" * 30, "1.5"], []),
        ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, ["7"], ["4", "9" * 20]),
    ],
)
def test_unbounded_integers_fit_into_64_bits(schema: Any, good: list[str], bad: list[str]) -> None:
    assert all(accepts(schema, text) for text in good)
    assert not any(accepts(schema, text) for text in bad)
