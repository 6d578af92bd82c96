"""One name, one thing: a search for a class or a module has one result."""

import ast
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"


def test_no_public_class_name_means_two_things() -> None:
    names = Counter(
        node.name
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert len(names) > 500, "the sources were found"
    assert [name for name, count in names.items() if count > 1] == []


def test_no_module_name_means_two_things() -> None:
    names = Counter(path.name for path in SOURCE.rglob("*.py") if not path.name.startswith("__"))
    assert len(names) > 200, "the sources were found"
    assert [name for name, count in names.items() if count > 1] == []
