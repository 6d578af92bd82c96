"""Cases that test the rank runner itself: one that passes, one that fails on rank 1, one that is never reached."""

import torch

from saccade.layers.parallel import Groups


def passes(groups: Groups) -> None:
    groups.language.reserve(64)
    assert groups.language.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]


def fails(groups: Groups) -> None:
    """The others wait for a sum that never comes."""
    if groups.language.rank == 1:
        raise ValueError("rank 1 has had enough")
    groups.language.all_reduce(torch.ones(2))


CASES = {"passes": passes, "fails": fails, "is not reached": passes}
