from argparse import ArgumentTypeError
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from saccade.cli import main
from saccade.cli.commands import COMMANDS, new_parser
from saccade.cli.groups import FEW_FLAGS, USUAL, help_text
from saccade.cli.parser import Parser, settings_from
from saccade.cli.values import human_int, read_value
from saccade.config import Word, environment, setting
from saccade.errors import ConfigError
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeSettings:
    """What a shape is like."""

    num_sides: int = setting(4, "sides; 100% of them")
    width: float = setting(1.5, "metres")
    name: str = setting("", "what it is called")
    is_filled: bool = setting(True, "no hole")
    tags: tuple[Word, ...] = setting((), "words")
    files: tuple[str, ...] = setting((), "any text")
    sizes: tuple[int, ...] = setting((1, 2), "numbers")


def read(*words: str, **defaults: Any) -> ShapeSettings:
    parser = Parser("shape")
    parser.add_settings(ShapeSettings, **defaults)
    return settings_from(parser.read(words), ShapeSettings)


def write(folder: Path, text: str) -> str:
    path = folder / "shape.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [("8192", 8192), ("8k", 8000), ("8K", 8192), ("1.5K", 1536), ("2M", 2**21), ("2.01k", 2010), ("1.001m", 1_001_000)],
)
def test_human_integers(text: str, value: int) -> None:
    assert human_int(text) == value


@pytest.mark.parametrize("text", ["", "k", "8q", "1.5", "0.3k1", "1.0005k", "1.0e999"])
def test_what_is_no_integer_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError):
        human_int(text)


def test_without_flags_settings_are_their_defaults() -> None:
    assert read() == ShapeSettings()
    assert read(num_sides=7) == ShapeSettings(num_sides=7)


def test_every_type_has_a_flag() -> None:
    found = read(
        *("--num-sides", "8k", "--width=2.5", "--name", "a b", "--no-is-filled"),
        *("--tags", "a,b", "--tags", '["c,d"]', "--sizes", "1K", "--sizes", "3,4"),
    )
    assert found == ShapeSettings(
        num_sides=8000,
        width=2.5,
        name="a b",
        is_filled=False,
        tags=("a", "b", "c,d"),
        sizes=(1024, 3, 4),
    )


def test_a_file_overrules_the_environment_and_flags_overrule_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SACCADE_NUM_SIDES", "3")
    monkeypatch.setenv("SACCADE_WIDTH", "3.5")
    monkeypatch.setenv("SACCADE_IS_FILLED", "off")
    monkeypatch.setenv("SACCADE_TAGS", "x,y")
    monkeypatch.setenv("SACCADE_NAME", "")
    config = write(tmp_path, "num-sides: 1k\nwidth: 4\ntags: [p, 'q,r']\n")
    found = read("--config", config, "--width", "5", num_sides=9, name="the command's")
    assert found == ShapeSettings(num_sides=1000, width=5.0, is_filled=False, tags=("p", "q,r"), name="the command's")
    monkeypatch.setenv("SACCADE_CONFIG", config)
    assert read() == ShapeSettings(num_sides=1000, width=4.0, is_filled=False, tags=("p", "q,r"))


def test_the_environment_is_read_by_prefix() -> None:
    assert environment({"SACCADE_MAX_MODEL_LEN": "8k", "OTHER": "1", "SACCADE_": "", "SACCADE_X": ""}) == {
        "max_model_len": "8k"
    }


def test_a_comma_is_a_part_of_any_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("a,b", "[a", "[]", "[1]", '["a"', ""):
        assert read("--files", text).files == (text,)
    assert read("--files", "a,b", "--files", "c").files == ("a,b", "c")
    assert read("--config", write(tmp_path, "files: 'a,b'")).files == ("a,b",)
    assert read("--config", write(tmp_path, "files: ['a,b', c]")).files == ("a,b", "c")
    monkeypatch.setenv("SACCADE_FILES", "a,b")
    assert read().files == ("a,b",)
    monkeypatch.setenv("SACCADE_FILES", '["a,b", "c"]')
    assert read().files == ("a,b", "c"), "a variable cannot be repeated"


def test_keys_names_and_files_keep_their_commas(tmp_path: Path) -> None:
    flags = new_parser("serve").read(["--api-key", "a,b", "--api-key", "c", "--served-model-name", "x,y"])
    assert flags.api_key == ("a,b", "c") and flags.served_model_name == ("x,y",)
    (tmp_path / "a,b.png").write_bytes(b"")
    assert new_parser("explain").read(["--image", str(tmp_path / "a,b.png")]).image == (str(tmp_path / "a,b.png"),)
    assert new_parser("plan").read(["--gpu", "H200,L4"]).gpu == ("H200", "L4"), "which have none"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("files: yes", "files: YAML reads this as bool, not as text; put it in quotes"),
        ("files: [a, 0123]", "files: YAML reads this as int, not as text; put it in quotes"),
        ("num_side: 3", "unknown setting num_side; did you mean num-sides"),
        ("num_sides: three", "num_sides: 'three' is not an integer"),
        ("num_sides: true", "num_sides: True is not a int"),
        ("num_sides: {a: 1}", "num_sides: {'a': 1} is a dict"),
        ("- 1", "settings are `name: value` lines"),
        ("a: [", "cannot be read as YAML"),
        ("a: " + "[" * 10**5, "is nested too deeply"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"shape\.yaml") as refused:
        read("--config", write(tmp_path, text))
    assert message in str(refused.value)


def test_a_bare_off_is_a_word_where_words_are_wanted() -> None:
    assert [read_value(str, value) for value in (False, True, "off")] == ["off", "on", "off"]
    assert read_value(bool, False) is False


def test_a_file_that_is_not_there_is_no_matter_of_yaml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        read("--config", str(tmp_path / "gone.yaml"))
    assert str(refused.value) == f"{tmp_path / 'gone.yaml'} cannot be read: No such file or directory (--config)"
    with pytest.raises(ConfigError, match="cannot be read as YAML"):
        read("--config", write(tmp_path, "a: [1"))


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SACCADE_IS_FILLED", "perhaps")
    with pytest.raises(ConfigError, match="SACCADE_IS_FILLED: 'perhaps' is neither true nor false"):
        read()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-side", "3"], "unknown flag --num-side; did you mean --num-sides"),
        (["--sides", "3"], "--num-sides?"),
        (["--zzz=1"], "unknown flag --zzz (see"),
        (["--width", "wide"], "'wide' is not a number"),
        (["--num-sides"], "expected one argument"),
        (["stray"], "unexpected 'stray'"),
        (["--", "--num-sides"], "unexpected '--num-sides'"),
    ],
)
def test_wrong_flags_are_refused_with_a_way_out(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(*words)
    assert message in str(refused.value)
    assert "saccade shape --help" in str(refused.value)


def test_words_may_stand_anywhere() -> None:
    parser = Parser("shape", words="[MODEL] [PROMPT]", max_words=2)
    parser.add_settings(ShapeSettings)
    for words in (
        ["a", "--width", "2", "b"],
        ["--width", "2", "a", "b"],
        ["a", "b", "--width=2"],
        ["--width=2", "--", "a", "b"],
    ):
        flags = parser.read(words)
        assert (flags.words, flags.width) == (["a", "b"], 2.0)


def test_help_shows_an_overview_a_group_or_what_a_word_finds() -> None:
    parser = new_parser("serve")
    usual, one = help_text(parser, ""), help_text(parser, "scheduler")
    assert "tokens of one request" in usual and "--prefill-chunk-tokens" not in usual
    assert "--help=GROUP" in usual and len(usual.splitlines()) < 120 < len(help_text(parser, "all").splitlines())
    assert "tokens of one request" in one and "--prefill-chunk-tokens" in one and "--port" not in one
    found = help_text(parser, "encoder")
    assert "--encoder-cache-tokens" in found and "--encoder-budget-tokens" in found and "--max-model-len" not in found
    assert "no flag mentions 'zebra'" in help_text(parser, "zebra")
    everything = help_text(parser, "all")
    assert all(
        f"--{f.name.replace('_', '-')}" in everything for f in (*fields(EngineSettings), *fields(SchedulerSettings))
    )
    assert "100% of them" in help_text(_shape_parser(), "")


@dataclass(frozen=True, kw_only=True, slots=True)
class LongSettings:
    """What is told in a sentence that goes on for long enough to need a second line of the docstring. And this is
    another one."""

    graphs_that_are_captured_in_pieces: bool = setting(True, "words " * 30)


@pytest.mark.parametrize("width", [50, 80, 300])
def test_help_keeps_to_the_terminal_and_tells_whole_sentences(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    parser = Parser("long", about="a word " * 40)
    parser.add_settings(LongSettings)
    for topic in ("all", "long", "zebra"):
        shown = help_text(parser, topic)
        assert all(len(line) <= min(width, 100) for line in shown.splitlines())
    told = " ".join(help_text(parser, "long").split())
    assert (
        "long: What is told in a sentence that goes on for long enough to need a second line of the docstring:" in told
    )
    assert "another one" not in told and "--graphs-that-are-captured-in-pieces, --no-... words" in told


@pytest.mark.parametrize("name", ["", *COMMANDS])
@pytest.mark.parametrize("width", [50, 80])
def test_help_of_every_command_fits(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for flag in ("--help", "--help=all", "--help-all"):
        assert main([*name.split(), flag]) == 0
        assert [line for line in capsys.readouterr().out.splitlines() if len(line) > width] == []


def test_help_says_how_many_flags_it_leaves_out() -> None:
    for name in COMMANDS:
        parser = new_parser(name)
        told = " ".join(help_text(parser, "").split())
        left = [group for group in parser.groups if len(group.usual_actions) < len(group.shown_actions)]
        is_short = sum(len(group.shown_actions) for group in parser.groups) <= FEW_FLAGS
        for group in [] if is_short else left:
            count = len(group.shown_actions) - len(group.usual_actions)
            assert f"{count} of {group.name}" in told, name


def test_what_is_usual_exists() -> None:
    known = {action.dest for name in COMMANDS for group in new_parser(name).groups for action in group.actions}
    assert known >= USUAL


def _shape_parser() -> Parser:
    parser = Parser("shape")
    parser.add_settings(ShapeSettings)
    return parser


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*name.split(), "--help=all"]) == 0
    shown = capsys.readouterr().out
    assert f"usage: saccade {name}" in shown
    assert main(["help", *name.split()]) == 0
    assert f"usage: saccade {name}" in capsys.readouterr().out


def test_the_reference_names_every_flag_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "--markdown"]) == 0
    shown = capsys.readouterr().out
    for name in COMMANDS:
        parser = new_parser(name)
        section = shown.split(f"## saccade {name}\n")[1].split("\n## ")[0]
        assert all(f"`--{field.replace('_', '-')}`" in section for field in parser.kinds), name
