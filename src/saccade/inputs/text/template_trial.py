"""A chat template's first rendering, in a process of its own with little memory and time. Its steps are counted
(its fuel), but a few of them can double a text until no memory is left, and templates come with checkpoints."""

import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from saccade.config import worker_environment
from saccade.errors import ConfigError
from saccade.inputs.text.chat_template import ChatTemplate, read_template

MAX_BYTES = 256 * 2**20
MAX_CPU_S, MAX_WALL_S = 10, 120
TRIED = 0x5A  # the exit code of a trial that came to its end

_USER: dict[str, Any] = {"role": "user", "content": "What is this?"}
_CALL = {"type": "function", "id": "1", "function": {"name": "look", "arguments": {"at": "it"}}}
_TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
_TALKS: tuple[list[dict[str, Any]], ...] = (
    [_USER],
    [{"role": "system", "content": "Be brief."}, _USER, {"role": "assistant", "content": "A cat."}, _USER],
    [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}],
    [_USER, {"role": "assistant", "content": "", "tool_calls": [_CALL]}, {"role": "tool", "content": "a cat"}],
)


def try_template(folder: Path, file: str = "") -> None:
    """Refuses a template that takes more than its share for a short conversation. One that does not compile or refuses
    the conversation is left to others to report."""
    source = read_template(folder, file)
    if source is None:
        return
    command = (sys.executable, "-P", "-m", "saccade.inputs.text.template_trial")
    try:
        done = subprocess.run(
            command,
            input=source.encode(errors="replace"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=worker_environment(),
            timeout=MAX_WALL_S,
            check=False,
        )
        is_tried = done.returncode == TRIED
    except subprocess.TimeoutExpired:
        is_tried = False
    if not is_tried:
        limits = f"{MAX_BYTES // 2**20} MiB or {MAX_CPU_S} s"
        raise ConfigError(
            f"the chat template needs more than {limits} for a short conversation; use another (--chat-template)"
        )


def main() -> int:
    source = sys.stdin.buffer.read().decode(errors="replace")
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    if pages:
        most = pages * resource.getpagesize() + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    with suppress(Exception):
        template = ChatTemplate(source)
        for talk in _TALKS:
            for tools in (None, [_TOOL]):
                with suppress(Exception):
                    template.render(talk, tools=tools)
    return TRIED


if __name__ == "__main__":
    sys.exit(main())
