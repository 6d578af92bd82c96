"""Serves vision-language models: every forward pass is a CUDA-graph replay, and every replay is the right one."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade.offline.llm import LLM
    from saccade.wire.sampling_params import SamplingParams

__version__ = "0.1.0.dev0"
__all__ = ["LLM", "SamplingParams", "__version__"]

_HOMES = {"LLM": "saccade.offline.llm", "SamplingParams": "saccade.wire.sampling_params"}


def __getattr__(name: str) -> Any:
    """Imports public names on first use, so that `saccade --version` needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'saccade' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
