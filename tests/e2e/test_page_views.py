"""What the page keeps, how it works by keyboard alone, on a phone, in light and dark, and its live view."""

import json
from pathlib import Path

import pytest

from tests.e2e.browser import Browser
from tests.e2e.page_steps import MARKDOWN, ask, click, is_in_sight, open_page, texts, violations, wait_answers
from tests.e2e.page_stub import Stub


def test_conversations_are_there_after_a_reload(browser: Browser, stub: Stub, picture: Path) -> None:
    open_page(browser, stub)
    ask(browser, "first question", picture)
    wait_answers(browser, 1)
    click(browser, "#new")
    ask(browser, "second question")
    wait_answers(browser, 1)
    browser.wait("document.querySelectorAll('.talk').length === 2")
    open_page(browser, stub)
    browser.wait("document.querySelectorAll('.talk').length === 2")
    assert texts(browser, ".talk") == ["second question", "first question"]
    click(browser, "li:nth-child(2) .talk")
    browser.wait("document.querySelector('.turn img')?.naturalWidth === 400")
    assert texts(browser, ".markdown") == ["yes"]
    ask(browser, "and now?")
    wait_answers(browser, 2)
    assert len(stub.asked[-1]["messages"]) == 3 and len(stub.asked[-1]["messages"][0]["content"]) == 2
    click(browser, "[aria-label='Rename first question']")
    browser.evaluate("document.querySelector('#ask input').select()")
    browser.type("#ask input", "renamed")
    browser.press("Enter")
    browser.wait("!!document.querySelector('[aria-label=\"Delete renamed\"]')")
    click(browser, "[aria-label='Delete renamed']")
    browser.press("Enter")
    browser.wait("document.querySelectorAll('.talk').length === 1 && document.querySelectorAll('.sample').length > 0")


def test_what_is_kept_is_bounded(browser: Browser, stub: Stub) -> None:
    open_page(browser, stub)
    found = browser.evaluate("""(async () => {
      const store = await import("/page/store.js");
      Object.assign(store.LIMITS, { conversations: 4, itemBytes: 100, mediaBytes: 250 });
      for (let i = 0; i < 7; i++) {
        const media = [{ id: "m" + i, url: "data:," + i, bytes: i === 5 ? 101 : 100, name: "a", kind: "image" }];
        await store.save({ id: "t" + i, title: "t" + i, updated: i, turns: [{ role: "user", text: "", media }] });
      }
      const names = (await store.list()).map((talk) => talk.id);
      const kept = [];
      for (const name of names) kept.push((await store.load(name)).turns[0].media[0].url || "");
      return [names, kept, await store.load("t0")];
    })()""")
    assert found[0] == ["t6", "t5", "t4", "t3"], "the newest"
    assert found[1] == ["data:,6", "", "data:,4", ""], "one was too large, one too many"
    assert found[2] is None


def test_a_question_is_edited_and_answered_again(browser: Browser, stub: Stub, picture: Path) -> None:
    open_page(browser, stub)
    ask(browser, "What?", picture)
    wait_answers(browser, 1)
    click(browser, "[aria-label='Answer again']")
    browser.wait("document.querySelectorAll('.turn').length === 2 && !document.querySelector('[aria-busy]')")
    click(browser, "[aria-label='Edit question']")
    browser.type(".editing textarea", " color")
    browser.press("Enter")
    browser.wait("document.querySelector('.bubble')?.textContent === 'What? color'")
    wait_answers(browser, 1)
    assert [len(one["messages"]) for one in stub.asked] == [1, 1, 1]
    assert [part["type"] for part in stub.asked[2]["messages"][0]["content"]] == ["image_url", "text"]


def test_the_keyboard_is_enough(browser: Browser, stub: Stub, picture: Path) -> None:
    open_page(browser, stub)
    stub.pieces, stub.pause_s = ["word "] * 4000, 0.05  # until it is told to stop
    assert browser.evaluate("document.activeElement.id") == "question"
    browser.call("Input.insertText", text="one")
    browser.press("Enter", shift=True)
    browser.call("Input.insertText", text="two")
    browser.press("Enter")
    browser.wait("document.querySelector('.markdown')?.textContent.includes('word word')")
    browser.press("Escape")
    wait_answers(browser, 1)
    assert stub.is_abandoned.wait(120), "the server kept writing"
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
    for text in ("2 running, 1 waiting", "25 %", "1,024 tokens", "200 ms", "3 too large", "66 % replayed"):
        assert text in shown, text
    assert violations(browser) == []
