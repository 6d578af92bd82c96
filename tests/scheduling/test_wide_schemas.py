"""Objects with many optional properties can be generated, or are refused before they are queued."""

import json
from pathlib import Path
from typing import Any

import pytest

from saccade.errors import RequestError
from saccade.inputs.processor import Processor
from saccade.scheduling.matcher import GrammarCompiler
from saccade.wire.grammar import Grammar, check_grammar
from saccade.wire.schemas import MAX_PROPERTIES
from tests.inputs.folders import write_qwen


def wide(num: int, kind: dict[str, Any]) -> Grammar:
    properties = {f"property_{i}": kind for i in range(num)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return Grammar("json_schema", json.dumps(schema))


@pytest.mark.parametrize("kind", [{"type": "string"}, {"type": ["integer", "null"]}, {"enum": ["a", "b"]}])
def test_hundreds_of_optional_properties_can_be_written(tmp_path: Path, kind: dict[str, Any]) -> None:
    tokenizer = Processor.from_folder(write_qwen(tmp_path)).tokenizer
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    value: Any = None if "null" in str(kind) else "a"
    for num in (300, MAX_PROPERTIES):
        grammar = wide(num, kind)
        check_grammar(grammar, param="response_format")
        matcher = compiler.compile(grammar).result().deep_copy()
        text = json.dumps({"property_0": value, f"property_{num - 1}": value}, separators=(",", ":"))
        for token in tokenizer.encode_plain(text):
            matcher.compute_logit_bias()  # every step does this; it fails if a grammar is too large
            assert not matcher.is_error(), matcher.get_error()
            assert matcher.consume_token(token), (text, token)
        assert matcher.is_accepting() and not matcher.is_error()


def test_too_many_properties_are_refused_at_once() -> None:
    with pytest.raises(RequestError, match="properties"):
        check_grammar(wide(MAX_PROPERTIES + 1, {"type": "string"}), param="response_format")
