"""Packages are imported early if a GPU needs them, without torch's compiler, and import errors are not fatal."""

import importlib
import sys
from pathlib import Path
from subprocess import run

import pytest
import torch

from saccade.kernels import adapters, products
from saccade.kernels.packages import import_packages, without_torch_compile

FAKE_QUACK = """
import inspect, sys, torch
assert "dynamic" in inspect.signature(torch.compile).parameters
plain = torch.compile(lambda x: x + 1)
with_options = torch.compile(dynamic=True)(lambda x: x + 2)
refused = torch.compiler.disable(lambda x: x + 3)
numbers = plain(1), with_options(1), refused(1)
has_compiler = "torch._dynamo" in sys.modules
"""


def test_packages_that_mark_functions_for_torchs_compiler_do_not_import_it(tmp_path: Path) -> None:
    """Runs in a separate process, because other tests may have imported the compiler."""
    (tmp_path / "marking.py").write_text(FAKE_QUACK)
    code = (
        "import torch\n"
        "before = torch.compile, torch.compiler.disable\n"
        "from saccade.kernels.packages import without_torch_compile\n"
        "with without_torch_compile():\n    import marking\n"
        "assert (torch.compile, torch.compiler.disable) == before\n"
        "print(marking.numbers, marking.has_compiler)"
    )
    found = run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert found.stdout.split("\n")[0] == "(2, 3, 4) False", found.stderr


def test_torch_compile_is_restored_when_an_import_fails() -> None:
    before = torch.compile, torch.compiler.disable
    with pytest.raises(ModuleNotFoundError), without_torch_compile():
        importlib.import_module("a_package_that_nobody_has")
    assert (torch.compile, torch.compiler.disable) == before


@pytest.mark.parametrize(("capability", "is_wanted"), [((9, 0), True), ((10, 0), True), ((8, 9), False), (None, False)])
def test_only_packages_that_a_gpu_needs_are_imported_and_broken_ones_are_ignored(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, is_wanted: bool
) -> None:
    tried = []

    def broken(name: str) -> None:
        tried.append(name)
        raise RuntimeError(f"{name} is broken in a way that nobody thought of")

    monkeypatch.setattr("saccade.kernels.packages.use_private_kernel_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(products, "load_products", lambda: broken("quack"))
    monkeypatch.setattr(adapters, "load_flash_attention", lambda: broken("flash-attn"))
    before = torch.compile
    import_packages()
    assert tried == (["quack", "flash-attn"] if is_wanted else [])
    assert torch.compile is before
