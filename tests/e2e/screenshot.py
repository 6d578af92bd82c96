"""The pictures of the page in the documents, of a server with the bundled model; the live view's load is `bench serve`:
`python -m tests.e2e.screenshot http://127.0.0.1:8000 docs`."""

import io
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

from tests.e2e.bench_load import loaded
from tests.e2e.browser import Browser, find_browser
from tests.e2e.page_steps import click, wait_answers

LOAD_S = 45.0
NUM_PROMPTS = 400  # more than these seconds take
DESKTOP, PHONE = (1280, 900), (390, 780)


def main(url: str, folder: str) -> None:
    program = find_browser()
    assert program is not None, "no chromium"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(program, Path(profile))
        try:
            take_all(browser, url, Path(folder))
        finally:
            browser.close()


def take_all(browser: Browser, url: str, folder: Path) -> None:
    light = {"prefers_color_scheme": "light", "prefers_reduced_motion": "reduce"}
    browser.prefer(**light)
    browser.resize(*DESKTOP)
    for number in (1, 3, 4, 2):
        browser.open("about:blank#next")
        browser.open(url)
        browser.wait("document.querySelectorAll('.sample').length === 4")
        click(browser, f".sample:nth-child({number})")
        wait_answers(browser, 1)
    browser.evaluate("document.querySelector('.served').open = true; document.activeElement.blur()")
    browser.evaluate("document.getElementById('log').scrollTop = 1e6")
    save(browser, folder / "page.png")
    browser.resize(*PHONE, is_phone=True, scale=2)
    browser.prefer(**light | {"prefers_color_scheme": "dark"})
    browser.evaluate("document.querySelector('.served').open = false")
    save(browser, folder / "page-phone.png")
    browser.resize(*DESKTOP)
    click(browser, "#tab-live")
    with loaded(url, NUM_PROMPTS):
        time.sleep(LOAD_S)
        save(browser, folder / "page-live.png")


def save(browser: Browser, target: Path) -> None:
    time.sleep(1)
    Image.open(io.BytesIO(browser.screenshot())).convert("RGB").save(target, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"), sys.argv[2])
