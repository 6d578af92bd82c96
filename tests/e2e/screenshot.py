"""The picture of the page in the documents: `python -m tests.e2e.screenshot http://127.0.0.1:8000 docs/page.png`."""

import io
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image, ImageDraw

from tests.e2e.browser import Browser, find_browser

QUESTION = "What shape is on the left?"


def main(url: str, target: str) -> None:
    program = find_browser()
    assert program is not None, "no chromium"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        picture = Path(folder) / "shapes.png"
        draw_shapes(picture)
        browser = Browser(program, Path(folder) / "profile", width=1240, height=760)
        try:
            image = ask(browser, url, picture)
        finally:
            browser.close()
    Image.open(io.BytesIO(image)).convert("RGB").quantize(128).save(target, optimize=True)


def ask(browser: Browser, url: str, picture: Path) -> bytes:
    browser.open(url)
    browser.wait("document.getElementById('model').options.length === 1")
    browser.choose_files("#files", picture)
    browser.wait("document.querySelectorAll('#chosen img').length === 1")
    browser.evaluate("document.getElementById('tokens').value = 24")
    browser.type("#question", QUESTION)
    browser.press_enter()
    browser.wait("document.querySelector('#served tr') && !document.querySelector('[aria-busy]')", timeout_s=180)
    time.sleep(0.5)
    return browser.screenshot()


def draw_shapes(path: Path) -> None:
    image = Image.new("RGB", (256, 192), "#f4f1ea")
    pen = ImageDraw.Draw(image)
    pen.ellipse((30, 40, 120, 130), fill="#d03030")
    pen.rectangle((150, 70, 225, 145), fill="#2f5fd0")
    image.save(path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
