"""Files of a checkpoint that are odd, broken or mean no good end in one sentence that names them."""

import json
from pathlib import Path
from typing import Any

import pytest

from saccade.errors import ConfigError, PanicError, RequestError, contained
from saccade.inputs.processor import Processor
from saccade.inputs.text.chat_template import ChatTemplate
from saccade.inputs.text.generation import GenerationDefaults
from saccade.inputs.text.template_trial import try_template
from saccade.inputs.text.tokenizer import Tokenizer
from saccade.models.model_config import Config
from saccade.models.registry import read_spec
from tests.inputs.folders import write_qwen

DEEP = '{"a":' * 50_000
FILES = ("config.json", "tokenizer_config.json", "preprocessor_config.json", "generation_config.json", "tokenizer.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_qwen(tmp_path)


def change(file: Path, **values: Any) -> None:
    found = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(found | values))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("text", ["", "{", "[]", "5", DEEP, "[" * 50_000, '{"a": ' + "9" * 5000 + "}", "\0"])
def test_files_that_are_no_json_are_named(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(ConfigError) as refused:
        Processor.from_folder(folder)
        GenerationDefaults.from_folder(folder)
        read_spec(Config.read(folder / "config.json"))
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    "added",
    [
        5,
        "x",
        [[]],
        {"a": {"content": "<x>"}},
        {"-1": {"content": "<x>"}},
        {"9" * 5000: {"content": "<x>"}},
        {"5": None},
        {"5": {}},
        {"5": {"content": 5}},
        {"5": {"content": ["<x>"]}},
        {"5": {"content": "\ud800"}},
        {"5": {"content": "<x>", "special": "yes"}},
        {"5": {"content": "<x>", "lstrip": {"a": []}}},
    ],
)
def test_added_tokens_that_are_none_are_refused_in_a_sentence(folder: Path, added: Any) -> None:
    change(folder / "tokenizer_config.json", added_tokens_decoder=added)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: added_tokens_decoder"):
        Processor.from_folder(folder)


@pytest.mark.parametrize("name", ["additional_special_tokens", "extra_special_tokens"])
@pytest.mark.parametrize("value", [5, "x", True])
def test_special_tokens_that_are_no_list_are_refused_in_a_sentence(folder: Path, name: str, value: Any) -> None:
    change(folder / "tokenizer_config.json", **{name: value})
    with pytest.raises(ConfigError, match=name):
        Processor.from_folder(folder)


def test_names_that_are_no_text_name_nothing(folder: Path) -> None:
    change(folder / "tokenizer_config.json", bos_token="\ud800", unk_token={"content": [5]})
    assert Processor.from_folder(folder).tokenizer.named_token("bos_token") is None


def test_a_prefix_that_would_end_the_process_is_refused(folder: Path) -> None:
    definition = json.loads((folder / "tokenizer.json").read_text())
    definition["model"]["continuing_subword_prefix"] = "##"
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(ConfigError, match="continuing_subword_prefix"):
        Tokenizer.from_folder(folder)


class PanicException(BaseException):
    """As libraries in Rust raise it."""


class Panicking:
    def __getattr__(self, name: str) -> Any:
        raise PanicException("index out of bounds")


def test_a_panic_of_the_tokenizer_is_the_requests_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    monkeypatch.setattr(tokenizer, "_main", Panicking())
    with pytest.raises(RequestError, match="cannot encode"):
        tokenizer.encode("a")


def test_only_panics_become_exceptions() -> None:
    with pytest.raises(PanicError), contained():
        raise PanicException
    for other in (KeyboardInterrupt, ValueError):
        with pytest.raises(other), contained():
            raise other


DOUBLING = "{% set ns = namespace(x='x') %}{% for i in range(31) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        DOUBLING,
        "{% if messages | length > 2 %}" + DOUBLING + "{% endif %}",
        "{% if tools %}{{ 'a' | indent(1000000000, true) }}{% endif %}",
        "{{ ('a' * 10000) | replace('a', 'b' * 100000) }}",
    ],
)
def test_templates_that_eat_memory_are_refused_before_they_are_used(tmp_path: Path, source: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(source)
    with pytest.raises(ConfigError, match=r"256 MiB.*--chat-template"):
        try_template(tmp_path)


def test_templates_that_do_not_are_taken(folder: Path, tmp_path: Path) -> None:
    try_template(folder)
    for source in ("{{ messages[0].content }}", "{% broken", "{{ raise_exception('no') }}"):
        (tmp_path / "a.jinja").write_text(source)
        try_template(folder, str(tmp_path / "a.jinja"))
    (folder / "chat_template.jinja").unlink()
    try_template(folder)


def test_an_indent_is_bounded() -> None:
    template = ChatTemplate("{{ messages | tojson(indent=1000000000) }}")
    with pytest.raises(RequestError, match="cannot be rendered"):
        template.render([{"role": "user", "content": "a"}])
