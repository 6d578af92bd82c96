from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from saccade.models.vlm import Model
from saccade.models.weights import load_model
from tests.models import tiny

Loaded = tuple[tiny.Tiny, Model]


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Loaded]:
    """A tiny checkpoint of a family, written by transformers, and the same loaded by Saccade; each made once."""

    @cache
    def load(name: str) -> Loaded:
        folder: Path = tmp_path_factory.mktemp(name)
        made = tiny.make(name, folder)
        return made, load_model(folder, dtype=torch.float32)

    return load


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield
