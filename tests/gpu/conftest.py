"""These tests need a CUDA device; elsewhere they are skipped."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade.models.vlm import Model
from tests.gpu.engine_rig import dummy_model, free

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Qwen3-VL-8B with random weights in bfloat16."""
    from tests.gpu.test_families import QWEN3_VL_8B  # imports transformers

    made = dummy_model(QWEN3_VL_8B, tmp_path_factory.mktemp("model"), device="cuda", dtype=torch.bfloat16)
    yield made
    del made
    free()


@pytest.fixture
def clean() -> Iterator[None]:
    """Frees GPU memory before and after a test."""
    free()
    yield
    free()


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Any:
    def show(*lines: str) -> None:
        with capsys.disabled():
            print("\n" + "\n".join(lines), end="", flush=True)

    return show
