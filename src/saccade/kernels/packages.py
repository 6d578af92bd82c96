"""The packages that a GPU's kernels come from, imported before anybody needs them.

For a process that belongs to this package alone: torch is altered while they are imported.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

import torch

from saccade.config import use_private_kernel_cache
from saccade.kernels.dispatch import is_hopper


def import_packages() -> None:
    """Seconds that may pass while nobody waits for them. Nothing where no GPU has a use for them; what is broken is
    left to whoever needs it."""
    if not torch.cuda.is_available() or not any(is_hopper(i) for i in range(torch.cuda.device_count())):
        return
    use_private_kernel_cache()
    with suppress(Exception), unmarked_for_compilation():
        importlib.import_module("saccade.kernels.products").load_products()
    with suppress(Exception):
        importlib.import_module("saccade.kernels.adapters").load_flash_attention()


@contextmanager
def unmarked_for_compilation() -> Iterator[None]:
    """quack marks functions, none of which is used here, for torch's compiler or against it, and a mark alone imports
    the compiler: two seconds of every start. Inside, marks do nothing."""
    kept = torch.compile, torch.compiler.disable
    torch.compile, torch.compiler.disable = (_without_effect(decorator) for decorator in kept)
    try:
        yield
    finally:
        torch.compile, torch.compiler.disable = kept


def _without_effect(decorator: Callable[..., Any]) -> Callable[..., Any]:
    """It looks like the original, whose signature is asked for, and may be called with options first."""

    @wraps(decorator)
    def mark(function: Any = None, *args: Any, **options: Any) -> Any:
        return mark if function is None else function

    return mark
