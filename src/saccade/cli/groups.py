"""Groups of flags and their help: the usual flags, one group, a word search, or everything."""

import re
import sys
from argparse import SUPPRESS, Action, ArgumentParser, BooleanOptionalAction, HelpFormatter, Namespace
from collections.abc import Iterable
from shutil import get_terminal_size
from textwrap import fill
from typing import Any, NoReturn

FEW_FLAGS = 16  # a command with at most this many shows all of them
WIDEST, NARROWEST = 100, 40  # columns
# --help shows only these flags of a group, or the whole group if it has none of them.
USUAL = frozenset(
    (
        *("host", "port", "api_key", "admin_api_key", "served_model_name", "ssl_keyfile", "ssl_certfile"),
        *("limits", "reasoning_parser", "log_stats", "access_log"),
        *("revision", "chat_template", "device", "dtype", "quantization", "kv_cache_tokens"),
        *("gpu_memory_utilization", "graphs", "enforce_eager", "tensor_parallel_size"),
        *("max_num_seqs", "max_num_batched_tokens", "max_model_len"),
        *("allow_remote_media", "allowed_media_domains", "limit_mm_per_prompt"),
        *("backend", "base_url", "model", "dataset_name", "num_prompts", "random_input_len", "random_output_len"),
        *("image_count", "image_resolution", "request_rate", "max_concurrency", "report", "compare", "against"),
    )
)


class Group:
    """Flags that belong together. They have no argparse default, so that an unset flag can be told from a set one."""

    def __init__(self, parser: ArgumentParser, name: str, about: str) -> None:
        self.name, self.about = name, about
        self.actions: list[Action] = []
        self._flags = parser.add_argument_group(name)

    def add(self, *flags: str, **how: Any) -> None:
        self.actions.append(self._flags.add_argument(*flags, default=SUPPRESS, **how))

    @property
    def shown_actions(self) -> list[Action]:
        return [action for action in self.actions if action.help != SUPPRESS]

    @property
    def usual_actions(self) -> list[Action]:
        usual = [action for action in self.shown_actions if action.dest in USUAL]
        return usual if usual and len(self.shown_actions) > len(usual) else self.shown_actions


HELP_ALL = "--help-all"


class HelpAction(Action):
    """Handles `--help`, `--help=GROUP`, `--help=WORD`, and `--help=all` or `--help-all`."""

    def __init__(self, option_strings: list[str], dest: str, **how: Any) -> None:
        super().__init__(option_strings, dest, nargs="?", metavar="WHAT", **how)

    def __call__(self, parser: Any, namespace: Namespace, values: Any, option_string: Any = None) -> NoReturn:
        sys.stdout.write(help_text(parser, "all" if option_string == HELP_ALL else values or ""))
        raise SystemExit(0)


class FlagFormatter(HelpFormatter):
    def _format_action_invocation(self, action: Action) -> str:
        if isinstance(action, BooleanOptionalAction):
            return ", ".join([*flag_names(action), "--no-..."])
        return super()._format_action_invocation(action)


def help_text(parser: Any, topic: str) -> str:
    head = f"usage: {parser.usage}\n\n{filled(parser.description or '')}\n"
    groups: list[Group] = [group for group in parser.groups if group.shown_actions]
    few = sum(len(group.shown_actions) for group in groups) <= FEW_FLAGS
    if topic == "all" or (not topic and few):
        return head + "".join(_section(group, group.shown_actions) for group in groups)
    if not topic:
        usual = "".join(_section(group, group.usual_actions) for group in groups)
        return head + usual + "\n" + _rest(groups) + _how_to_see_more(groups)
    chosen = [group for group in groups if group.name == topic]
    if chosen:
        return head + "".join(_section(group, group.shown_actions) for group in chosen)
    found = [(group, [a for a in group.shown_actions if _mentions(a, topic)]) for group in groups]
    sections = "".join(_section(group, actions) for group, actions in found if actions)
    return head + (sections or f"\nno flag mentions {topic!r}\n\n{_how_to_see_more(groups)}")


def filled(text: str, indent: str = "", later: str | None = None) -> str:
    """Wraps text to the terminal's width without breaking flags. `later` indents all lines but the first."""
    following = indent if later is None else later
    return fill(text, _width(), initial_indent=indent, subsequent_indent=following, break_on_hyphens=False)


def first_sentence(text: str) -> str:
    words = " ".join(text.split())
    return re.split(r"(?<=\.) (?=\S)", words, maxsplit=1)[0].rstrip(".")


def name_of(settings: type[Any]) -> str:
    """`OfflineBenchSettings` is the group offline-bench."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", settings.__name__.removesuffix("Settings")).lower()


def flag_names(action: Action) -> list[str]:
    return [text for text in action.option_strings if not text.startswith("--no-")] or list(action.option_strings)


def _section(group: Group, actions: Iterable[Action]) -> str:
    width = _width()
    formatter = FlagFormatter("", max_help_position=min(36, width // 3), width=width)
    formatter.start_section("flags")
    formatter.add_arguments(actions)
    formatter.end_section()
    flags = formatter.format_help().partition("\n")[2]
    return f"\n{filled(f'{group.name}: {group.about}:')}\n{flags}"


def _rest(groups: Iterable[Group]) -> str:
    """Says how many flags of each group are not shown."""
    left = {group.name: len(group.shown_actions) - len(group.usual_actions) for group in groups}
    counts = ", ".join(f"{count} of {name}" for name, count in left.items() if count)
    return f"{filled(f'Not shown: {counts}.')}\n" if counts else ""


def _how_to_see_more(groups: Iterable[Group]) -> str:
    names = ", ".join(group.name for group in groups)
    more = (
        f"--help=GROUP shows a group ({names}), --help=WORD the flags that mention a word, --help-all everything. "
        "Every flag is also a key of the --config file and an environment variable: --max-model-len 8k is the line "
        "`max-model-len: 8k`, or SACCADE_MAX_MODEL_LEN=8k."
    )
    return f"{filled(more)}\n"


def _width() -> int:
    return min(max(get_terminal_size().columns, NARROWEST), WIDEST)


def _mentions(action: Action, word: str) -> bool:
    return word.lower() in f"{' '.join(action.option_strings)} {action.help}".lower()
