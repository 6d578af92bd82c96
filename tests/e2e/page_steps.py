"""What a test does on the page: ask, wait, look."""

from pathlib import Path
from typing import Any

from tests.e2e.browser import Browser
from tests.e2e.page_stub import Stub

MARKDOWN = """# Title
Some **bold**, *italic*, `code` and [a link](https://example.org/a?b=1).

1. one
   - inner
2. two

| name | n |
|:--|--:|
| a \\| b | 1 |

```python
print("1 < 2")
```
> quoted
"""


def texts(browser: Browser, selector: str) -> list[str]:
    found: list[str] = browser.evaluate(f"[...document.querySelectorAll({selector!r})].map((n) => n.textContent)")
    return found


def click(browser: Browser, selector: str) -> None:
    browser.evaluate(f"document.querySelector({selector!r}).click()")


def show_on(browser: Browser, *, is_phone: bool) -> None:
    """A desktop in light colors, or a phone in dark ones."""
    if is_phone:
        browser.resize(360, 640, is_phone=True)
        browser.prefer(prefers_color_scheme="dark", prefers_reduced_motion="reduce")


def open_page(browser: Browser, stub: Stub) -> None:
    browser.open(stub.url)
    browser.wait("document.querySelectorAll('.sample').length > 0")


def ask(browser: Browser, question: str, *files: Path) -> None:
    if files:
        browser.choose_files("#files", *files)
        browser.wait(f"document.querySelectorAll('.thumb').length === {len(files)}")
    browser.type("#question", question)
    browser.press("Enter")


def wait_answers(browser: Browser, count: int) -> None:
    done = f"document.querySelectorAll('.turn.assistant').length === {count} && !document.querySelector('[aria-busy]')"
    browser.wait(done, 180)


def is_in_sight(browser: Browser, selector: str) -> bool:
    found = browser.evaluate(f"""(() => {{
      const box = document.querySelector({selector!r}).getBoundingClientRect();
      const top = document.elementFromPoint(box.left + box.width / 2, box.top + box.height / 2);
      return box.top >= 0 && box.bottom <= innerHeight && document.querySelector({selector!r}).contains(top);
    }})()""")
    return bool(found)


def violations(browser: Browser) -> list[Any]:
    logged = [event["entry"] for event in browser.events("Log.entryAdded")]
    thrown = browser.events("Runtime.exceptionThrown")
    return [entry for entry in logged if entry["source"] in ("security", "violation", "javascript")] + thrown
