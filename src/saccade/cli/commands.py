"""Finds and runs the command that was called."""

import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from saccade import __version__
from saccade.cli.groups import filled, flag_names
from saccade.cli.parser import Parser, did_you_mean
from saccade.errors import SaccadeError
from saccade.terminal import discard_output, warn

EXIT_BAD_SETTING = 2
EXIT_INTERRUPTED = 130
DESCRIPTION = (
    "Serves vision-language models: every forward pass is a CUDA-graph replay, and every replay the right one."
)

MARKDOWN_HEAD = """# Command line

Made by `saccade help --markdown`. Every flag is also a key of the file of `--config` and an environment variable:
`--max-model-len 8k` is `max-model-len: 8k` there and `SACCADE_MAX_MODEL_LEN=8k` here. Flags win over the file, the file
over the environment. Integers may end in k, m, g (1000) or K, M, G (1024).
"""
# A one-line summary, and the module with the command's `new_parser(name)` and `run(flags)`.
COMMANDS = {
    "serve": ("serve a model behind the OpenAI API", "serve"),
    "deploy": ("serve a model on a Ray cluster, by replicas on its machines", "deploy"),
    "run": ("ask a model once, with images", "run"),
    "list": ("models that are here: the bundled one and those of the hub's cache", "models"),
    "pull": ("fetch a model from the hub", "models"),
    "verify": ("every graph against an eager run, in sequences that break stale ones", "graph_checks"),
    "audit": ("what graphs froze: captures with different inputs, compared node by node", "graph_checks"),
    "replay": ("a pass that a shadow check found wrong, again with its graph and without", "replay"),
    "eval": ("questions with known answers: accuracy, and what was taken for what", "evaluate"),
    "bench serve": ("load a server: time to first token, throughput, goodput", "bench"),
    "bench offline": ("prefill and decode of a model: eager and graphs, beside their limits", "bench"),
    "bench vision": ("vision tower by image size: eager, capacity and exact graphs", "bench"),
    "bench graphs": ("a made-up prefill: eager, piecewise and full graphs, by tokens", "bench"),
    "bench allreduce": ("sums over ranks by rows: each algorithm, in a graph and out of one", "bench"),
    "bench startup": ("how long a server takes until it is ready, and on what", "bench"),
    "bench soak": ("mixed and hostile load: unexpected answers, and what the server does not give back", "bench"),
    "bench scale": ("a simulation of many replicas: cache hits and latency by routing policy", "bench"),
    "plan": ("what a model needs on a GPU, and what is left for requests", "plan"),
    "explain": ("how a request would be run: tokens, buckets, padding, graphs", "explain"),
    "trace": ("what a running server does for some seconds, for Perfetto", "trace"),
    "doctor": ("check the machine and a model, and say what to fix", "doctor"),
}


def main(argv: Sequence[str] | None = None) -> int:
    status = _guarded(list(sys.argv[1:] if argv is None else argv))
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
    return status


def _guarded(words: list[str]) -> int:
    try:
        return dispatch(words)
    except SaccadeError as error:
        sys.stderr.write(f"saccade: {error}\n")
        return EXIT_BAD_SETTING
    except SystemExit as stop:  # after --help
        return int(stop.code or 0)
    except BrokenPipeError:  # the reader of our output is gone
        discard_output()
        return 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "--help=all", "--help-all", "help"):
        return show_help(words[1:])
    if words[0] in ("-V", "--version"):
        sys.stdout.write(f"saccade {__version__}\n")
        return 0
    name, rest = find_command(words)
    if name == "bench":
        sys.stdout.write(overview("bench "))
        return 0
    module = _module(name)
    flags = module.new_parser(name).read(rest)
    for note in flags.notes:
        warn(note)
    status: int = module.run(flags)
    return status


def find_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """Splits `words` into the command and its arguments; the command is `bench` if no benchmark is named."""
    pair = " ".join(words[:2])
    if pair in COMMANDS:
        return pair, list(words[2:])
    if words[0] in COMMANDS:
        return words[0], list(words[1:])
    if words[0] == "bench" and (len(words) == 1 or words[1] in ("-h", "--help")):
        return "bench", []
    is_bench = words[0] == "bench"
    met = pair if is_bench else words[0]
    known = [name for name in [*COMMANDS, "bench", "help"] if name.startswith("bench ") == is_bench]
    kind = "flag" if met.startswith("-") else "command"
    raise SaccadeError(f"unknown {kind} {met}{did_you_mean(met, known)} (see `saccade --help`)")


def show_help(words: Sequence[str]) -> int:
    if words[:1] == ["--markdown"]:
        sys.stdout.write("\n".join([MARKDOWN_HEAD, *map(_markdown, COMMANDS)]))
        return 0
    if words and not words[0].startswith("-"):
        name, rest = find_command(words)
        return dispatch([*name.split(), f"--help={rest[0]}" if rest else "--help"])
    sys.stdout.write(overview(""))
    return 0


def _module(name: str) -> ModuleType:
    return import_module(f"saccade.cli.{COMMANDS[name][1]}")


def new_parser(name: str) -> Parser:
    parser: Parser = _module(name).new_parser(name)
    return parser


def _markdown(name: str) -> str:
    """The command's section of the reference."""
    about, parser = COMMANDS[name][0], new_parser(name)
    actions = [action for group in parser.groups for action in group.shown_actions if action.dest != "help"]
    lines = [f"## saccade {name}", "", f"{about[0].upper()}{about[1:]}: `{parser.usage}`", ""]
    lines += ["| flag | meaning |", "|---|---|"]
    for action in actions:
        names = ", ".join(f"`{flag}`" for flag in flag_names(action))
        text = (action.help or "").replace("%%", "%").replace("|", chr(92) + "|")
        lines.append(f"| {names} | {text} |")
    return "\n".join([*lines, ""])


def overview(prefix: str) -> str:
    width = max(map(len, COMMANDS))
    shown = {name: about for name, (about, _) in COMMANDS.items() if name.startswith(prefix)}
    lines = [filled(f"{name:<{width}}  {about}", "  ", " " * (width + 4)) for name, about in shown.items()]
    return "\n".join(
        [
            f"usage: saccade {prefix}COMMAND [flags]",
            "",
            filled(DESCRIPTION),
            "",
            *lines,
            "",
            filled("`saccade COMMAND --help` explains a command; `saccade --version` names the version."),
            "",
        ]
    )
