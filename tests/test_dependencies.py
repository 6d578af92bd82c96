"""The declared dependencies are the packages that are imported."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Imported only if installed: by an extra, with torch on a GPU, or for one task of `saccade eval`.
OPTIONAL = {
    "av",
    "gguf",
    "triton",
    "scikit-learn",
    "flash-attn-4",
    "quack-kernels",
    "matplotlib",
    "opentelemetry",
    "ray",
}
WITH_OTHERS = {"pydantic-core": "pydantic"}


def name_of(text: str) -> str:
    return re.split(r"[\s\[<>=!~;]", text)[0].lower().replace("_", "-")


def imported() -> set[str]:
    """The distributions of all modules that the package imports."""
    modules: set[str] = set()
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules.add(node.module.split(".")[0])
    known = packages_distributions()
    found = {name_of(known[m][0]) for m in modules - set(sys.stdlib_module_names) - {"saccade"} if m in known}
    found = {
        "opentelemetry" if name.startswith("opentelemetry-") else name for name in found
    }  # several distributions share this module
    return {WITH_OTHERS.get(name, name) for name in found}


def test_the_package_imports_every_dependency_and_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {name_of(text) for text in project["dependencies"]}
    assert needed - imported() == set(), "only tests use these: they belong to the dev extra"
    assert imported() - needed - OPTIONAL == set()
