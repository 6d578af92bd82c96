"""Checks the host's side of the CUDA path without a GPU: `make standin`, or `python -m tests.standin` in an environment
with torch's build for CUDA. See README.md in this folder."""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from tests.standin.build import FOLDER, CannotBuildError, build
from tests.standin.cases import CAPABILITIES, CASES, Case
from tests.standin.found import Found

ROOT = Path(__file__).parents[2]
CASE_TIMEOUT_S = 1800  # the first run compiles every kernel
SHOWN = {
    "decode 1": r"decode/full .*tokens=1",
    "decode 8": r"decode/full .*tokens=8",
    "prefill 64": r"prefill/full .*tokens=64",
    "head 1": r"head/full tokens=1",
    "vision 98": r"vision/full .*units=98",
}


def main(arguments: Sequence[str] | None = None) -> int:
    flags = parsed(arguments)
    try:
        library = build()
    except CannotBuildError as error:
        print(error, file=sys.stderr)
        return 2
    rows, is_good = [], True
    for case in chosen(flags):
        found = run(case, library, flags.src)
        is_good &= found is not None and not found.problems()
        rows.append([case.name, *row_of(found)])
        for line in ["its process failed"] if found is None else found.problems():
            print(f"{case.name}: {line}")
        if found is not None and flags.nodes:
            print_nodes(case, found)
    print_table(rows)
    return 0 if is_good else 1


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.standin", description=__doc__)
    parser.add_argument("--case", action="append", choices=[one.name for one in CASES], help="default: all")
    for name, allowed in {"capability": CAPABILITIES, "dtype": None, "quantization": ("auto", "fp8")}.items():
        parser.add_argument(f"--{name}", choices=allowed, help=f"changes the {name} of the cases; default case: hopper")
    parser.add_argument("--nodes", action="store_true", help="list the nodes of the graphs in the table, for diff")
    parser.add_argument("--src", type=Path, default=ROOT / "src", help="other sources, such as another checkout's src")
    return parser.parse_args(arguments)


def chosen(flags: argparse.Namespace) -> list[Case]:
    changes = {name: value for name in ("capability", "dtype", "quantization") if (value := getattr(flags, name))}
    names = flags.case or ([CASES[0].name] if changes else [one.name for one in CASES])
    return [replace(one, name=" ".join((one.name, *changes.values())), **changes) for one in CASES if one.name in names]


def run(case: Case, library: Path, sources: Path) -> Found | None:
    kernels = FOLDER / "kernels"
    kernels.mkdir(exist_ok=True)
    settings = {
        "LD_PRELOAD": str(library),
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "TRITON_CACHE_DIR": str(kernels),
        "STANDIN_CAPABILITY": case.capability,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{sources.absolute()}{os.pathsep}{ROOT}",
    }
    with tempfile.NamedTemporaryFile() as file:
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.standin.one_case", file.name]
        done = subprocess.run(
            command,
            input=msgspec.json.encode(case),
            env=os.environ | settings,
            stderr=subprocess.PIPE,
            timeout=CASE_TIMEOUT_S,
            check=False,
        )
        found = None if done.returncode else msgspec.json.decode(Path(file.name).read_bytes(), type=Found)
    if found is None or found.problems():
        print(done.stderr.decode(errors="replace"), file=sys.stderr)
    return found


def shown_nodes(found: Found) -> dict[str, list[str]]:
    """By column. A bucket that these sources do not have is missing."""
    return {
        name: nodes
        for name, pattern in SHOWN.items()
        for key, nodes in found.nodes.items()
        if re.fullmatch(pattern, key)
    }


def row_of(found: Found | None) -> list[str]:
    if found is None:
        return []
    counts = [len(found.violations), len(found.failures), len(found.compiled), found.num_modules, found.num_mallocs]
    nodes = shown_nodes(found)
    sizes = [str(len(nodes[name])) if name in nodes else "-" for name in SHOWN]
    return [*map(str, counts), str(found.num_replays), str(len(found.nodes)), *sizes]


def print_nodes(case: Case, found: Found) -> None:
    for name, nodes in shown_nodes(found).items():
        print(f"{case.name}, {name}: {len(nodes)} nodes")
        for node in nodes:
            print(f"  {node}")


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Compiled, modules and mallocs count from when the engine was ready."""
    heads = ["case", "violations", "failed", "compiled", "modules", "mallocs", "replays", "graphs", *SHOWN]
    width = max(len(row[0]) for row in rows)
    for row in (heads, *rows):
        cells = (f"{text:>{len(head)}}" for head, text in zip(heads[1:], row[1:], strict=False))
        print(f"{row[0]:{width}}", *cells, sep="  ")


if __name__ == "__main__":
    sys.exit(main())
