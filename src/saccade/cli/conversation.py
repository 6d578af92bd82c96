"""A conversation in the terminal: input with history, slash commands, and answers that can be stopped."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from saccade.cli.prompt_parts import Part, fetched, image_part, parts_of
from saccade.errors import ConfigError, RequestError

PROMPT, MORE = "> ", ". "
BLOCK = '"""'
MAX_HISTORY = 1000
HELP = """\
/image PATH|URL  attach an image to the next question; paths and URLs in a question are attached, too
/system TEXT     set the system prompt; without TEXT, remove it
/clear           start a new conversation
/help            show this help
/exit            leave (also Ctrl-D)
Ctrl-C stops an answer. End a line with \\ to continue on the next one, or put several lines between \"\"\" and \"\"\".
"""
Message = dict[str, Any]
Answer = Callable[[list[Message]], str]


class TerminalChat:
    """Asks for questions until the input ends. `answer` prints the answer to the messages and returns its text; a
    question that it refuses is dropped. `images` belong to the first question."""

    def __init__(self, answer: Answer, images: list[Part]) -> None:
        self._answer = answer
        self._images = images
        self._system = ""
        self._messages: list[Message] = []

    def run(self) -> None:
        for text in entries():
            try:
                if not self._take(text):
                    return
            except (ConfigError, RequestError) as refused:
                sys.stderr.write(f"saccade: {refused}\n")
            except KeyboardInterrupt:  # while an image is fetched; answers end by themselves
                sys.stderr.write("\n(stopped)\n")

    def _take(self, text: str) -> bool:
        """Handles an entry; returns False if the conversation is over."""
        command, _, rest = text.partition(" ")
        rest = rest.strip()
        match command:
            case "/exit" | "/quit" | "/bye":
                return False
            case "/help" | "/?":
                sys.stderr.write(HELP)
            case "/clear":
                self._messages, self._images = [], []
                sys.stderr.write("new conversation\n")
            case "/system":
                self._system = rest
                sys.stderr.write("system prompt set\n" if rest else "system prompt removed\n")
            case "/image":
                self._add_image(rest)
            case _ if _is_command(command):
                sys.stderr.write(f"unknown command {command}; /help lists the commands\n")
            case _:
                self._ask(text)
        return True

    def _add_image(self, word: str) -> None:
        if not word:
            raise ConfigError("/image needs a path or a URL")
        self._images = [*self._images, *fetched([image_part(word.strip("'\""))])]
        sys.stderr.write(f"{len(self._images)} image(s) for the next question\n")

    def _ask(self, text: str) -> None:
        asked = [*self._messages, {"role": "user", "content": self._images + fetched(parts_of(text))}]
        system = [{"role": "system", "content": self._system}] if self._system else []
        said = self._answer([*system, *asked])
        self._messages, self._images = [*asked, {"role": "assistant", "content": said}], []


def _is_command(word: str) -> bool:
    """A path also starts with a slash."""
    return word.startswith("/") and word[1:].isalpha() and not Path(word).exists()


def entries() -> Iterator[str]:
    """Yields what the user enters until the input ends; Ctrl-C discards an unfinished entry."""
    while True:
        try:
            text = _entry().strip()
        except EOFError:
            sys.stderr.write("\n")
            return
        except KeyboardInterrupt:
            sys.stderr.write("\n(/exit or Ctrl-D leaves)\n")
            continue
        if text:
            yield text


def _entry() -> str:
    line = input(PROMPT)
    if line.lstrip().startswith(BLOCK):
        return _block(line.lstrip().removeprefix(BLOCK))
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(MORE))
    return "\n".join(lines)


def _block(first: str) -> str:
    lines = [first]
    while not lines[-1].rstrip().endswith(BLOCK):
        lines.append(input(MORE))
    lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
    return "\n".join(lines)


@contextmanager
def history(file: Path | None) -> Iterator[None]:
    """Enables arrow keys if Python has readline, and keeps the history in `file` if there is one."""
    try:
        import readline
    except ImportError:
        yield
        return
    readline.set_auto_history(True)
    if file is not None:
        with suppress(OSError):  # does not exist yet
            readline.read_history_file(file)
    try:
        yield
    finally:
        if file is not None:
            readline.set_history_length(MAX_HISTORY)
            with suppress(OSError):  # a full or read-only disk
                readline.write_history_file(file)
                file.chmod(0o600)
