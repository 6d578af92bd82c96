"""Pools prompts into vectors, from the rows and logits that graphs wrote. N rows, D width, S sums."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from saccade.execution.state import DeviceState
from saccade.execution.transfers import to_device, to_host
from saccade.scheduling.orders import PickLogits, PoolRows

MAX_POOLED_ROWS = 256  # in one call of the last MLP


class Pooling:
    """Runs outside graphs, because the rows differ from step to step. Only rows that an order names are read, so
    padding never gets into a vector."""

    def __init__(self, state: DeviceState, trunk_TD: Tensor) -> None:
        self._state, self._trunk_TD = state, trunk_TD

    def sum_rows(self, orders: PoolRows) -> Tensor:
        """(S, D) float32 sums of hidden states after the final norm, on the host. Each sums its own rows only, so a NaN
        in one cannot reach another."""
        decoder, device = self._state.model.decoder, self._trunk_TD.device
        sums_SD = torch.zeros(len(orders.lengths), self._trunk_TD.shape[1], dtype=torch.float32, device=device)
        for start, first, lengths in _slices(orders.lengths):
            rows_N = to_device(orders.rows[start : start + sum(lengths)], device)
            hidden_ND = decoder.finish(self._trunk_TD[rows_N]).float()
            if len(lengths) == len(hidden_ND):
                sums_SD[first : first + len(lengths)] += hidden_ND
                continue
            for i, part_ND in enumerate(hidden_ND.split(lengths), start=first):
                sums_SD[i] += part_ND.sum(dim=0)
        return to_host(sums_SD)

    def pick(self, orders: Sequence[PickLogits]) -> Tensor:
        """The logits that all orders pick, concatenated, on the host."""
        logits_NV = self._state.logits
        rows = np.repeat([one.row for one in orders], [len(one.token_ids) for one in orders])
        ids = np.asarray([token for one in orders for token in one.token_ids])
        places = to_device(rows.astype(np.int64) * logits_NV.shape[1] + ids.astype(np.int64), logits_NV.device)
        return to_host(logits_NV.view(-1)[places])


def _slices(lengths: Sequence[int]) -> Iterator[tuple[int, int, list[int]]]:
    """Slices of rows to compute at once: the first row, the first sum it belongs to, and the rows for each sum."""
    ends = np.cumsum(lengths)
    for start in range(0, int(ends[-1]), MAX_POOLED_ROWS):
        end = min(start + MAX_POOLED_ROWS, int(ends[-1]))
        first, last = (int(np.searchsorted(ends, row, side="right")) for row in (start, end - 1))
        bounds = [start, *(int(row) for row in ends[first:last]), end]
        yield start, first, [b - a for a, b in pairwise(bounds)]
