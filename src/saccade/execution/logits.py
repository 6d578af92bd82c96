"""Logits outside graphs: edits, masks, log-probabilities, token counts. N rows, V vocabulary, W 32-bit words."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from saccade.execution.state import DeviceState
from saccade.execution.transfers import to_device, to_host
from saccade.scheduling.orders import Array, Begin, Edit, Mask, ScorePrompt, ScoreToken, TokenRules
from saccade.wire.sampling_params import MAX_LOGPROBS

MAX_SCORED_ROWS = 256  # prompt rows whose logits are in memory at once


class _Rules(NamedTuple):
    """`TokenRules` on the device."""

    bias: tuple[Tensor, Tensor] | None
    ends: Tensor | None
    allowed: Tensor | None


class Logits:
    """Masks have static buffers: one on the device, and one on the host per step in flight. The rules of a sequence
    stay on the device until another request takes it over."""

    def __init__(self, state: DeviceState, trunk_TD: Tensor, *, num_turns: int) -> None:
        self._state, self._trunk_TD = state, trunk_TD
        device = state.logits.device
        self._device_type = device.type
        max_rows, vocab_size = state.logits.shape
        shape = (max_rows, vocab_size // 32 + 1)
        self._masks_NW = torch.full(shape, -1, dtype=torch.int32, device=device)
        is_cuda = device.type == "cuda"
        self._rules: dict[int, _Rules] = {}
        self._host_masks = [torch.full(shape, -1, dtype=torch.int32, pin_memory=is_cuda) for _ in range(num_turns)]

    @torch.no_grad()
    def begin(self, orders: Begin) -> None:
        """Stores the rules of a new request, and counts its tokens."""
        self._rules.pop(orders.sequence, None)  # frees an earlier request's memory
        if orders.rules is not None:
            self._rules[orders.sequence] = self._on_device(orders.rules)
        sampling, seen = self._state.sampling, self._state.seen
        if len(orders.prompt_ids):
            seen[orders.sequence].zero_()
        for ids, note in ((orders.prompt_ids, sampling.mark_prompt), (orders.output_ids, sampling.count_tokens)):
            if len(ids):
                sequence = self._to_device(np.full(len(ids), orders.sequence))
                note(seen, sequence, self._to_device(ids), torch.ones_like(sequence) > 0)

    def edit(self, count: int, edits: Sequence[Edit], mask: Mask | None, turn: int) -> None:
        """Copies the last pass's logits for the sampler, then applies edits and masks."""
        state = self._state
        state.edited[:count].copy_(state.logits[:count])
        for one in edits:
            self._edit_row(one)
        if mask is not None:
            words, end = mask.words, mask.row + len(mask.words)
            host = self._host_masks[turn][: len(words)]
            host.numpy()[:, : words.shape[1]] = words
            self._masks_NW[: len(words)].copy_(host, non_blocking=True)
            state.sampling.allow_only(state.edited[mask.row : end], self._masks_NW[: len(words)])

    def _edit_row(self, one: Edit) -> None:
        sampling, rules = self._state.sampling, self._rules[one.sequence]
        logits_1V = self._state.edited[one.row : one.row + 1]
        if rules.bias is not None:
            sampling.apply_bias(logits_1V, *rules.bias)
        if one.forbids_ends and rules.ends is not None:
            sampling.suppress(logits_1V, rules.ends, torch.ones(1, dtype=torch.bool, device=logits_1V.device))
        if rules.allowed is not None:
            sampling.allow_only(logits_1V, rules.allowed)

    def _on_device(self, rules: TokenRules) -> _Rules:
        def moved(array: Array | None) -> Tensor | None:
            return None if array is None or not len(array) else self._to_device(array[None])

        ids, biases = moved(rules.bias_ids), moved(rules.biases)
        bias = None if ids is None or biases is None else (ids, biases)
        return _Rules(bias, moved(rules.end_ids), moved(rules.allowed))

    def score(self, orders: Sequence[ScoreToken]) -> dict[int, tuple[Tensor, ...]]:
        """Log-probabilities of sampled tokens by row, from the raw logits. Rows in between are scored too, because one
        launch for all is cheaper than one for each."""
        if not orders:
            return {}
        first, end = min(one.row for one in orders), max(one.row for one in orders) + 1
        sequences = np.zeros(end - first, dtype=np.int64)
        for one in orders:
            sequences[one.row - first] = one.sequence
        newest_N = self._state.newest_ids[self._to_device(sequences)]
        parts = self._scores(self._state.logits[first:end], newest_N, max(one.num_top for one in orders))
        return {one.row: _row_of(parts, one.row - first, one.num_top) for one in orders}

    def score_prompt(self, orders: ScorePrompt) -> list[tuple[Tensor, ...]]:
        """Log-probabilities of prompt tokens, from the rows of the last prefill."""
        model, parts = self._state.model, []
        for start in range(0, len(orders.next_ids), MAX_SCORED_ROWS):
            ids = orders.next_ids[start : start + MAX_SCORED_ROWS]
            first = orders.row + start
            logits_NV = model.decoder.logits(model.decoder.finish(self._trunk_TD[first : first + len(ids)]))
            parts.append(self._scores(logits_NV, self._to_device(ids), orders.num_top))
        return parts

    def warm_up(self) -> None:
        warm_up_rows(self._state, self._masks_NW[:1].fill_(-1))

    def _scores(self, logits_NV: Tensor, ids_N: Tensor, num_top: int) -> tuple[Tensor, ...]:
        """A GPU always computes MAX_LOGPROBS and drops the rest, so one kernel compiled at start-up is enough."""
        most = min(MAX_LOGPROBS, logits_NV.shape[1]) if self._device_type == "cuda" else num_top
        chosen, ranks, top_ids, top_logprobs = self._state.sampling.logprobs(logits_NV, ids_N, most)
        return tuple(to_host(part) for part in (chosen, ranks, top_ids[:, :num_top], top_logprobs[:, :num_top]))

    def _to_device(self, array: Array) -> Tensor:
        return to_device(array, self._state.logits.device)


def warm_up_rows(state: DeviceState, mask_1W: Tensor) -> None:
    """Compiles the kernels of single rows, for the first row and the second. Triton compiles another kernel for
    addresses that are no multiples of 16, which rows of some vocabularies have."""
    ids_11 = torch.zeros((1, 1), dtype=torch.int64, device=state.logits.device)
    for row in range(min(2, len(state.logits))):
        logits_1V, edited_1V = (rows_NV[row : row + 1] for rows_NV in (state.logits, state.edited))
        state.sampling.apply_bias(edited_1V, ids_11, ids_11.float())
        state.sampling.suppress(edited_1V, ids_11, ids_11[0] > 0)
        state.sampling.allow_only(edited_1V, mask_1W)
        state.sampling.logprobs(logits_1V, ids_11[0], min(MAX_LOGPROBS, logits_1V.shape[1]))


def _row_of(parts: tuple[Tensor, ...], row: int, num_top: int) -> tuple[Tensor, ...]:
    chosen, ranks, top_ids, top_logprobs = (part[row : row + 1] for part in parts)
    return chosen, ranks, top_ids[:, :num_top], top_logprobs[:, :num_top]
