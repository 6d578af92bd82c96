"""The documents match the code: commands parse, flags, metrics and routes exist, quoted messages are real."""

import ast
import io
import re
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

import pytest

from saccade.choice.key import Reason
from saccade.cli import main
from saccade.cli.aliases import (
    BUDGETS,
    GRAPH_WORDS,
    IGNORED_SWITCHES,
    IGNORED_VALUES,
    REFUSED,
    SAME,
    SWITCHES,
    TRANSLATED,
)
from saccade.cli.commands import COMMANDS, find_command, new_parser
from saccade.errors import ConfigError
from saccade.models.registry import ARCHITECTURES
from saccade.server.figures.metrics import Metrics
from saccade.server.operators.openapi import build_document
from tests.docs import DOCS, PAGES, ROOT, WRITTEN, blocks, commands, inline_code, names, prose, table
from tools.site_pages import sample_facts

# Flags of other programs that pages mention.
FOREIGN = {"--build", "--profile", "--gpus"}
MAPPED = {
    **SAME,
    **BUDGETS,
    **{flag: field for flag, (field, _) in {**SWITCHES, **TRANSLATED}.items()},
    **dict.fromkeys(GRAPH_WORDS, "graphs"),
}
MIGRATIONS = [("from_vllm.md", "own"), ("from_sglang.md", "sglang")]


def ids(path: Path) -> str:
    return path.name


@cache
def known_flags() -> frozenset[str]:
    return frozenset(flag for name in COMMANDS for flag in new_parser(name)._option_string_actions)


@cache
def routes() -> frozenset[str]:
    return frozenset(build_document()["paths"]) | {"/", "/docs", "/openapi.json"}


@cache
def metrics(style: str) -> frozenset[str]:
    """The names of metric families and of their samples."""
    text = Metrics("m", style).scrape(sample_facts())[0].decode()
    families = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    return frozenset(families | set(re.findall(r"^([\w:]+)[{ ]", text, re.M)))


@cache
def sentences() -> str:
    """All string literals of the package, one per line, with an ellipsis for each inserted value."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


@pytest.mark.parametrize("page", WRITTEN, ids=ids)
def test_every_command_parses(page: Path) -> None:
    for words in commands(page):
        name, rest = find_command(words)
        if "--config" in rest:  # a file that the reader writes
            at = rest.index("--config")
            rest = [*rest[:at], *rest[at + 2 :]]
        flags = new_parser(name).read([word for word in rest if word != "FILE"])
        assert not flags.notes, f"saccade {' '.join(words)}: {flags.notes}"


@pytest.mark.parametrize("page", WRITTEN, ids=ids)
def test_every_mentioned_flag_exists(page: Path) -> None:
    named = {flag for code in inline_code(page) for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", code)}
    assert named - known_flags() - FOREIGN == set()


@pytest.mark.parametrize("page", WRITTEN, ids=ids)
def test_every_mentioned_metric_exists(page: Path) -> None:
    named = {code for code in inline_code(page) if re.fullmatch(r"saccade:\w+", code)}
    assert named - metrics("own") == set()


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_link_to_a_file_works(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", prose(page))
    local = [link for link in links if not re.match(r"\w+:", link) and not link.startswith("reference/")]
    assert [link for link in local if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", [page for page, _ in MIGRATIONS])
def test_flags_of_another_engine_do_what_the_table_says(page: str) -> None:
    parser = new_parser("serve")
    for flags, here, *_ in table(DOCS / page, "## Flags"):
        for flag in names(flags):
            match here:
                case "the same":
                    assert flag[2:].replace("-", "_") in parser.kinds, f"{flag} is no setting"
                case "no effect":
                    assert flag in IGNORED_SWITCHES or flag in IGNORED_VALUES, f"{flag} is not taken without effect"
                case "refused":
                    assert flag in REFUSED, f"{flag} is not refused"
                case "MODEL":
                    assert parser.read([flag, "m"]).words == ["m"]
                case _:
                    assert [MAPPED[flag].replace("_", "-")] == [name[2:] for name in names(here)], flag


@pytest.mark.parametrize(("page", "style"), MIGRATIONS)
def test_metrics_of_another_engine_exist_or_not_as_the_table_says(page: str, style: str) -> None:
    for theirs, here in table(DOCS / page, "## Metrics"):
        for name in names(theirs):
            assert (name in metrics(style)) is here.startswith("the same"), name
        assert set(names(here)) - {"finished_reason"} <= metrics(style)


@pytest.mark.parametrize("page", [page for page, _ in MIGRATIONS])
def test_routes_of_another_engine_exist_or_not_as_the_table_says(page: str) -> None:
    for theirs, here in table(DOCS / page, "## Routes"):
        for route in names(theirs):
            assert (route in routes()) is here.startswith("the same"), route


def test_what_is_not_there_is_refused() -> None:
    rows = table(DOCS / "limits.md", "# What it does not do")
    asked = [flag for _, flags, _ in rows for flag in names(flags)]
    assert len(asked) > 15 and [flag for flag in asked if flag not in REFUSED] == []
    with pytest.raises(ConfigError, match="is refused"):
        new_parser("serve").read([asked[0]])


def test_every_quoted_message_is_in_the_code() -> None:
    quoted = re.findall(r"^> (.*)$", (DOCS / "troubleshooting.md").read_text(), re.M)
    assert len(quoted) > 25
    assert [text for text in quoted if text not in sentences()] == []


def test_a_quoted_message_that_is_not_in_the_code_is_found() -> None:
    assert "the KV cache holds … tokens; a request may have … (lower" in sentences()
    assert "the KV cache holds … tokens; a request may have no" not in sentences()


def test_the_page_of_models_lists_every_architecture() -> None:
    rows = table(DOCS / "models.md", "## Models")
    listed = {name for _, architectures, _ in rows for name in names(architectures)}
    assert listed == set(ARCHITECTURES), "the table in docs/models.md and FAMILIES in models/registry.py differ"


def test_the_guide_to_adding_a_model_shows_the_code_as_it_is() -> None:
    """Dots stand for what is left out."""
    folders = (ROOT / "src/saccade/models/families", ROOT / "tests/models")
    sources = [path.read_text() for folder in folders for path in folder.glob("*.py")]
    chunks = [chunk for text in blocks(DOCS / "adding_a_model.md", "python") for chunk in text.split("...\n")]
    assert len(chunks) > 4
    assert [chunk for chunk in chunks if not any(chunk in source for source in sources)] == []


def test_the_page_about_debugging_lists_every_reason() -> None:
    rows = table(DOCS / "debug.md", "## Which graph does a request use, and why?")
    assert {reason for reason, *_ in rows} == set(Reason)


def test_the_two_commands_of_the_readme_are_make_targets() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in WRITTEN:
        assert (
            set(re.findall(r"\bmake ([a-z]+)\b", "\n".join([*blocks(page, "", "bash"), *inline_code(page)]))) <= targets
        )


def test_the_command_of_the_readme_works() -> None:
    words = next(commands(ROOT / "README.md"))
    text = io.StringIO()
    with redirect_stdout(text):
        assert main([str(ROOT / word) if word.endswith(".png") else word for word in words]) == 0
    assert text.getvalue().strip() == "7"


def test_the_script_of_the_page_about_batches_works(monkeypatch: pytest.MonkeyPatch) -> None:
    [script] = re.findall(r"<!-- runs -->\n```python\n(.*?)```", (DOCS / "batch.md").read_text(), re.S)
    monkeypatch.chdir(ROOT)
    text = io.StringIO()
    with redirect_stdout(text):
        exec(script, {})
    assert text.getvalue().split() == ["7", "purple"]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_pictures_on_a_page_exist_or_are_written_by_a_command_it_shows(page: Path) -> None:
    text = page.read_text()
    written = set(re.findall(r"--(?:plot|out|svg) (\S+)", text))
    for name in set(re.findall(r"[\w./-]+\.(?:png|jpe?g|svg|webp|gif)\b", text)) - written:
        places = (ROOT, page.parent, ROOT / "examples" / "pictures")
        assert any((place / name).is_file() for place in places), name
