"""The documents as tests see them: pages, fenced blocks, tables, inline code."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
WRITTEN = [page for page in PAGES if page.name not in ("log.md", "changelog.md")]  # these describe the past
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$", re.M | re.S)


def blocks(page: Path, *languages: str) -> list[str]:
    """Fenced blocks in one of these languages."""
    return [found["text"] for found in _FENCE.finditer(page.read_text()) if found["language"] in languages]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def inline_code(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(page))


def commands(page: Path) -> Iterator[list[str]]:
    """The arguments of every `saccade` command in fenced blocks."""
    for text in blocks(page, "", "bash"):
        for line in re.sub(r"\\\n\s*", "", text).splitlines():
            found = re.match(r"(?:\$ )?(?:\.venv/bin/)?saccade (.*)", line)
            if found:
                yield shlex.split(found[1], comments=True)


def table(page: Path, heading: str) -> list[list[str]]:
    """The rows of the first table after a heading, as cells, without its first two lines."""
    behind = f"\n{page.read_text()}".split(f"\n{heading}\n", 1)[1]
    lines = behind[behind.index("\n|") + 1 :].split("\n\n", 1)[0].splitlines()
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)
