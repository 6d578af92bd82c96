"""How many answers are right, by kind of question. An answer is right when every token of it is the likeliest."""

from collections.abc import Sequence

import torch
from torch import Tensor

from training.batches import Recipe
from training.dialogue import KINDS
from training.model import Batch, Model

SETS = (
    *(("pictures", (6, 6)), ("pictures", (4, 8)), ("pictures", (8, 6)), ("pictures", (3, 10)), ("pictures", (7, 7))),
    *(("pairs", (4, 6)), ("videos", (5, 5)), ("texts", (1, 1))),
)


def held_out(recipe: Recipe, size: int, seed: int) -> list[Batch]:
    """Batches that are the same for the same seed; `recipe` draws from digits that are not trained on."""
    device = recipe.studio.device
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        return [getattr(recipe, name)(grid, size) for name, grid in SETS]


@torch.no_grad()
def accuracy(model: Model, batches: Sequence[Batch], end_id: int) -> dict[str, tuple[int, int]]:
    """(right, asked) of every kind that was asked."""
    device = batches[0].ids.device
    right, asked = (torch.zeros(len(KINDS), device=device) for _ in range(2))
    for batch in batches:
        with torch.compiler.set_stance("force_eager"):  # a pass without gradients would be compiled once more
            best = model(batch).argmax(-1)
        for turn in range(batch.kind.shape[1]):
            ok, whole = _right(best, batch.targets, end_id, turn)
            right.index_add_(0, batch.kind[:, turn], (ok & whole).float())
            asked.index_add_(0, batch.kind[:, turn], whole.float())
    pairs = zip(right.tolist(), asked.tolist(), strict=True)
    return {kind: (int(r), int(a)) for kind, (r, a) in zip(KINDS, pairs, strict=True) if a}


def _right(best_BA: Tensor, targets_BA: Tensor, end_id: int, turn: int) -> tuple[Tensor, Tensor]:
    """Which samples answer this turn right, and which have the whole of it among their targets."""
    ends = (targets_BA == end_id).long()
    mine = (ends.cumsum(1) - ends == turn) & (targets_BA >= 0)
    ok = ((best_BA == targets_BA) | ~mine).all(1)
    return ok, ends.sum(1) > turn
