"""Sampling on the CPU against the processors of transformers, plain counting, and the expected distribution."""

from collections import Counter

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from saccade.errors import ConfigError
from saccade.graphs.recorded import RecordedLane
from saccade.kernels import reference_sampling as sampling
from saccade.kernels.dispatch import sampling_for
from tests.kernels.sampling_cases import (
    INF,
    NAN,
    SETTINGS,
    Rows,
    flags,
    integers,
    pack_bits,
    poisoned,
    repeated,
    rows_of,
)

DRAWN = [s for s in SETTINGS if s[0] > 0]


def kept_by_transformers(logits: Tensor, setting: tuple[float, int, float, float]) -> Tensor:
    temperature, top_k, top_p, min_p = setting
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if min_p > 0:
        processors.append(MinPLogitsWarper(min_p))
    if top_k > 0:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    kept: Tensor = processors(torch.zeros(1, 1, dtype=torch.long), logits[None].clone())[0] > -INF
    return kept


def kept_by_us(rows: Rows) -> Tensor:
    _, floor = sampling.sample(*rows.inputs)
    return rows.logits >= floor[:, None]


@pytest.mark.parametrize("vocabulary", [1000, 1537])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_keeps_the_tokens_transformers_keeps(vocabulary: int, seed: int) -> None:
    rows = rows_of(DRAWN, vocabulary, seed=seed)
    kept = kept_by_us(rows)
    for row, setting in enumerate(DRAWN):
        assert torch.equal(kept[row], kept_by_transformers(rows.logits[row], setting)), setting


def test_large_logits_keep_the_same_tokens() -> None:
    """Only differences between logits matter, however large their exponentials are."""
    rows = rows_of(DRAWN, 1000, seed=17)
    logits = (rows.logits * 64).round() / 64  # sums with 500 are exact
    assert torch.equal(kept_by_us(rows.with_(logits=logits + 500)), kept_by_us(rows.with_(logits=logits)))


def test_a_share_that_needs_all_tokens_keeps_all() -> None:
    rows = rows_of([(1.0, 0, 0.9, 0.0), (1.0, 0, 0.7, 0.0)], 2, seed=0).with_(logits=torch.tensor([[1.0, 0.0]] * 2))
    assert kept_by_us(rows).tolist() == [[True, True], [True, False]], "the likelier token has 73 %"


def test_ties_with_the_last_kept_token_are_kept() -> None:
    """Logits computed in bfloat16 have many ties. We keep what transformers keeps, and all tokens that tie with it."""
    rows = rows_of(DRAWN, 1000, seed=4)
    rows = rows.with_(logits=rows.logits.bfloat16().float())
    kept = kept_by_us(rows)
    num_wider = 0
    for row, setting in enumerate(DRAWN):
        theirs = kept_by_transformers(rows.logits[row], setting)
        least = rows.logits[row][theirs].min()
        assert torch.equal(kept[row], rows.logits[row] >= least), setting
        num_wider += int(kept[row].sum() > theirs.sum())
    assert num_wider > 0


@pytest.mark.parametrize("setting", DRAWN)
def test_draws_follow_the_expected_distribution(setting: tuple[float, int, float, float]) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(61, generator=generator) * 1.5
    num_draws = 20_000
    kept = kept_by_transformers(logits, (*setting[:1], min(setting[1], 61), *setting[2:]))
    expected = torch.softmax(torch.where(kept, logits / setting[0], -INF).double(), 0) * num_draws
    observed = torch.bincount(sampling.sample(*repeated(logits, setting, num_draws, seed=77).inputs)[0], minlength=61)
    assert not observed[~kept].any()
    check_chi_square(observed[kept], expected[kept])


def check_chi_square(observed: Tensor, expected: Tensor) -> None:
    """Merges cells expected fewer than eight times. Five standard deviations happen by chance once in a million."""
    rare = expected < 8
    seen = torch.cat([observed[~rare].double(), observed[rare].sum().double()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    seen, expected = seen[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    assert ((seen - expected) ** 2 / expected).sum() <= freedom + 5 * (2 * max(freedom, 1)) ** 0.5


def test_a_flat_row_is_drawn_evenly_over_seeds_and_over_counters() -> None:
    rows = repeated(torch.zeros(203), (1.0, 0, 1.0, 0.0), 40_000, seed=3)
    swapped = rows.with_(seeds=rows.counters, counters=rows.seeds)
    for case in (rows, swapped):
        observed = torch.bincount(sampling.sample(*case.inputs)[0], minlength=203)
        check_chi_square(observed, torch.full((203,), 40_000 / 203, dtype=torch.double))


def test_noise_is_gumbel_and_uncorrelated() -> None:
    noise = sampling.gumbel(torch.full((400,), -9), torch.arange(400), 1001).double()
    assert abs(float(noise.mean()) - 0.5772157) < 0.01
    assert abs(float(noise.var()) - torch.pi**2 / 6) < 0.02
    uniform = torch.exp(-torch.exp(-noise))
    assert abs(float((uniform < 0.001).double().mean()) - 0.001) < 2e-4
    assert abs(float((uniform > 0.999).double().mean()) - 0.001) < 2e-4
    for a, b in ((uniform[:, 1:], uniform[:, :-1]), (uniform[1:], uniform[:-1]), (uniform[:, 4:], uniform[:, :-4])):
        assert abs(float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])) < 0.01


def test_noise_is_exact_to_float32() -> None:
    """The noise must be exact where it decides: tokens with small v win. Near v = 1 it may be coarser."""
    words = sampling.philox((torch.arange(50_000), *(torch.tensor(0),) * 3), (torch.tensor(5), torch.tensor(0)))
    v = (torch.stack(words, 1).flatten().double() + 0.5) * 2.0**-32
    exact = -torch.log(-torch.log1p(-v))
    noise = sampling.gumbel(torch.tensor([5]), torch.tensor([0]), 200_000)[0].double()
    assert exact.max() > 11
    torch.testing.assert_close(noise[v < 0.9], exact[v < 0.9], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(noise, exact, rtol=0, atol=0.1)


def test_generator_gives_the_published_vectors() -> None:
    """The known-answer tests that Random123 ships for philox4x32-10."""
    ones = 0xFFFFFFFF
    for counter, key, words in (
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ):
        got = sampling.philox(tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key))
        assert tuple(int(word) for word in got) == words


def test_a_token_depends_on_its_own_row_only() -> None:
    rows = rows_of(SETTINGS, 1537, seed=6)
    together, _ = sampling.sample(*rows.inputs)
    order = torch.randperm(len(SETTINGS), generator=torch.Generator().manual_seed(7)).tolist()
    assert torch.equal(sampling.sample(*rows.take(order).inputs)[0], together[order])
    for row in range(len(SETTINGS)):
        assert torch.equal(sampling.sample(*rows.take([row]).inputs)[0], together[row : row + 1])


def test_seed_and_counter_determine_the_token() -> None:
    rows = repeated(torch.zeros(1000), (1.0, 0, 1.0, 0.0), 300, seed=1)
    first, _ = sampling.sample(*rows.inputs)
    assert torch.equal(first, sampling.sample(*rows.inputs)[0])
    for changed in (
        rows.with_(seeds=rows.seeds + 1),
        rows.with_(seeds=rows.seeds + 2**40),
        rows.with_(counters=rows.counters + 2**40),
    ):
        assert (sampling.sample(*changed.inputs)[0] != first).double().mean() > 0.98


def test_broken_rows_are_reported_and_affect_no_others() -> None:
    rows = rows_of(SETTINGS, 1000, seed=8)
    rows.logits[1, 17] = NAN
    rows.logits[2] = -INF
    rows.logits[5, ::2] = -INF
    dirty = poisoned(rows, [3, 9])
    _, bad = sampling.greedy(dirty.logits)
    assert bad.nonzero()[:, 0].tolist() == [1, 2, 3, 9]
    ids, _ = sampling.sample(*dirty.inputs)
    assert bool(((ids >= 0) & (ids < 1000)).all())
    healthy = [r for r in range(len(SETTINGS)) if r not in (1, 2, 3, 9)]
    assert torch.equal(ids[healthy], sampling.sample(*rows.inputs)[0][healthy])


def test_greedy_picks_the_lowest_id_among_ties() -> None:
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(9))
    logits[0, [990, 20, 500]] = 9.0
    logits[1] = 0.0
    logits[2, 3] = NAN
    logits[3] = -INF
    logits[4, [7, 8]] = INF
    ids, bad = sampling.greedy(logits)
    assert ids.tolist() == [20, 0, int(logits[2].nan_to_num(-99).argmax()), 0, 7]
    assert bad.tolist() == [False, False, True, True, False]


def test_rows_at_temperature_zero_are_greedy() -> None:
    rows = rows_of([(0.0, 40, 0.3, 0.1), (1e-6, 0, 1.0, 0.0)] * 3, 500, seed=10)
    assert torch.equal(sampling.sample(*rows.inputs)[0], rows.logits.argmax(1))


def test_penalties_match_transformers_and_openai() -> None:
    vocabulary, generator = 300, torch.Generator().manual_seed(11)
    prompt, output = (torch.randint(0, vocabulary, (4, n), generator=generator) for n in (90, 60))
    seen = state_of(prompt, output, vocabulary)
    repetition, presence, frequency = (
        torch.tensor(x) for x in ([1.3, 1.0, 0.8, 1.0], [0.0, 0.5, -0.7, 0.0], [0.0, 0.25, 0.3, 0.0])
    )
    before = torch.randn(4, vocabulary, generator=generator) * 4
    after = before.clone()
    sampling.penalise(after, seen, integers(2, 0, 4, 3), repetition, presence, frequency)
    for row in range(4):
        processor = RepetitionPenaltyLogitsProcessor(float(repetition[row]))
        ids = torch.cat([prompt[row], output[row]])[None]
        expected = processor(ids, before[row : row + 1].clone())[0]
        for token, count in Counter(output[row].tolist()).items():
            expected[token] -= count * frequency[row] + presence[row]
        torch.testing.assert_close(after[row], expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(after[3], before[3])
    assert (after[:3] != before[:3]).any(dim=1).all()


def state_of(prompt: Tensor, output: Tensor, vocabulary: int) -> Tensor:
    """Rows 0 to 3 use slots 2, 0, 4 and 3. Prompts come in two chunks and outputs step by step, both with padding."""
    seen = torch.zeros(5, vocabulary, dtype=torch.int32)
    slots = integers(2, 0, 4, 3)
    for chunk in prompt.split(50, dim=1):
        width = chunk.shape[1]
        ids = torch.cat([chunk.flatten(), integers(-5, 2**30)])
        places = torch.cat([slots.repeat_interleave(width), integers(-1, 99)])
        sampling.mark_prompt(seen, places, ids, torch.cat([torch.ones(4 * width, dtype=torch.bool), flags(0, 0)]))
    for step in range(output.shape[1]):
        ids = torch.cat([output[:, step], integers(-1)])
        sampling.count_tokens(seen, torch.cat([slots, integers(-7)]), ids, flags(1, 1, 1, 1, 0))
    assert not seen[1].any()
    return seen


def test_many_tokens_of_one_slot_are_all_counted() -> None:
    """As when a preempted request comes back with its whole output."""
    seen = torch.zeros(2, 9, dtype=torch.int32)
    sampling.mark_prompt(seen, integers(1, 1, 1), integers(4, 4, 0), flags(1, 1, 1))
    sampling.count_tokens(seen, integers(1, 1, 1, 1, 1), integers(4, 4, 8, 4, 4), flags(1, 1, 1, 1, 0))
    assert (seen[1] & ~sampling.IN_PROMPT).tolist() == [0, 0, 0, 0, 3, 0, 0, 0, 1]
    assert (seen[1] < 0).nonzero()[:, 0].tolist() == [0, 4]
    assert not seen[0].any()


def test_bias_changes_only_the_listed_tokens() -> None:
    before = torch.randn(3, 100, generator=torch.Generator().manual_seed(12))
    after = before.clone()
    ids = torch.tensor([[5, 99, -1, -1], [0, 1, 2, 3], [-1, -1, -1, -1]], dtype=torch.int32)
    values = torch.tensor([[2.0, -100.0, NAN, INF], [1.0, -1.0, 0.5, -INF], [NAN] * 4])
    sampling.apply_bias(after, ids, values)
    expected = before.clone()
    expected[0, 5] += 2
    expected[0, 99] -= 100
    expected[1, :4] += torch.tensor([1.0, -1.0, 0.5, -INF])
    assert torch.equal(after, expected)


def test_suppressed_and_forbidden_tokens_are_never_drawn() -> None:
    generator = torch.Generator().manual_seed(13)
    before = torch.randn(3, 77, generator=generator)
    after = before.clone()
    ids = torch.tensor([[0, 76], [-1, 3], [0, 1]], dtype=torch.int32)
    sampling.suppress(after, ids, flags(1, 1, 0))
    assert (after == -INF).nonzero().tolist() == [[0, 0], [0, 76], [1, 3]]
    is_allowed = torch.rand(3, 77, generator=generator) < 0.3
    is_allowed[2] = True
    sampling.allow_only(before, pack_bits(is_allowed))
    assert torch.equal(before == -INF, ~is_allowed)


def test_the_first_and_the_last_token_are_scored() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).expand(2, -1)
    chosen, rank, _, _ = sampling.logprobs(logits, integers(0, 3), 0)
    assert torch.equal(chosen, torch.log_softmax(logits[0], 0)[[0, 3]]) and rank.tolist() == [1, 4]


@pytest.mark.parametrize("k", [0, 1, 20])
def test_logprobs(k: int) -> None:
    logits = torch.randn(6, 1000, generator=torch.Generator().manual_seed(14)) * 4
    ids = logits.argsort(dim=1, descending=True)[torch.arange(6), torch.tensor([0, 1, 5, 40, 998, 999])]
    chosen, rank, top_ids, top = sampling.logprobs(logits, ids, k)
    exact = torch.log_softmax(logits.double(), 1)
    torch.testing.assert_close(chosen.double(), exact[torch.arange(6), ids], rtol=0, atol=1e-5)
    assert rank.tolist() == [1, 2, 6, 41, 999, 1000]
    values, indices = exact.topk(k, dim=1)
    assert torch.equal(top_ids, indices)
    torch.testing.assert_close(top.double(), values, rtol=0, atol=1e-5)


def test_equal_tokens_share_a_rank_and_are_listed_lowest_first() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0]])
    _, rank, top_ids, _ = sampling.logprobs(logits, integers(5), 4)
    assert rank.tolist() == [3]
    assert top_ids.tolist() == [[1, 3, 2, 4]]


def test_a_recorded_step_follows_its_parameters() -> None:
    """Nothing about a row is frozen: a replay reads the current logits, parameters and states."""
    old, new = rows_of(SETTINGS, 300, seed=15), rows_of(SETTINGS[::-1], 300, seed=16)
    static = Rows(*(x.clone() for x in old.inputs))
    count = len(SETTINGS)
    seen, slots = torch.zeros(count, 300, dtype=torch.int32), torch.arange(count)
    rates = torch.full((count,), 1.2)
    out = torch.zeros(count, dtype=torch.int64)

    def step() -> None:
        sampling.penalise(static.logits, seen, slots, rates, rates, rates)
        out.copy_(sampling.sample(*static.inputs)[0])
        sampling.count_tokens(seen, slots, out, torch.ones_like(out, dtype=torch.bool))
        sampling.logprobs(static.logits, out, 3)

    lane = RecordedLane()
    lane.begin()
    step()
    replay = lane.end()
    assert replay is not None
    seen.zero_()
    for case in (new, old):
        for mine, theirs in zip(static.inputs, case.inputs, strict=True):
            mine.copy_(theirs)
        before = seen.clone()
        replay()
        expected = case.logits.clone()
        sampling.penalise(expected, before, slots, rates, rates, rates)
        assert torch.equal(out, sampling.sample(expected, *case.inputs[1:])[0])
        assert torch.equal(seen.sum(1), before.sum(1) + 1)


def test_sampling_kernels_are_chosen_by_device() -> None:
    assert sampling_for("cpu").sample is sampling.sample
    with pytest.raises(ConfigError, match="allowed: cpu, cuda"):
        sampling_for("meta")
