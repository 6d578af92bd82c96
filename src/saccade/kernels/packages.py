"""Imports GPU kernel packages early. Only for a process that saccade owns: torch is patched during the import."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

import torch

from saccade.config import use_private_kernel_cache
from saccade.kernels.dispatch import is_hopper


def import_packages() -> None:
    """Takes seconds, so call it while nothing waits. Does nothing unless a GPU needs the packages; import errors are
    left to the code that needs them."""
    if not torch.cuda.is_available() or not any(is_hopper(i) for i in range(torch.cuda.device_count())):
        return
    import_anyway()


def import_anyway() -> None:
    """The same without asking for GPUs, which would open them."""
    use_private_kernel_cache()
    with suppress(Exception), unmarked_for_compilation():
        importlib.import_module("saccade.kernels.products").load_products()
    with suppress(Exception):
        importlib.import_module("saccade.kernels.adapters").load_flash_attention()


@contextmanager
def unmarked_for_compilation() -> Iterator[None]:
    """Makes torch.compile and torch.compiler.disable no-ops. quack decorates functions that we do not use with them,
    and that alone imports torch's compiler: two seconds of every start."""
    kept = torch.compile, torch.compiler.disable
    torch.compile, torch.compiler.disable = (_without_effect(decorator) for decorator in kept)
    try:
        yield
    finally:
        torch.compile, torch.compiler.disable = kept


def _without_effect(decorator: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps the original's signature, which is inspected, and supports being called with options first."""

    @wraps(decorator)
    def mark(function: Any = None, *args: Any, **options: Any) -> Any:
        return mark if function is None else function

    return mark
