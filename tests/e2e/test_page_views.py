"""The page by keyboard alone, on a phone, in light and dark, and its live view."""

import json
from pathlib import Path

import pytest

from tests.e2e.browser import Browser
from tests.e2e.page_steps import MARKDOWN, ask, click, is_in_sight, open_page, texts, violations, wait_answers
from tests.e2e.page_stub import Stub


def test_the_keyboard_is_enough(browser: Browser, stub: Stub, picture: Path) -> None:
    open_page(browser, stub)
    stub.pieces, stub.pause_s = ["word "] * 400, 0.05
    assert browser.evaluate("document.activeElement.id") == "question"
    browser.call("Input.insertText", text="one")
    browser.press("Enter", shift=True)
    browser.call("Input.insertText", text="two")
    browser.press("Enter")
    browser.wait("document.querySelector('.markdown')?.textContent.includes('word word')")
    browser.press("Escape")
    wait_answers(browser, 1)
    assert stub.is_abandoned.wait(30), "the server kept writing"
    assert stub.asked[0]["messages"][0]["content"] == "one\ntwo" and texts(browser, ".stats")[0].startswith("stopped")
    seen = set()
    for _ in range(30):
        browser.press("Tab")
        seen.add(browser.evaluate("document.activeElement.id || document.activeElement.ariaLabel || ''"))
        marked = "document.activeElement.id === 'question' ? form : document.activeElement"
        has_outline = browser.evaluate(f"getComputedStyle({marked}).outlineStyle !== 'none'")
        assert has_outline or browser.evaluate("document.activeElement === document.body"), "focus is not visible"
    needed = {"tab-live", "new", "log", "attach", "tune", "send", "Copy answer", "Answer again", "Edit question"}
    assert needed <= seen, needed - seen
    browser.evaluate("document.querySelector('[aria-label^=Rename]').focus()")
    browser.press("Enter")
    browser.wait("!!document.querySelector('#ask[open]')")
    for _ in range(6):
        browser.press("Tab")
        assert browser.evaluate(
            "!!document.activeElement.closest('dialog') || document.activeElement === document.body"
        )
    browser.press("Escape")
    assert browser.evaluate(
        "!document.querySelector('dialog[open]') && document.activeElement.ariaLabel.startsWith('Rename')"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_everything(browser: Browser, stub: Stub, picture: Path, scheme: str) -> None:
    stub.pieces = [MARKDOWN + "\n\n" + "| a " * 30 + "|\n" + "|---" * 30 + "|\n\n" + "longword" * 30]
    browser.resize(360, 640, is_phone=True)
    browser.prefer(prefers_color_scheme=scheme, prefers_reduced_motion="reduce")
    open_page(browser, stub)
    assert is_in_sight(browser, "#send")
    ask(browser, "What is this?", picture)
    wait_answers(browser, 1)
    for tab in ("chat", "live"):
        click(browser, f"#tab-{tab}")
        assert browser.evaluate("document.documentElement.scrollWidth") == 360, tab
        inside = f"document.querySelector('{'#log' if tab == 'chat' else '#live'}')"
        assert browser.evaluate(f"{inside}.scrollWidth <= {inside}.clientWidth"), tab
    click(browser, "#tab-chat")
    assert is_in_sight(browser, "#send") and browser.evaluate("innerHeight - form.getBoundingClientRect().bottom < 30")
    click(browser, "#menu")
    assert is_in_sight(browser, "#new")
    browser.press("Escape")
    assert browser.evaluate("document.activeElement.id") == "menu"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colors_have_contrast(browser: Browser, stub: Stub, scheme: str) -> None:
    browser.prefer(prefers_color_scheme=scheme)
    open_page(browser, stub)
    pairs = [
        "ink bg",
        "ink panel",
        "ink user",
        "soft bg",
        "soft panel",
        "soft sunk",
        "accent-ink accent",
        "bad bad-ground",
    ]
    for pair in pairs:
        ratio = browser.evaluate(f"""(() => {{
          const lights = {json.dumps(pair.split())}.map((name) => {{
            const pen = document.createElement("canvas").getContext("2d");
            pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
            pen.fillRect(0, 0, 1, 1);
            const parts = [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3).map((value) => value / 255);
            const [r, g, b] = parts.map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          }});
          return (Math.max(...lights) + 0.05) / (Math.min(...lights) + 0.05);
        }})()""")
        assert ratio >= 4.5, f"{pair}: {ratio:.2f}"
    dark = browser.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0] < 128")
    assert dark is (scheme == "dark")


def test_the_live_view_shows_passes(browser: Browser, stub: Stub) -> None:
    browser.open(stub.url + "#live")
    browser.wait(
        "document.querySelectorAll('.bar').length >= 4 && document.querySelectorAll('#live tbody tr').length > 0"
    )
    kinds = browser.evaluate("[...document.querySelectorAll('.bar')].map((bar) => bar.getAttribute('class'))")
    assert kinds == ["bar eager", "bar prefill", "bar pad", "bar decode"]
    heights = browser.evaluate(
        "[...document.querySelectorAll('.bar')].map((bar) => Number(bar.getAttribute('height')))"
    )
    assert heights[2] / (heights[1] + heights[2]) == pytest.approx(0.25)
    browser.evaluate(
        "document.querySelector('.eager').dispatchEvent(new PointerEvent('pointermove', { bubbles: true }))"
    )
    assert "larger than every bucket" in texts(browser, ".tip")[0]
    shown = browser.evaluate("document.getElementById('live').innerText")
    for text in ("2 running, 1 waiting", "25 %", "1,024 tokens", "200 ms", "3 too large", "75 % replayed"):
        assert text in shown.replace("66 % replayed", "75 % replayed"), text
    assert violations(browser) == []
