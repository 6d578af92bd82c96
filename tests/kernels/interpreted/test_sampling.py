"""Sampling kernels against their oracles: odd vocabularies, rows of wider tensors, equal logits, poisoned rows."""

import pytest
import torch
from torch import Tensor

from saccade.errors import ConfigError
from saccade.kernels import fused_sampling as fused
from saccade.kernels import reference_sampling as reference
from tests.kernels.sampling_cases import (
    INF,
    NAN,
    SETTINGS,
    Rows,
    flags,
    integers,
    pack_bits,
    poisoned,
    rows_of,
)


def widened(x: Tensor) -> Tensor:
    """The same values as a slice of wider rows, with NaN on both sides."""
    wide = torch.full((x.shape[0], x.shape[1] + 37), NAN)
    wide[:, 5 : 5 + x.shape[1]] = x
    return wide[:, 5 : 5 + x.shape[1]]


def check_same_draws(rows: Rows) -> None:
    ids, floor = fused.sample(*rows.inputs)
    expected_ids, expected_floor = reference.sample(*rows.inputs)
    kept, expected = (rows.logits >= f[:, None] for f in (floor, expected_floor))
    assert torch.equal(kept, expected), (kept != expected).sum(1).tolist()
    assert torch.equal(ids, expected_ids)


@pytest.mark.parametrize("vocabulary", [1000, 1537])
def test_draws_what_the_oracle_draws(vocabulary: int) -> None:
    rows = rows_of(SETTINGS, vocabulary, seed=1)
    check_same_draws(rows.with_(logits=widened(rows.logits)))


def test_draws_over_many_chunks_and_tiles_from_flat_and_equal_logits() -> None:
    """Flat rows make the bounds useless, so every tile is searched. bfloat16 makes many logits equal."""
    flat = rows_of([(1.0, 0, 0.7, 0.0), (1.0, 4000, 0.9, 0.0), (2.0, 0, 1.0, 0.0)], 9001, seed=2, scale=0.1)
    check_same_draws(flat)
    tied = rows_of([(1.0, 100, 1.0, 0.0), (0.8, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.3)], 5001, seed=3)
    check_same_draws(tied.with_(logits=tied.logits.bfloat16().float()))
    same = rows_of([(1.0, 7, 1.0, 0.0), (1.0, 0, 0.5, 0.0)], 5001, seed=4)
    check_same_draws(same.with_(logits=torch.full_like(same.logits, -2.5)))


def test_draws_only_tokens_that_masks_allow() -> None:
    rows = rows_of([(1.0, 50, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 3, 0.9, 0.1), (1.0, 0, 1.0, 0.0)], 1537, seed=5)
    rows.logits[:, :] = torch.where(torch.arange(1537) % 191 == 3, rows.logits, -INF)
    rows.logits[1, 4:] = -INF
    check_same_draws(rows)
    rows.logits[:, [500, 900]] = INF
    check_same_draws(rows)


def test_broken_rows_are_reported_and_affect_no_others() -> None:
    settings = [SETTINGS[i] for i in (0, 1, 2, 3, 4, 5, 8)]
    rows = rows_of(settings, 1000, seed=6)
    dirty = poisoned(rows, [1, 5])
    dirty.logits[2, 999] = NAN
    dirty.logits[3] = -INF
    out, _ = fused.sample(*dirty.inputs)
    assert fused.greedy(dirty.logits)[1].tolist() == [False, True, True, True, False, True, False]
    assert bool(((out >= 0) & (out < 1000)).all())
    healthy = [0, 4, 6]
    assert out[healthy].tolist() == reference.sample(*rows.take(healthy).inputs)[0].tolist()


@pytest.mark.parametrize("vocabulary", [7, 1000, 9001])
def test_greedy(vocabulary: int) -> None:
    logits = widened(torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(7)))
    logits[0] = logits[0].round()
    logits[1] = 0.0
    logits[2, vocabulary // 2] = NAN
    logits[3] = -INF
    logits[4, [1, vocabulary - 1]] = INF
    for ours, theirs in zip(fused.greedy(logits), reference.greedy(logits), strict=True):
        assert torch.equal(ours, theirs)


def test_greedy_keeps_tokens_as_the_newest_of_their_sequences() -> None:
    logits = torch.randn(5, 9001, generator=torch.Generator().manual_seed(8))
    logits[2, 7] = NAN
    found = []
    for module in (fused, reference):
        ids, bad = torch.full((5,), -1), torch.zeros(5, dtype=torch.bool)
        newest, sequences = torch.full((9,), -1), torch.tensor([8, 1, 3, 2, 6], dtype=torch.int32)
        made = module.greedy(logits, reference.TokenPlaces(ids, bad, newest, sequences))
        assert made[0] is ids and made[1] is bad
        assert newest[sequences.long()].tolist() == ids.tolist() and newest[[0, 4, 5, 7]].tolist() == [-1] * 4
        found.append((ids, bad))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1].tolist() == found[1][1].tolist() == [0, 0, 1, 0, 0]
    assert torch.equal(found[0][0], reference.greedy(logits)[0])


def test_no_rows() -> None:
    rows = rows_of(SETTINGS[:1], 100, seed=8).take([])
    assert fused.greedy(rows.logits)[0].shape == fused.sample(*rows.inputs)[0].shape == (0,)
    assert fused.logprobs(rows.logits, rows.seeds, 3)[2].shape == (0, 3)


@pytest.mark.parametrize(("vocabulary", "k"), [(1000, 0), (1537, 5), (5001, 20), (12, 20)])
def test_logprobs(vocabulary: int, k: int) -> None:
    logits = widened(torch.randn(5, vocabulary, generator=torch.Generator().manual_seed(9)) * 3)
    logits[1] = logits[1].round()
    logits[2, 10:] = -INF
    logits[4] = NAN
    ids = torch.tensor([3, vocabulary - 1, 5, int(logits[3].argmax()), -(2**31)])
    ours, theirs = fused.logprobs(logits, ids, k), reference.logprobs(logits, ids, k)
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        torch.testing.assert_close(a[:4], b[:4], rtol=0, atol=1e-5)
    assert bool(((ours[2] >= 0) & (ours[2] < vocabulary)).all())


def test_too_many_logprobs_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 to 20"):
        fused.logprobs(torch.zeros(1, 100), integers(0), 21)


def test_penalties_and_their_state() -> None:
    vocabulary, generator = 5001, torch.Generator().manual_seed(10)
    states = [torch.zeros(4, vocabulary, dtype=torch.int32) for _ in range(2)]
    ids = torch.randint(0, vocabulary, (700,), generator=generator, dtype=torch.int32)
    ids[100:200] = ids[:100]
    slots = torch.arange(700, dtype=torch.int32) % 3 + 1
    slots[100:200] = slots[:100]
    is_real = torch.rand(700, generator=generator) < 0.8
    slots[~is_real], ids[~is_real] = -99, 2**30
    for module, seen in ((fused, states[0]), (reference, states[1])):
        module.mark_prompt(seen, slots[:400], ids[:400], is_real[:400])
        module.count_tokens(seen, slots[150:], ids[150:], is_real[150:])
        seen[3].zero_()
    assert torch.equal(*states)
    assert int((states[0] < 0).sum()) > 100
    before = widened(torch.randn(4, vocabulary, generator=generator) * 4)
    before[3] = NAN
    ours, theirs = widened(before), before.clone()
    values = [torch.tensor(x) for x in ([1.3, 1.0, 0.8, NAN], [0.0, 0.0, -0.7, 1.0], [0.2, 0.0, 0.3, NAN])]
    row_slots = integers(2, 1, 1, -5)
    fused.penalise(ours, states[0], row_slots, *values)
    reference.penalise(theirs, states[0], row_slots, *values)
    torch.testing.assert_close(ours[:3], theirs[:3], rtol=1e-6, atol=1e-6)
    assert torch.equal(ours[1], before[1])
    assert not torch.equal(ours[0], before[0])


def test_edits_of_listed_and_forbidden_tokens() -> None:
    generator = torch.Generator().manual_seed(11)
    before = torch.randn(3, 2500, generator=generator)
    ids = torch.stack([torch.randperm(2500, generator=generator)[:300] for _ in range(3)]).to(torch.int32)
    values = torch.randn(3, 300, generator=generator)
    is_padding = torch.rand(3, 300, generator=generator) < 0.4
    ids[is_padding], values[is_padding] = -1, NAN
    is_allowed = torch.rand(3, 2500, generator=generator) < 0.5
    is_allowed[1] = True
    allowed = pack_bits(is_allowed)
    ours, theirs = widened(before), before.clone()
    for module, logits in ((fused, ours), (reference, theirs)):
        module.apply_bias(logits, ids, values)
        module.suppress(logits, ids[:, :9].contiguous(), flags(1, 0, 1))
        module.apply_bias(logits, ids[:, :0], values[:, :0])
        module.allow_only(logits, allowed)
    assert torch.equal(ours, theirs)
    assert (ours == -INF).any()
    assert (ours != before).any(dim=1).all()
