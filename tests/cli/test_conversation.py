from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from saccade.cli import conversation as talk
from saccade.cli import prompt_parts
from saccade.cli.conversation import TerminalChat, entries, history
from saccade.cli.prompt_parts import fetched, image_part, parts_of
from saccade.errors import ConfigError, RequestError

Typed = Callable[..., None]
ADDRESS = "https://a.example/b/c.png?size=3&x=1"


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Typed:
    """What a user types, line by line; an exception is raised where it stands, and the input ends behind the last."""

    def set_lines(*lines: str | BaseException) -> None:
        left = iter(lines)

        def read(prompt: str) -> str:
            line = next(left, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)

    return set_lines


class Asked:
    """Answers with how many questions there were, and remembers the messages."""

    def __init__(self) -> None:
        self.messages: list[list[dict[str, Any]]] = []

    def __call__(self, messages: list[dict[str, Any]]) -> str:
        if "refuse" in str(messages[-1]):
            raise RequestError("that is refused")
        self.messages.append(messages)
        return f"answer {len(self.messages)}"


def text(words: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": words}]


def test_entries_may_have_several_lines(typed: Typed) -> None:
    typed("one", "", "a \\", "b\\", "c", '"""x', "", '  y"""', '"""z"""')
    assert list(entries()) == ["one", "a \nb\nc", "x\n\n  y", "z"]


def test_ctrl_c_drops_what_is_being_entered(typed: Typed, capsys: pytest.CaptureFixture[str]) -> None:
    typed("a \\", KeyboardInterrupt(), "b")
    assert list(entries()) == ["b"]
    assert "Ctrl-D" in capsys.readouterr().err


def test_a_conversation_has_commands(typed: Typed, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "a b.png"
    picture.write_bytes(b"pixels")
    asked = Asked()
    typed(
        "hello", "/system Be short.", f"/image '{picture}'", "what is it?", "/clear", "/system", "again", "/exit", "x"
    )
    TerminalChat(asked, []).run()
    image = {"type": "image", "image": picture}
    first = [{"role": "user", "content": text("hello")}, {"role": "assistant", "content": "answer 1"}]
    system = {"role": "system", "content": "Be short."}
    assert asked.messages == [
        first[:1],
        [system, *first, {"role": "user", "content": [image, *text("what is it?")]}],
        [{"role": "user", "content": text("again")}],
    ]


def test_what_is_refused_is_not_part_of_the_conversation(typed: Typed, capsys: pytest.CaptureFixture[str]) -> None:
    asked = Asked()
    typed("refuse", "/image ./gone.png", "/image", "/nonsense", "./gone.png ?", "/help", "fine")
    TerminalChat(asked, [{"type": "image", "image": "given"}]).run()
    assert asked.messages == [[{"role": "user", "content": [{"type": "image", "image": "given"}, *text("fine")]}]]
    told = capsys.readouterr().err
    for part in ("that is refused", "./gone.png is not a file", "/image needs", "unknown command /nonsense", "/clear"):
        assert part in told


def test_ctrl_c_while_an_image_is_fetched_does_not_end_the_conversation(
    typed: Typed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fetch(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        raise KeyboardInterrupt

    monkeypatch.setattr(prompt_parts, "_fetch", fetch)
    asked = Asked()
    typed("hello", f"What is {ADDRESS} ?", f"/image {ADDRESS}", "again")
    TerminalChat(asked, []).run()
    assert [message["content"] for message in asked.messages[-1]] == [text("hello"), "answer 1", text("again")]
    assert capsys.readouterr().err.count("(stopped)") == 2


def test_history_outlasts_a_conversation(tmp_path: Path) -> None:
    readline = pytest.importorskip("readline")
    file = tmp_path / "history"
    with history(file):
        readline.add_history("a question")
    assert "question" in file.read_text() and file.stat().st_mode & 0o777 == 0o600
    readline.clear_history()
    with history(file):
        assert readline.get_history_item(readline.get_current_history_length()) == "a question"
    with history(tmp_path / "no" / "such"):
        pass


def test_addresses_in_a_prompt_are_images() -> None:
    assert parts_of(f"What is {ADDRESS} ?") == [*text("What is"), {"type": "image", "image": ADDRESS}, *text("?")]
    plain = "http://a.example/x.JPG"
    assert parts_of(f"See {plain}?") == [*text("See"), {"type": "image", "image": plain}, *text("?")]
    assert parts_of("See https://a.example/page ?") == text("See https://a.example/page ?")
    assert image_part(ADDRESS) == {"type": "image", "image": ADDRESS}
    with pytest.raises(ConfigError, match=r"gone\.png is not a file"):
        image_part("gone.png")


def test_addresses_of_this_machine_are_refused() -> None:
    """As a server refuses them: an address may come from somebody else's text."""
    with pytest.raises(RequestError):
        fetched([{"type": "image", "image": "http://127.0.0.1:9/a.png"}])


def test_only_addresses_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetch(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"fetched": part} for part in parts]

    monkeypatch.setattr(prompt_parts, "_fetch", fetch)
    local = [*text("a https://a.example/b.png"), {"type": "image", "image": Path("c.png")}]
    assert fetched(local) is local
    assert fetched([image_part(ADDRESS)]) == [{"fetched": {"type": "image", "image": ADDRESS}}]


def test_help_names_every_command() -> None:
    assert all(word in talk.HELP for word in ("/image", "/system", "/clear", "/help", "/exit", "Ctrl-C", '"""'))
