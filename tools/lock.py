"""Writes requirements.lock: the installed versions of everything that the dev extra needs.

The versions are those of the current environment, so test first and lock afterwards:

    make clean && make install LOCK=     # the newest versions that pyproject.toml allows
    make check && make test
    make lock
"""

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"
HEAD = """# What CI installs: constraints of `make install`. Written by `make lock`; tools/lock.py says how.
# What torch's builds for CUDA demand is not here (triton, nvidia-*, cuda-*): its builds for CPUs have none of it.
"""
LEFT_OUT = re.compile(r"triton|(nvidia|cuda)-.*")
Versions = dict[str, str]


def main() -> int:
    LOCK.write_text(HEAD + "".join(f"{name}=={version}\n" for name, version in sorted(locked().items())))
    sys.stdout.write(f"{LOCK.name}: {len(locked())} packages\n")
    return 0


def locked() -> Versions:
    """The installed versions of what the project and its dev extra need."""
    return installed(declared("dev"))


def installed(requirements: Iterable[Requirement]) -> Versions:
    """The installed versions of these requirements and everything they depend on."""
    found: Versions = {}
    seen: set[tuple[str, str]] = set()
    todo = [(requirement, extra) for requirement in requirements for extra in ("", *requirement.extras)]
    while todo:
        requirement, extra = todo.pop()
        name = canonicalize_name(requirement.name)
        if LEFT_OUT.fullmatch(name) or (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            here = distribution(name)
        except PackageNotFoundError:
            raise SystemExit(f"{name} is not installed; run `make install` first") from None
        found[name] = here.version.split("+")[0]  # 2.13.0+cpu of torch must also match other builds
        for need in map(Requirement, here.requires or ()):
            if is_needed(need, extra):
                todo += [(need, other) for other in ("", *need.extras)]
    return found


def declared(extra: str = "") -> Iterator[Requirement]:
    """The requirements of the project and of one extra, which may include other extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(project["optional-dependencies"][extra] if extra else ())]
    for requirement in map(Requirement, texts):
        if requirement.name == project["name"]:
            for other in sorted(requirement.extras):
                yield from map(Requirement, project["optional-dependencies"][other])
        elif is_needed(requirement):
            yield requirement


def is_needed(requirement: Requirement, extra: str = "") -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


if __name__ == "__main__":
    sys.exit(main())
