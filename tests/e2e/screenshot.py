"""The pictures of the page in the documents, of a server with the bundled model:
`python -m tests.e2e.screenshot http://127.0.0.1:8000 docs`."""

import base64
import io
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from urllib.request import Request, urlopen

from PIL import Image

from tests.e2e.browser import Browser, find_browser
from tests.e2e.page_steps import click, wait_answers

PICTURES = Path(__file__).parents[2] / "examples" / "pictures"
NUM_CLIENTS = 6
LOAD_S = 45.0
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
    with load(url):
        time.sleep(LOAD_S)
        save(browser, folder / "page-live.png")


def save(browser: Browser, target: Path) -> None:
    time.sleep(1)
    Image.open(io.BytesIO(browser.screenshot())).convert("RGB").save(target, optimize=True)


def new_image(image: Image.Image) -> str:
    """A data URL of an image with another pixel, which no cache knows."""
    image, buffer = image.copy(), io.BytesIO()
    image.putpixel((0, 0), tuple(os.urandom(3)))
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


@contextmanager
def load(url: str) -> Iterator[None]:
    """Requests with and without images, of a few lengths, more at a time than run."""
    has_ended = threading.Event()
    images = [Image.open(path).convert("RGB") for path in sorted(PICTURES.glob("*.png"))]

    def client(own: int) -> None:
        for number in count(own):
            if has_ended.is_set():
                return
            content = [{"type": "text", "text": f"Repeat the word apple {own} {number}"}]
            if number % 3 == 0:
                image = {"url": new_image(images[number % len(images)])}
                content.insert(0, {"type": "image_url", "image_url": image})  # type: ignore[dict-item]
            fields = {"messages": [{"role": "user", "content": content}], "max_tokens": 8 + 7 * number % 30}
            body = json.dumps({**fields, "ignore_eos": True}).encode()
            headers = {"content-type": "application/json"}
            urlopen(Request(f"{url}/v1/chat/completions", body, headers), timeout=120).read()

    threads = [threading.Thread(target=client, args=(own,)) for own in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        has_ended.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"), sys.argv[2])
