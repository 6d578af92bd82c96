"""`saccade replay`: reruns a pass that failed a shadow check, with its graph and without."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from saccade.cli.graph_checks import check, loaded
from saccade.cli.parser import Parser
from saccade.errors import ConfigError
from saccade.scheduling.orders import RepeatReplay
from saccade.terminal import Output

if TYPE_CHECKING:
    from saccade.execution.shadow_file import Replayed, ShadowFile

EXIT_DIFFERENT = 1


def new_parser(name: str) -> Parser:
    about = (
        "Build the engine that wrote a file to --shadow-dir, load the inputs from the file, and run them with the "
        "graph that was found wrong and without it. Exits with 1 if the results differ. MODEL replaces the model "
        "folder recorded in the file. Several ranks write a file each: give one of them, with the others beside it."
    )
    return Parser(name, words="FILE [MODEL]", max_words=2, about=about)


def run(flags: Namespace) -> int:
    if not flags.words:
        raise ConfigError("no file was given: saccade replay FILE [MODEL]")
    from saccade.execution.shadow_file import file_of_rank, read_file  # imports torch

    path = Path(flags.words[0]).expanduser()
    file = read_file(path)
    for rank in range(file.origin.settings.tensor_parallel_size):
        if not (needed := file_of_rank(path, rank)).is_file():
            raise ConfigError(f"every rank wrote a file, and all are needed: {needed} is missing")
    model = flags.words[1] if flags.words[1:] else file.origin.model
    settings = replace(file.origin.settings, shadow=0.0, revision="", chat_template="")
    with loaded(model, settings, file.origin.limits, Console(stderr=True)) as built:
        by_rank: list[Replayed] = check(built, RepeatReplay(str(path.resolve())))
    show(Output(), file, by_rank)
    return EXIT_DIFFERENT if any(found.differences for found in by_rank) else 0


def show(console: Console, file: "ShadowFile", by_rank: "Sequence[Replayed]") -> None:
    versions = ", ".join(f"{name} {version}" for name, version in file.versions.items())
    lines = [f"graph [{file.key}], inputs {file.digest}, recorded with {versions}"]
    for rank, found in enumerate(by_rank):
        lines += [
            *([f"rank {rank}:"] if len(by_rank) > 1 else []),
            f"in the graph    {found.replay_digest}",
            f"without a graph {found.eager_digest}",
            *map(str, found.differences),
        ]
    if "block_tables" in file.arrays and "slots" not in file.cached:
        lines.append("the context was too long to store: both runs read different keys and values than the server did")
    is_different = any(found.differences for found in by_rank)
    lines.append("DIFFERENT" if is_different else "equal")
    recorded = [
        f"{f'on rank {rank}: ' if len(by_rank) > 1 else ''}{found.as_recorded[0]}"
        for rank, found in enumerate(by_rank)
        if found.as_recorded
    ]
    if not is_different and recorded:
        lines.append(
            f"The server's replay was different: {recorded[0]}. A freshly captured graph is correct, so the "
            "error arose while the server ran."
        )
    for line in lines:
        console.print(line, markup=False, highlight=False)
