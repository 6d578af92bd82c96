"""The reference of all commands as Markdown, from the settings themselves."""

from argparse import SUPPRESS, Action
from collections.abc import Mapping

from saccade.cli.groups import flag_names
from saccade.cli.parser import Parser

HEAD = """# Command line

Made by `saccade help --markdown`. Every flag is also a key of the file of `--config` and an environment variable:
`--max-model-len 8k` is `max-model-len: 8k` there and `SACCADE_MAX_MODEL_LEN=8k` here. Flags win over the file, the file
over the environment. Integers may end in k, m, g (1000) or K, M, G (1024).
"""


def reference(commands: Mapping[str, tuple[str, Parser]]) -> str:
    return "\n".join([HEAD, *(_command(name, about, parser) for name, (about, parser) in commands.items())])


def _command(name: str, about: str, parser: Parser) -> str:
    lines = [f"## saccade {name}", "", f"{about[0].upper()}{about[1:]}: `{parser.usage}`", ""]
    rows = [_row(action) for group in parser.groups for action in group.shown_actions if action.dest != "help"]
    return "\n".join([*lines, "| flag | meaning |", "|---|---|", *rows, ""])


def _row(action: Action) -> str:
    names = ", ".join(f"`{name}`" for name in flag_names(action))
    text = "" if action.help in (None, SUPPRESS) else str(action.help)
    return f"| {names} | {text.replace('%%', '%').replace('|', chr(92) + '|')} |"
