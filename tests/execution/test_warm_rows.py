"""Kernels of single rows of logits are compiled for every address that such a row can have."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade.execution.logits import warm_up_rows
from saccade.kernels import reference_sampling

NAMES = ("apply_bias", "suppress", "allow_only", "logprobs")


@pytest.mark.parametrize("vocab_size", [32, 33, 34])
def test_rows_at_every_alignment_are_warmed_up(vocab_size: int) -> None:
    seen: set[tuple[str, bool]] = set()

    def noted(name: str) -> Any:
        def call(logits_1V: Tensor, *args: Any) -> Any:
            seen.add((name, logits_1V.data_ptr() % 16 == 0))
            return getattr(reference_sampling, name)(logits_1V, *args)

        return call

    logits, edited = torch.zeros(5, vocab_size), torch.ones(5, vocab_size)
    state: Any = SimpleNamespace(
        logits=logits, edited=edited, sampling=SimpleNamespace(**{name: noted(name) for name in NAMES})
    )
    warm_up_rows(state, torch.full((1, 2), -1, dtype=torch.int32))
    rows = [(name, row.data_ptr() % 16 == 0) for name in NAMES for row in edited]
    assert seen == set(rows)
    assert (edited == 1).all(), "nothing was changed"
