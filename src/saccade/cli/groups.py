"""Groups of flags and their help: an overview, one group, what a word finds, or all."""

import re
import sys
from argparse import SUPPRESS, Action, ArgumentParser, HelpFormatter, Namespace
from collections.abc import Iterable
from textwrap import fill
from typing import Any, NoReturn

FEW_FLAGS = 16  # a command with no more shows all of them at once


class Group:
    """Flags that belong together. None has a default: what was not given can come from elsewhere."""

    def __init__(self, parser: ArgumentParser, name: str, about: str) -> None:
        self.name, self.about = name, about
        self.actions: list[Action] = []
        self._flags = parser.add_argument_group(name)

    def add(self, *flags: str, **how: Any) -> None:
        self.actions.append(self._flags.add_argument(*flags, default=SUPPRESS, **how))

    @property
    def shown_actions(self) -> list[Action]:
        return [action for action in self.actions if action.help != SUPPRESS]


class HelpAction(Action):
    """`--help`, `--help=GROUP`, `--help=WORD` and `--help=all`."""

    def __init__(self, option_strings: list[str], dest: str, **how: Any) -> None:
        super().__init__(option_strings, dest, nargs="?", metavar="WHAT", **how)

    def __call__(self, parser: Any, namespace: Namespace, values: Any, option_string: Any = None) -> NoReturn:
        sys.stdout.write(help_text(parser, values or ""))
        raise SystemExit(0)


def help_text(parser: Any, topic: str) -> str:
    head = f"usage: {parser.usage}\n\n{fill(parser.description or '', 100)}\n"
    groups: list[Group] = [group for group in parser.groups if group.shown_actions]
    few = sum(len(group.shown_actions) for group in groups) <= FEW_FLAGS
    if topic == "all" or (not topic and few):
        return head + "".join(_section(group, group.shown_actions) for group in groups)
    if not topic:
        return head + "".join(_outline(group) for group in groups) + "\n" + _how_to_see_more(groups)
    chosen = [group for group in groups if group.name == topic]
    if chosen:
        return head + "".join(_section(group, group.shown_actions) for group in chosen)
    found = [(group, [a for a in group.shown_actions if _mentions(a, topic)]) for group in groups]
    sections = "".join(_section(group, actions) for group, actions in found if actions)
    return head + (sections or f"\nno flag mentions {topic!r}\n\n{_how_to_see_more(groups)}")


def name_of(settings: type[Any]) -> str:
    """`OfflineBenchSettings` is the group offline-bench."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", settings.__name__.removesuffix("Settings")).lower()


def flag_names(action: Action) -> list[str]:
    """The names of a flag, without the one that switches it off."""
    return [text for text in action.option_strings if not text.startswith("--no-")] or list(action.option_strings)


def _section(group: Group, actions: Iterable[Action]) -> str:
    formatter = HelpFormatter("", max_help_position=40, width=110)
    formatter.start_section(f"{group.name}: {group.about.rstrip('.')}")
    formatter.add_arguments(actions)
    formatter.end_section()
    return "\n" + formatter.format_help()


def _outline(group: Group) -> str:
    names = " ".join(flag_names(action)[-1] for action in group.shown_actions)
    return f"\n{group.name}: {group.about}\n{_filled(names)}\n"


def _filled(names: str) -> str:
    return fill(names, 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def _how_to_see_more(groups: Iterable[Group]) -> str:
    names = ", ".join(group.name for group in groups)
    return (
        f"--help=GROUP explains a group ({names}), --help=WORD what mentions a word,\n"
        "--help=all everything. Every flag is also a key of --config FILE.yaml and an environment variable:\n"
        "--max-model-len 8k is `max-model-len: 8k` there and SACCADE_MAX_MODEL_LEN=8k here.\n"
    )


def _mentions(action: Action, word: str) -> bool:
    return word.lower() in f"{' '.join(action.option_strings)} {action.help}".lower()
