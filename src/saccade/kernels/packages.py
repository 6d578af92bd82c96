"""Imports GPU kernel packages early. Only for processes that Saccade owns: torch is patched during the import."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

import torch

from saccade.config import use_private_kernel_cache
from saccade.kernels.dispatch import is_hopper


def import_packages() -> None:
    """Takes seconds, so call it while nothing waits. Does nothing unless a GPU needs the packages. Ignores import
    errors; the code that needs the package reports them."""
    if not torch.cuda.is_available() or not any(is_hopper(i) for i in range(torch.cuda.device_count())):
        return
    import_compilers()


def import_compilers() -> None:
    """Like `import_packages`, but does not look for GPUs first, which would initialise them."""
    use_private_kernel_cache()
    with suppress(Exception), without_torch_compile():
        importlib.import_module("saccade.kernels.products").load_products()
    with suppress(Exception):
        importlib.import_module("saccade.kernels.adapters").load_flash_attention()


@contextmanager
def without_torch_compile() -> Iterator[None]:
    """Makes torch.compile and torch.compiler.disable no-ops. quack decorates functions that Saccade does not use with
    them, and that alone imports torch's compiler, which takes two seconds."""
    kept = torch.compile, torch.compiler.disable
    torch.compile, torch.compiler.disable = (_no_op(decorator) for decorator in kept)
    try:
        yield
    finally:
        torch.compile, torch.compiler.disable = kept


def _no_op(decorator: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that does nothing, with or without options. quack inspects the signature, so it is the original's."""

    @wraps(decorator)
    def mark(function: Any = None, *args: Any, **options: Any) -> Any:
        return mark if function is None else function

    return mark
