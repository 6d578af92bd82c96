"""Runs one benchmark in several checkouts in turn, and compares the figures:

    python -m tools.in_turn --tree before=../other --tree now=. -- saccade bench vision MODEL --sizes 560x560

After `--` comes a module with its arguments, which writes figures to the file of `--json`. Every run is a separate
process, with the sources of its checkout and the packages of this environment. The order of the checkouts changes from
round to round, so that drift of the machine favors none of them.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import log
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from saccade.bench.serving.serving_comparison import with_interval
from saccade.bench.serving.serving_turns import turn_order
from saccade.terminal import print_table

Figures = dict[str, float]


def main(words: Sequence[str] | None = None) -> int:
    flags, console = _parser().parse_args(words), Console(soft_wrap=True)
    trees = dict(tree.split("=", 1) for tree in flags.tree)
    if len(trees) < 2 or flags.rounds < 2:
        raise SystemExit(f"{len(trees)} checkouts in {flags.rounds} rounds; an interval needs two of each")
    found: dict[str, list[Figures]] = {name: [] for name in trees}
    with TemporaryDirectory() as folder:
        for number in range(flags.rounds):
            for name in (list(trees)[index] for index in turn_order(number, len(trees))):
                console.print(f"round {number + 1} of {flags.rounds}: {name}", markup=False)
                output = Path(flags.keep or folder) / f"{name}-{number + 1}.json"
                data = run(Path(trees[name]), flags.command, output)
                found[name].append(dict(figures(data, flags.figures.split(","))))
    print_table(console, table(found))
    return 0


def run(tree: Path, command: Sequence[str], output: Path) -> object:
    """Runs the command with the sources of a checkout, and returns the JSON it wrote."""
    own = [str(tree.resolve() / "src"), str(tree.resolve())]
    packages = [path for path in (os.environ.get("PYTHONPATH"),) if path]  # noqa: TID251 - handed on
    place = os.environ | {"PYTHONPATH": os.pathsep.join(own + packages)}  # noqa: TID251 - handed on
    done = subprocess.run(
        [sys.executable, "-m", *command, "--json", str(output)], env=place, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{tree}: {' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    found: object = json.loads(output.read_text())
    return found


def figures(data: object, wanted: Collection[str], name: str = "") -> Iterator[tuple[str, float]]:
    """Yields the numbers with wanted keys. Each is named by its place and the strings next to it."""
    if isinstance(data, list):
        for number, one in enumerate(data, start=1):
            yield from figures(one, wanted, f"{name} {number}")
    elif isinstance(data, dict):
        words = (value for key, value in data.items() if isinstance(value, str))
        own = " ".join([name, *words]) if name else ""
        for key, value in data.items():
            if key in wanted and isinstance(value, int | float):
                yield f"{own} {key}".strip(), float(value)
            else:
                yield from figures(value, wanted, f"{own} {key}".strip())


def ratio(first: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """The other checkout's figure divided by the first's, and a 95% interval. Runs are compared within their round."""
    return with_interval([log(b) - log(a) for a, b in zip(first, other, strict=True)])


def table(found: Mapping[str, Sequence[Figures]]) -> Table:
    first, *others = found
    rounds = [one for runs in found.values() for one in runs]
    shared = [name for name in rounds[0] if all(one.get(name, 0.0) > 0 for one in rounds)]
    if not shared:
        raise SystemExit(f"no figure is in all runs; those of {first}: {', '.join(rounds[0]) or 'none'} (--figures)")
    rows = Table("", *found, *(part for name in others for part in (f"{name} : {first}", "95% interval")))
    for name in shared:
        values = {tree: [one[name] for one in runs] for tree, runs in found.items()}
        cells = [f"{median(own):.3f}" for own in values.values()]
        for other in others:
            middle, low, high = ratio(values[first], values[other])
            cells += [f"{middle:.3f}", f"{low:.3f} to {high:.3f}"]
        rows.add_row(name, *cells)
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tree", action="append", default=[], metavar="NAME=PATH", help="a checkout; ratios are to the first"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--figures", default="ms,host_ms", help="keys of the figures to compare")
    parser.add_argument("--keep", default="", help="folder for what the runs write")
    parser.add_argument("command", nargs="+", metavar="-- MODULE ...")
    return parser


if __name__ == "__main__":
    sys.exit(main())
