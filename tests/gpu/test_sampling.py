"""Sampling on the GPU with the vocabularies of real models, against the CPU oracle, and inside a graph."""

import pytest
import torch
from torch import Tensor

from saccade.kernels import reference_sampling as reference
from saccade.kernels.dispatch import SamplingKernels, sampling_for
from tests.kernels.sampling_cases import INF, NAN, SETTINGS, Rows, poisoned, repeated, rows_of
from tests.kernels.test_sampling import check_chi_square

QWEN, GEMMA = 151_936, 262_144


@pytest.fixture(scope="module")
def sampling() -> SamplingKernels:
    return sampling_for("cuda")


def normal(*shape: int, seed: int, scale: float = 3.0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda") * scale


@pytest.mark.parametrize(("vocabulary", "scale"), [(QWEN, 3.0), (QWEN, 0.3), (GEMMA, 3.0)])
def test_draws_what_the_oracle_draws(vocabulary: int, scale: float) -> None:
    """The two round exponentials, logarithms and sums differently in the last bits.

    So the set that top-p keeps may end one token earlier or later, and two scores that agree to six digits may swap,
    which happens now and then with 10^5 tokens per row. Top-k needs no rounding and is the same in every row.
    """
    from saccade.kernels import fused_sampling

    settings = SETTINGS * 4
    rows = rows_of(settings, vocabulary, seed=1, scale=scale)
    ids, floor = (x.cpu() for x in fused_sampling.sample(*rows.to("cuda").inputs))
    expected_ids, expected_floor = reference.sample(*rows.inputs)
    kept, expected = ((rows.logits >= f[:, None]).sum(1) for f in (floor, expected_floor))
    for row, (temperature, top_k, top_p, min_p) in enumerate(settings):
        if top_k > 0 and top_p == 1 and min_p == 0 and temperature > 0:
            assert floor[row] == expected_floor[row]
        assert abs(int(kept[row] - expected[row])) <= 1 + int(expected[row]) // 10_000, settings[row]
    share = (ids == expected_ids).double().mean()
    print(f"{vocabulary} tokens, scale {scale}: {share:.1%} of rows draw the oracle's token")
    assert share >= 0.95


def test_equal_logits_are_kept_together() -> None:
    from saccade.kernels import fused_sampling

    rows = rows_of(
        [(1.0, 50, 1.0, 0.0), (0.8, 4000, 0.9, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 9, 1.0, 0.2)] * 4, QWEN, seed=2
    )
    rows = rows.with_(logits=rows.logits.bfloat16().float())
    _, floor = fused_sampling.sample(*rows.to("cuda").inputs)
    _, expected = reference.sample(*rows.inputs)
    kept = rows.logits >= floor.cpu()[:, None]
    assert torch.equal(kept, rows.logits >= expected[:, None])


def test_a_token_depends_on_its_own_row_only(sampling: SamplingKernels) -> None:
    """Bit for bit: alone, among 255 others, and next to poisoned rows."""
    rows = rows_of((SETTINGS * 20)[:256], QWEN, seed=3).to("cuda")
    together, _ = sampling.sample(*rows.inputs)
    for row in range(0, 256, 5):
        assert torch.equal(sampling.sample(*rows.take([row]).inputs)[0], together[row : row + 1])
    poisoned_rows = poisoned(rows, list(range(0, 256, 2)))
    dirty, _ = sampling.sample(*poisoned_rows.inputs)
    assert torch.equal(dirty[1::2], together[1::2])
    assert sampling.greedy(poisoned_rows.logits)[1].tolist() == [True, False] * 128
    assert bool(((dirty >= 0) & (dirty < QWEN)).all())


@pytest.mark.parametrize("setting", [(1.0, 0, 1.0, 0.0), (0.7, 40, 1.0, 0.0), (1.2, 0, 0.9, 0.0), (1.0, 30, 0.8, 0.01)])
def test_draws_follow_the_expected_distribution(
    sampling: SamplingKernels, setting: tuple[float, int, float, float]
) -> None:
    logits = torch.randn(211, generator=torch.Generator().manual_seed(4)) * 1.5
    rows = repeated(logits, setting, 50_000, seed=5)
    _, floor = reference.sample(*rows.take([0]).inputs)
    kept = logits >= floor
    expected = torch.softmax(torch.where(kept, logits / setting[0], -INF).double(), 0) * 50_000
    ids = sampling.sample(*(x.contiguous() for x in rows.to("cuda").inputs))[0].cpu()
    observed = torch.bincount(ids, minlength=211)
    assert not observed[~kept].any()
    check_chi_square(observed[kept], expected[kept])
    assert (ids == reference.sample(*rows.inputs)[0]).double().mean() > 0.999


def test_greedy_and_broken_rows(sampling: SamplingKernels) -> None:
    logits = normal(64, QWEN, seed=6).bfloat16().float()
    logits[3, 70_000] = NAN
    logits[4] = -INF
    logits[5] = 1.0
    logits[6, [150_000, 12]] = INF
    expected = reference.greedy(logits.cpu())
    for ours, theirs in zip(sampling.greedy(logits), expected, strict=True):
        assert torch.equal(ours.cpu(), theirs)
    newest, sequences = torch.zeros(100, dtype=torch.int64, device="cuda"), torch.randperm(99, device="cuda")[:64] + 1
    places = reference.TokenPlaces(
        torch.empty_like(newest[:64]), torch.empty(64, dtype=torch.bool, device="cuda"), newest, sequences.int()
    )
    for ours, theirs in zip(sampling.greedy(logits, places), expected, strict=True):
        assert torch.equal(ours.cpu(), theirs)
    assert torch.equal(newest[sequences].cpu(), expected[0]) and newest[0] == 0


@pytest.mark.parametrize("vocabulary", [QWEN, GEMMA])
@pytest.mark.parametrize("k", [0, 5, 20])
def test_logprobs(sampling: SamplingKernels, vocabulary: int, k: int) -> None:
    logits = normal(9, vocabulary + 64, seed=7)[:, :vocabulary]
    logits[2] = logits[2].bfloat16().float()
    ids = torch.randint(0, vocabulary, (9,), device="cuda")
    ids[:4] = logits[:4].argmax(1)
    chosen, rank, top_ids, top = (x.cpu() for x in sampling.logprobs(logits, ids, k))
    expected = reference.logprobs(logits.cpu(), ids.cpu(), k)
    torch.testing.assert_close(chosen, expected[0], rtol=0, atol=1e-4)
    assert torch.equal(rank, expected[1])
    assert torch.equal(top_ids, expected[2])
    torch.testing.assert_close(top, expected[3], rtol=0, atol=1e-4)


def test_edits_and_their_state(sampling: SamplingKernels) -> None:
    generator = torch.Generator().manual_seed(8)
    ids = torch.randint(0, 3000, (9000,), generator=generator, dtype=torch.int32) * 50
    slots = torch.randint(1, 33, (9000,), generator=generator, dtype=torch.int32)
    is_real = torch.rand(9000, generator=generator) < 0.9
    slots[~is_real] = -1
    logits = torch.randn(32, QWEN, generator=generator) * 4
    rates = [torch.rand(32, generator=generator) + low for low in (0.7, -0.5, -0.5)]
    bias_ids = torch.stack([torch.randperm(QWEN, generator=generator)[:300] for _ in range(32)]).to(torch.int32)
    bias_ids[:, 200:] = -1
    allowed = torch.randint(-(2**31), 2**31, (32, QWEN // 32), generator=generator).to(torch.int32)
    inputs = (ids, slots, is_real, logits, *rates, bias_ids, torch.randn(32, 300, generator=generator), allowed)
    ours = edited(sampling, *(x.cuda() for x in inputs))
    theirs = edited(sampling_for("cpu"), *(x.clone() for x in inputs))
    assert torch.equal(ours[0].cpu(), theirs[0])
    torch.testing.assert_close(ours[1].cpu(), theirs[1], rtol=1e-6, atol=1e-5)


def edited(
    sampling: SamplingKernels, ids: Tensor, slots: Tensor, is_real: Tensor, logits: Tensor, *rest: Tensor
) -> list[Tensor]:
    *rates, bias_ids, bias, allowed = rest
    seen = torch.zeros(33, QWEN, dtype=torch.int32, device=logits.device)
    sampling.mark_prompt(seen, slots, ids, is_real)
    sampling.count_tokens(seen, slots[:2000], ids[:2000], is_real[:2000])
    seen[slots[is_real][:2].long()] = 0
    sampling.penalise(logits, seen, torch.arange(1, 33, device=logits.device), *rates)
    sampling.apply_bias(logits, bias_ids, bias)
    sampling.suppress(logits, bias_ids[:, :4].contiguous(), is_real[:32])
    sampling.allow_only(logits, allowed)
    return [seen, logits]


def test_a_captured_step_follows_its_parameters(sampling: SamplingKernels) -> None:
    """Captured with one set of rows and replayed with others, it has the bits of eager runs and never waits."""
    cases = [rows_of((SETTINGS * 5)[first : first + 48], QWEN, seed=first).to("cuda") for first in (1, 7, 12)]
    static = Rows(*(x.clone() for x in cases[0].inputs))
    seen, slots = torch.zeros(48, QWEN, dtype=torch.int32, device="cuda"), torch.arange(48, device="cuda")
    rates, is_real = torch.full((48,), 1.1, device="cuda"), torch.ones(48, dtype=torch.bool, device="cuda")
    out = torch.zeros(48, dtype=torch.int64, device="cuda")

    def step(rows: Rows, seen: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        raw = sampling.logprobs(rows.logits, slots, 5)
        sampling.penalise(rows.logits, seen, slots, rates, rates, rates)
        out.copy_(sampling.sample(*rows.inputs)[0])
        sampling.count_tokens(seen, slots, out, is_real)
        return raw

    step(static, seen, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(static, seen, out)
    seen.zero_()
    eager_seen, eager_out = seen.clone(), out.clone()
    for case in cases[1:] + cases[:1]:
        for mine, theirs in zip(static.inputs, case.inputs, strict=True):
            mine.copy_(theirs)
        graph.replay()
        expected = step(case.with_(logits=case.logits.clone()), eager_seen, eager_out)
        assert torch.equal(out, eager_out)
        assert torch.equal(seen, eager_seen)
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
