"""Kernels by name. Each has the signature of its oracle, so mypy checks every call of one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self


@dataclass(frozen=True)
class KernelTable:
    """The static methods of a subclass are its oracles, in plain torch; `functions` take the place of some or all."""

    name: str
    functions: Mapping[str, Callable[..., Any]]

    def __post_init__(self) -> None:
        unknown = self.functions.keys() - set(self.kernel_names())
        assert not unknown, f"{type(self).__name__} has no kernel called {', '.join(sorted(unknown))}"
        vars(self).update(self.functions)

    @classmethod
    def kernel_names(cls) -> list[str]:
        return [name for name, value in vars(cls).items() if isinstance(value, staticmethod)]

    def replacing(self, **functions: Callable[..., Any]) -> Self:
        """The same kernels but for these."""
        return replace(self, functions={**self.functions, **functions})
