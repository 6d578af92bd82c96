"""The sampling kernels compile for the GPUs they are meant for, at real vocabulary sizes. This needs no GPU."""

import importlib

import pytest
import torch
from torch import Tensor

from saccade.kernels.reference_sampling import TokenPlaces
from tests.kernels.test_compiled import Compiler, pytestmark

__all__ = ["pytestmark"]

LAUNCHES = {"greedy_kernel", "pick_kernel", "scan_kernel", "choose_kernel", "rank_kernel", "logprob_kernel"}
EDITS = {"penalise_kernel", "note_kernel", "bias_kernel", "allow_kernel"}


def stand_ins(monkeypatch: pytest.MonkeyPatch, capability: int) -> dict[str, Compiler]:
    host = importlib.import_module("saccade.kernels.fused_sampling")
    compilers = {name: Compiler(getattr(host, name), capability) for name in LAUNCHES | EDITS}
    for name, compiler in compilers.items():
        monkeypatch.setattr(host, name, compiler)
    return compilers


def integers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(("capability", "vocabulary"), [(80, 151_936), (90, 262_144)])
def test_choosing(monkeypatch: pytest.MonkeyPatch, capability: int, vocabulary: int) -> None:
    from saccade.kernels import fused_sampling

    compilers = stand_ins(monkeypatch, capability)
    logits, values, seeds = torch.empty(2, vocabulary), torch.empty(2), integers(2, dtype=torch.int64)
    places = TokenPlaces(seeds, torch.zeros(2, dtype=torch.bool), seeds, integers(2))
    fused_sampling.greedy(logits, places)
    fused_sampling.sample(logits, values, integers(2), values, values, seeds, seeds)
    fused_sampling.logprobs(logits, seeds, 20)
    assert {name for name in LAUNCHES if compilers[name].launches == 1} == LAUNCHES


def test_edits(monkeypatch: pytest.MonkeyPatch) -> None:
    from saccade.kernels import fused_sampling

    compilers = stand_ins(monkeypatch, 90)
    logits, values, flags = torch.empty(2, 151_936), torch.empty(2), torch.zeros(2, dtype=torch.bool)
    seen = integers(5, 151_936)
    fused_sampling.penalise(logits, seen, integers(2), values, values, values)
    fused_sampling.mark_prompt(seen, integers(2), integers(2), flags)
    fused_sampling.count_tokens(seen, integers(2), integers(2, dtype=torch.int64), flags)
    fused_sampling.apply_bias(logits, integers(2, 300), torch.empty(2, 300))
    fused_sampling.suppress(logits, integers(2, 3), flags)
    fused_sampling.allow_only(logits, integers(2, 151_936 // 32))
    assert {name: compilers[name].launches for name in EDITS} == {
        "penalise_kernel": 1, "note_kernel": 2, "bias_kernel": 2, "allow_kernel": 1,
    }  # fmt: skip
