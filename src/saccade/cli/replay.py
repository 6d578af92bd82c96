"""`saccade replay`: reruns a pass that failed a shadow check, with its graph and without."""

from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from saccade.cli.parser import Parser
from saccade.errors import ConfigError
from saccade.terminal import Output, stages

if TYPE_CHECKING:
    from saccade.execution.shadow_file import Replayed, ShadowFile

EXIT_DIFFERENT = 1


def new_parser(name: str) -> Parser:
    about = (
        "Build the engine that wrote a file to --shadow-dir, load the inputs from the file, and run them with the "
        "graph that was found wrong and without it. Exits with 1 if the results differ. MODEL replaces the model "
        "folder recorded in the file."
    )
    return Parser(name, words="FILE [MODEL]", max_words=2, about=about)


def run(flags: Namespace) -> int:
    if not flags.words:
        raise ConfigError("no file was given: saccade replay FILE [MODEL]")
    from saccade import LLM  # imports torch
    from saccade.execution.shadow_file import read_file, replay_file

    file = read_file(Path(flags.words[0]).expanduser())
    model = flags.words[1] if flags.words[1:] else file.origin.model
    settings = replace(file.origin.settings, shadow=0.0, verify="off", revision="", chat_template="")
    with (
        stages(Console(stderr=True), f"loading {model}"),
        LLM(model, **asdict(settings), **asdict(file.origin.limits)) as llm,
    ):
        found = replay_file(llm.executor, file)
    show(Output(), file, found)
    return EXIT_DIFFERENT if found.differences else 0


def show(console: Console, file: "ShadowFile", found: "Replayed") -> None:
    versions = ", ".join(f"{name} {version}" for name, version in file.versions.items())
    lines = [
        f"graph [{file.key}], inputs {file.digest}, recorded with {versions}",
        f"in the graph    {found.replay_digest}",
        f"without a graph {found.eager_digest}",
        *map(str, found.differences),
    ]
    if "block_tables" in file.arrays and "slots" not in file.cached:
        lines.append("the context was too long to store: both runs read different keys and values than the server did")
    lines.append("DIFFERENT" if found.differences else "equal")
    if not found.differences and found.as_recorded:
        lines.append(
            f"The server's replay was different: {found.as_recorded[0]}. A freshly captured graph is correct, so the "
            "error arose while the server ran."
        )
    for line in lines:
        console.print(line, markup=False, highlight=False)
