"""The site: it builds without a warning, loads nothing from elsewhere, and its references match the code."""

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from saccade.cli.aliases import REFUSED
from saccade.cli.commands import COMMANDS
from saccade.server.operators.openapi import build_document
from tests.docs import ROOT

LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}


class Loads(HTMLParser):
    """What a browser loads for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if name == LOADED.get(tag) and value]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text())
        assert [url for url in loads.found if "//" in url] == [], page.name
        local = [url.split("#")[0].split("?")[0] for url in loads.found if not url.startswith("data:")]
        if page.name != "404.html":  # its addresses are absolute
            assert [url for url in local if not (page.parent / url).is_file()] == []


def test_the_references_list_every_command_route_and_flag(site: Path) -> None:
    texts = {path.stem: path.read_text() for path in (site / "reference").glob("*.html")}
    assert [name for name in COMMANDS if f"saccade {name}" not in texts["cli"]] == []
    assert [path for path in build_document()["paths"] if path not in texts["api"]] == []
    assert [flag for flag in REFUSED if flag not in texts["foreign_flags"]] == []
    assert "get_metrics" in texts["python"] and "temperature" in texts["python"]
    assert "vllm:time_to_first_token_seconds" in texts["metrics"]
