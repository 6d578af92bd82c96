"""Counts right answers by kind of question. An answer is right if each of its tokens is the most likely one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from training.batches import Recipe
from training.dialogue import KINDS
from training.model import Batch, Model

SETS = (
    *(("pictures", (7, 7)), ("pictures", (6, 8)), ("pictures", (6, 6)), ("pictures", (4, 10)), ("pictures", (5, 9))),
    *(("pairs", (6, 6)), ("videos", (5, 5)), ("texts", (1, 1))),
)
MAX_TURNS = 4
Found = dict[str, tuple[int, int]]
"""How many answers of a kind were right, and how many were asked."""


def held_out(recipe: Recipe, size: int, seed: int) -> list[Batch]:
    """Makes the same batches for the same seed. `recipe` must use digits that are not trained on."""
    device = recipe.studio.device
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        return [getattr(recipe, name)(grid, size) for name, grid in SETS]


@torch.no_grad()
def accuracy(model: Model, batches: Sequence[Batch], end_id: int) -> tuple[Found, Found]:
    """Results by kind of question, over all turns and over first turns only, because later answers can build on what
    was said before."""
    device = batches[0].ids.device
    right_TK, asked_TK = (torch.zeros(MAX_TURNS, len(KINDS), device=device) for _ in range(2))
    for batch in batches:
        with torch.compiler.set_stance("force_eager"):  # without gradients, the pass would be compiled again
            best = model(batch).argmax(-1)
        for turn in range(batch.kind.shape[1]):
            ok, whole = _right(best, batch.targets, end_id, turn)
            right_TK[turn].index_add_(0, batch.kind[:, turn], (ok & whole).float())
            asked_TK[turn].index_add_(0, batch.kind[:, turn], whole.float())
    return _found(right_TK.sum(0), asked_TK.sum(0)), _found(right_TK[0], asked_TK[0])


def _found(right: Tensor, asked: Tensor) -> Found:
    pairs = zip(KINDS, right.tolist(), asked.tolist(), strict=True)
    return {kind: (int(r), int(a)) for kind, r, a in pairs if a}


def _right(best_BA: Tensor, targets_BA: Tensor, end_id: int, turn: int) -> tuple[Tensor, Tensor]:
    """Which samples answer this turn right, and which have the complete answer among their targets."""
    ends = (targets_BA == end_id).long()
    mine = (ends.cumsum(1) - ends == turn) & (targets_BA >= 0)
    ok = ((best_BA == targets_BA) | ~mine).all(1)
    return ok, ends.sum(1) > turn
