"""The tiny Qwen3-VL checkpoint of the engine's tests."""

from tests.engine.conftest import made

__all__ = ["made"]
