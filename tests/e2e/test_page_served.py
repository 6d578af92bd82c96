"""The page of a real server: the bundled model answers about an image, and the live view shows how."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.bench_load import loaded
from tests.e2e.browser import Browser
from tests.e2e.bundled_server import running_bundled
from tests.e2e.page_steps import ask, click, is_in_sight, texts, violations, wait_answers

WATCH_S = 300.0  # on a busy machine


@pytest.fixture(scope="module")
def address(any_browser: Browser) -> Iterator[str]:
    with running_bundled() as found:
        yield found


def open_samples(browser: Browser, address: str) -> None:
    browser.open(address)
    browser.wait("document.querySelectorAll('.sample').length === 4")


def test_an_image_is_answered_and_nobody_else_is_asked(browser: Browser, address: str) -> None:
    open_samples(browser, address)
    [lead] = texts(browser, ".welcome p")
    assert lead.startswith("This small model comes with Saccade"), "whatever name it is served under"
    click(browser, ".sample:nth-child(2)")
    wait_answers(browser, 1)
    assert texts(browser, ".turn.assistant .markdown") == ["2 blue circles"]
    passes = texts(browser, ".served tbody td:first-child")
    assert set(passes) >= {"vision", "prefill", "decode"} and not texts(browser, ".served .eager")
    sent = [event["request"]["url"] for event in browser.events("Network.requestWillBeSent")]
    assert {address + "/", address + "/page/main.js", address + "/v1/chat/completions"} <= set(sent)
    assert all(url.startswith((address, "data:", "blob:")) for url in sent), "the page asked somebody else"
    assert violations(browser) == []


def test_a_broken_image_is_refused_where_the_eye_is(browser: Browser, address: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    open_samples(browser, address)
    ask(browser, "What is it?", broken)
    wait_answers(browser, 1)
    [text] = texts(browser, ".problem p")
    assert "image" in text and is_in_sight(browser, ".problem")
    browser.wait("document.querySelector('.pictures').textContent === 'broken.png: cannot be shown'")


def test_the_live_view_follows_the_load_of_bench_serve(browser: Browser, address: str) -> None:
    open_samples(browser, address)
    click(browser, "#tab-live")
    with loaded(address) as ended:
        for phase, count in (("vision", 2), ("prefill", 2), ("decode", 20)):
            browser.wait(f"document.querySelectorAll('.bar.{phase}').length >= {count}", WATCH_S)
        browser.wait("/[1-9] running, [1-9] waiting/.test(document.getElementById('live').innerText)", WATCH_S)
        browser.wait("document.querySelectorAll('.chart rect').length > 0", WATCH_S)
    assert [run.returncode for run in ended] == [0] * len(ended) != [], ended
    click(browser, ".passes details summary")
    browser.wait("document.querySelectorAll('.passes tbody tr').length === 20")
    assert "decode/full" in " ".join(texts(browser, ".passes tbody td"))
    browser.wait("/0 running, 0 waiting/.test(document.getElementById('live').innerText)")
    assert violations(browser) == []


def test_the_page_of_routes_shows_and_tries_them(browser: Browser, address: str) -> None:
    browser.seen.clear()
    browser.open(f"{address}/docs")
    browser.wait("document.querySelectorAll('article').length > 15")
    article = "document.getElementById('post-v1-chat-completions')"
    browser.evaluate(f"{article}.querySelectorAll('details').forEach((one) => {{ one.open = true; }})")
    fields = browser.evaluate(f"[...{article}.querySelectorAll('td code')].map((cell) => cell.textContent)")
    assert {"messages", "max_tokens", "temperature", "image_url"} <= set(fields)
    assert "curl '" in browser.evaluate(f"{article}.querySelector('pre').textContent")
    browser.evaluate(f"{article}.querySelector('button.main').click()")
    answer = browser.wait(f"[...{article}.querySelectorAll('pre')].at(-1).textContent.match(/^200\\n[^]*/)?.[0]")
    assert '"choices"' in answer
    logged = [event["entry"] for event in browser.events("Log.entryAdded")]
    assert not [entry for entry in logged if entry["level"] == "error" and "/docs" in entry.get("url", "")], logged
    assert violations(browser) == []
