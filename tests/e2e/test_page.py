"""Chatting on the page in a real browser, against a server whose answers are hostile, odd or missing."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from saccade.server.page.page_files import page_files
from tests.e2e.browser import Browser
from tests.e2e.page_steps import (
    MARKDOWN,
    ask,
    click,
    is_in_sight,
    open_page,
    show_on,
    texts,
    violations,
    wait_answers,
)
from tests.e2e.page_stub import Stub

PICTURES = Path(__file__).parents[2] / "examples" / "pictures"
HOSTILE = [
    '<img src=x onerror="window.hacked=1"><script>window.hacked=2</script> & "quoted" \u00e9\U0001f642',
    "[a](javascript:window.hacked=3) [b](JaVaScRiPt:window.hacked=3) [c](data:text/html,<script>1</script>)",
    "![d](https://evil.example/track.png) [e](//evil.example) <a href='javascript:window.hacked=4'>f</a>",
    "| <svg onload=window.hacked=5> | b |\n|---|---|\n| <iframe src=x> | `<b>` |",
    "```html\n</code></pre><script>window.hacked=6</script>\n```",
    "# <style>*{display:none}</style>\n> <object data=x>\n- <form action=x>",
]


def test_the_page_is_small_files_that_load_nothing_from_elsewhere() -> None:
    found = page_files()
    scripts = {name: file.data.decode() for name, file in found.items() if name.endswith((".js", ".html", ".css"))}
    assert {"index.html", "main.js", "style.css"} <= set(scripts)
    for name, text in scripts.items():
        assert len(text.splitlines()) < 250, name
        assert not re.findall(
            r"innerHTML|outerHTML|insertAdjacent|\beval\(|new Function| style=|@import|<script>", text
        ), name
        addresses = re.findall(r"https?://[\w./]+", text)
        assert set(addresses) <= {"http://www.w3.org/2000/svg", "http://some"}, name
        assert max(map(len, text.splitlines())) <= 120, name
    assert not re.findall(r" on\w+=|<style", scripts["index.html"])
    assert sum(len(file.data) for file in found.values()) < 150_000
    samples = [name for name in found if name.endswith(".png")]
    assert len(samples) >= 4
    for name in samples:
        assert found[name].data == (PICTURES / name).read_bytes(), "the sample is the one of the examples"


def test_hostile_answers_stay_text(browser: Browser, stub: Stub) -> None:
    whole = "\n\n".join(HOSTILE)
    stub.pieces = [whole[i : i + 7] for i in range(0, len(whole), 7)]
    open_page(browser, stub)
    ask(browser, "What <i>is</i> this?")
    wait_answers(browser, 1)
    assert browser.evaluate("window.hacked") is None
    risky = "script, img, iframe, object, svg:not(.glyph), form, style, embed, link, [onerror], [onload]"
    assert browser.evaluate(f"document.querySelectorAll('.markdown :is({risky})').length") == 0
    links = browser.evaluate("[...document.querySelectorAll('.markdown a')].map((a) => [a.href, a.rel])")
    assert links == [["https://evil.example/track.png", "noopener noreferrer nofollow"]]
    shown = browser.evaluate("document.querySelector('.markdown').textContent")
    for text in ("<script>window.hacked=2</script>", "<iframe src=x>", "</code></pre>", "\u00e9\U0001f642", "<style>"):
        assert text in shown
    assert texts(browser, ".turn.user .bubble") == ["What <i>is</i> this?"]
    assert texts(browser, "#model option") == ["<b>model"]
    assert violations(browser) == []


def test_markdown_is_drawn(browser: Browser, stub: Stub) -> None:
    stub.pieces = [MARKDOWN]
    open_page(browser, stub)
    ask(browser, "hello")
    wait_answers(browser, 1)
    for selector, expected in {
        "h3": "Title",
        "strong": "bold",
        "em": "italic",
        "p code": "code",
        "a": "a link",
        "ol > li > ul > li": "inner",
        "tbody td": "a | b",
        "pre": 'print("1 < 2")',
        "blockquote": "quoted",
    }.items():
        assert texts(browser, f".markdown {selector}")[0] == expected, selector
    assert browser.evaluate("document.querySelectorAll('.markdown ol > li').length") == 2


@pytest.mark.parametrize("way", ["the clipboard API", "the old way", "none"])
def test_what_is_copied_is_the_text_as_it_was_written(browser: Browser, stub: Stub, way: str) -> None:
    stub.pieces = [MARKDOWN]
    open_page(browser, stub)
    ask(browser, "hello <b>there</b>")
    wait_answers(browser, 1)
    if way != "the clipboard API":  # as at an address that is not secure
        browser.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    if way == "none":
        browser.evaluate("document.execCommand = () => false")
    written = {"Copy code": 'print("1 < 2")', "Copy question": "hello <b>there</b>", "Copy answer": MARKDOWN}
    for label, text in written.items():
        browser.evaluate("announcer.textContent = question.value = ''")
        browser.evaluate(f"document.querySelector('[aria-label=\"{label}\"]').focus()")
        browser.press("Enter")
        said = browser.wait("announcer.textContent")
        if way == "none":
            assert said == "This browser does not allow copying"
            continue
        assert said == "Copied" and browser.evaluate("document.activeElement.ariaLabel") == label
        browser.paste("#question")
        assert browser.wait("question.value") == text


def test_no_text_takes_long_to_draw(browser: Browser, stub: Stub) -> None:
    """Each of these is slow in a parser that looks again and again; this one would not come back."""
    open_page(browser, stub)
    parts = [
        "[",
        "*a ",
        "**",
        "`",
        "_a",
        "> ",
        "- ",
        "![",
        "|",
        "~~",
        "# ",
        " ",
        "1. ",
        "[a](",
        "\\\\",
        "http://",
        "|-",
    ]
    found = browser.evaluate(f"""(async () => {{
      const {{ markdown }} = await import("/page/markdown.js");
      return {json.dumps(parts)}.map((part) => markdown(part.repeat(Math.ceil(100_000 / part.length))).length);
    }})()""")
    assert len(found) == len(parts)


def test_media_of_all_kinds_are_sent(browser: Browser, stub: Stub, picture: Path, tmp_path: Path) -> None:
    video, letter = tmp_path / "clip.mp4", tmp_path / "letter.txt"
    video.write_bytes(b"no real video")
    letter.write_text("no image")
    open_page(browser, stub)
    browser.choose_files("#files", letter)
    browser.wait("document.getElementById('composer-note').textContent !== ''")
    assert texts(browser, "#composer-note") == ["letter.txt is neither an image nor a video."]
    ask(browser, "several", picture, video)
    wait_answers(browser, 1)
    for name in ("paste", "drop"):
        event = {"paste": "ClipboardEvent", "drop": "DragEvent"}[name]
        field = {"paste": "clipboardData", "drop": "dataTransfer"}[name]
        browser.evaluate(f"""(() => {{
          const transfer = new DataTransfer();
          const bytes = new Uint8Array({json.dumps(list(picture.read_bytes()))});
          transfer.items.add(new File([bytes], "a.png", {{ type: "image/png" }}));
          document.body.dispatchEvent(new {event}("{name}", {{ {field}: transfer, bubbles: true, cancelable: true }}));
        }})()""")
        browser.wait("document.querySelectorAll('.thumb').length === 1")
        browser.evaluate("document.getElementById('question').focus()")
        browser.press("Enter")  # an image without words
        wait_answers(browser, 2 if name == "paste" else 3)
    messages = stub.asked[-1]["messages"]
    kinds = [[part["type"] for part in m["content"]] for m in messages if m["role"] == "user"]
    assert kinds == [["image_url", "video_url", "text"], ["image_url"], ["image_url"]]
    assert messages[0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2 + ["user"]
    click(browser, ".turn.user .picture")
    browser.wait("document.querySelector('#viewer[open] img')?.naturalWidth === 400")


def test_sampling_and_the_system_prompt_are_sent(browser: Browser, stub: Stub) -> None:
    open_page(browser, stub)
    ask(browser, "plain")
    wait_answers(browser, 1)
    assert {"temperature", "top_p", "seed", "max_completion_tokens"}.isdisjoint(stub.asked[0])
    click(browser, "#tune")
    fields = {"#system": "Be brief.", "#temperature": "0.5", "#top-p": "0.9", "#max-tokens": "12", "#seed": "7"}
    for selector, text in fields.items():
        browser.type(selector, text)
    ask(browser, "again")
    wait_answers(browser, 2)
    sent = stub.asked[1]
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (sent["temperature"], sent["top_p"], sent["max_completion_tokens"], sent["seed"]) == (0.5, 0.9, 12, 7)
    browser.evaluate("document.getElementById('temperature').value = '9'")
    click(browser, "#tune")
    ask(browser, "wrong")
    assert texts(browser, "#composer-note") == ["Temperature must be a number from 0 to 2."]
    assert browser.evaluate("document.activeElement.id") == "temperature" and len(stub.asked) == 2


def test_reasoning_is_folded_and_passes_are_this_answers_own(browser: Browser, stub: Stub) -> None:
    stub.reasoning = "let me <b>think</b>"
    open_page(browser, stub)
    ask(browser, "hello")
    wait_answers(browser, 1)
    assert browser.evaluate(
        "!document.querySelector('.reasoning').open && !document.querySelector('.reasoning').hidden"
    )
    assert texts(browser, ".reasoning div") == ["let me <b>think</b>"]
    assert texts(browser, ".served summary") == ["Served by 4 graph replays, 1 without a graph"]
    assert texts(browser, ".served .eager td")[1] == "none: it is larger than every bucket"
    assert texts(browser, ".served tbody tr:nth-child(2) td") == [
        "prefill",
        "full requests=5 tokens=128",
        "1",
        "96",
        "25 %",
    ]
    assert "7 tokens in, 3 out" in texts(browser, ".stats")[0]


@pytest.mark.parametrize(
    ("vision", "answer", "box"),
    [
        ({}, '```json\n[{"bbox_2d": [100, 200, 500, 600], "label": "c"}]\n```', [40, 40, 160, 80]),
        ({}, '```py\n[1]\n```\nso:\n```JSON\n[{"bbox_2d": [0, 0, 500, 500], "label": "c"}]\n```', [0, 0, 200, 100]),
        ({"unit": 28}, '[{"bbox_2d": [250, 250, 500, 500], "label": "c"}]', [100, 50, 100, 50]),  # as Qwen2-VL
        # as Qwen2.5-VL, of 392 x 196 pixels
        (
            {"unit": 28, "has_pixel_places": True},
            '[{"bbox_2d": [98, 49, 196, 98], "label": "c"}]',
            [100, 50, 100, 50],
        ),
        ({}, "It is <ref>c</ref><box>(500,0),(1000,500)</box>.", [200, 0, 200, 100]),
        ({}, 'Here: {"point_2d": [250, 500], "label": "c"}', [100, 100]),
    ],
)
def test_places_that_an_answer_names_are_drawn(
    browser: Browser, stub: Stub, picture: Path, vision: dict[str, Any], answer: str, box: list[int]
) -> None:
    stub.vision, stub.pieces = {**stub.vision, **vision}, [answer]
    open_page(browser, stub)
    ask(browser, "Where?", picture)
    wait_answers(browser, 1)
    names = ["x", "y", "width", "height"] if len(box) == 4 else ["cx", "cy"]
    found = browser.evaluate(
        f"{json.dumps(names)}.map((name) => Number(document.querySelector('.foot .shape').getAttribute(name)))"
    )
    assert found == pytest.approx(box, abs=0.01)
    assert texts(browser, ".foot svg text") == ["c"]


@pytest.mark.parametrize("is_phone", [False, True], ids=["desktop", "phone"])
def test_a_refused_image_is_told_where_the_eye_is(browser: Browser, stub: Stub, picture: Path, is_phone: bool) -> None:
    show_on(browser, is_phone=is_phone)
    stub.refusal = "messages[0].content[0]: the image is broken"
    open_page(browser, stub)
    ask(browser, "What is it?", picture)
    wait_answers(browser, 1)
    assert texts(browser, ".problem p") == [stub.refusal]
    assert is_in_sight(browser, ".problem")
    stub.refusal = ""
    ask(browser, "Another question")
    wait_answers(browser, 2)
    assert [m["content"] for m in stub.asked[1]["messages"]] == ["Another question"], "what failed is not sent again"
    click(browser, ".problem button")  # try again
    wait_answers(browser, 1)
    assert [part["type"] for part in stub.asked[2]["messages"][0]["content"]] == ["image_url", "text"]
    assert texts(browser, ".turn.assistant .markdown") == ["yes"]


@pytest.mark.parametrize("is_phone", [False, True], ids=["desktop", "phone"])
def test_a_key_is_asked_for_in_place(browser: Browser, stub: Stub, is_phone: bool) -> None:
    show_on(browser, is_phone=is_phone)
    stub.key = "first"
    browser.open(stub.url)
    browser.wait("!!document.querySelector('.welcome .key')")
    assert is_in_sight(browser, ".welcome .key") and is_in_sight(browser, ".welcome .key-form button")
    browser.type(".key", "first")
    browser.press("Enter")
    browser.wait("document.querySelectorAll('.sample').length > 0")
    stub.key = "second"
    ask(browser, "hello")
    wait_answers(browser, 1)
    assert is_in_sight(browser, ".problem .key") and is_in_sight(browser, ".problem button") and stub.asked == []
    browser.type(".problem .key", "second")
    browser.press("Enter")
    browser.wait("document.querySelector('.markdown')?.textContent === 'yes'")
    wait_answers(browser, 1)
    assert browser.evaluate("JSON.stringify(localStorage) + sessionStorage.getItem('saccade.key')") == "{}second"
    assert violations(browser) == []


@pytest.mark.parametrize("is_phone", [False, True], ids=["desktop", "phone"])
def test_a_server_that_is_gone_is_told(browser: Browser, stub: Stub, is_phone: bool) -> None:
    show_on(browser, is_phone=is_phone)
    open_page(browser, stub)
    stub.pieces, stub.is_cut = ["half an ans"], True
    ask(browser, "hello")
    wait_answers(browser, 1)
    assert "broke off" in texts(browser, ".problem")[0] and texts(browser, ".markdown") == ["half an ans"]
    stub.error, stub.is_cut = "the engine is gone", False
    click(browser, ".problem button")
    browser.wait("document.querySelector('.problem p')?.textContent === 'the engine is gone'")
    stub.shutdown()
    stub.server_close()
    ask(browser, "hello?")
    wait_answers(browser, 2)
    assert "cannot be reached" in texts(browser, ".problem")[-1]
    assert is_in_sight(browser, ".turn:last-child .problem")
