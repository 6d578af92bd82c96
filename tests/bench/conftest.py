"""A tiny checkpoint to serve."""

from tests.engine.conftest import made

__all__ = ["made"]
