"""Plain-torch oracles of sampling: the CPU path, and the reference that GPU kernels are tested against.

N rows, V tokens of the vocabulary, S slots of requests, K listed tokens of a row. Logits are float32. Every parameter
is a tensor with one value per row, nothing is read on the host, and rows are independent. So a step can be recorded
once and replayed, and padded rows may hold anything.

When a token is chosen, NaN counts as -inf and +inf as the largest float, so a broken row still yields a valid token.
`greedy` reports broken rows.

A sampling step applies bias, suppressed tokens, allowed tokens and penalties, each of which edits the logits in place.
Then `sample` applies temperature, min-p, top-k and top-p. Log-probabilities read the raw logits, before all of this.
"""

from typing import NamedTuple

import torch
from torch import Tensor

IN_PROMPT = -(2**31)  # sign bit of an entry of `seen`; the other 31 bits count the token's outputs
MIN_TEMPERATURE = 1e-5  # a row below this is greedy, because logits / temperature could overflow
_LOW_32 = 0xFFFFFFFF


class TokenPlaces(NamedTuple):
    """Where the results of `greedy` go. The token of row n is also the newest one of sequence `sequences_N[n]`."""

    ids_N: Tensor
    is_bad_N: Tensor
    newest_S: Tensor
    sequences_N: Tensor


def greedy(logits_NV: Tensor, places: TokenPlaces | None = None) -> tuple[Tensor, Tensor]:
    """The token with the largest logit (the lowest id among equals), and which rows are bad: any NaN, or all -inf."""
    is_bad_N = torch.isnan(logits_NV).any(dim=1) | (logits_NV == float("-inf")).all(dim=1)
    ids_N = _cleaned(logits_NV).argmax(dim=1)
    if places is None:
        return ids_N, is_bad_N
    places.newest_S[places.sequences_N] = ids_N
    return places.ids_N.copy_(ids_N), places.is_bad_N.copy_(is_bad_N)


def penalise(
    logits_NV: Tensor,
    seen_SV: Tensor,
    slots_N: Tensor,
    repetition_N: Tensor,
    presence_N: Tensor,
    frequency_N: Tensor,
) -> None:
    """Lowers, in place, the logits of tokens that row n's request (slot slots_N[n]) has seen. Repetition divides
    positive logits and multiplies negative logits of tokens in the prompt or output. Then frequency is subtracted for
    every output of the token, and presence once if there was any. Values of 1, 0 and 0 change nothing."""
    seen_NV = seen_SV[slots_N.clamp(0, seen_SV.shape[0] - 1).long()]
    counts = (seen_NV & ~IN_PROMPT).float()
    repetition_N1 = repetition_N[:, None]
    x = torch.where(logits_NV > 0, logits_NV / repetition_N1, logits_NV * repetition_N1)
    x = x - frequency_N[:, None] * counts - presence_N[:, None] * (counts > 0)
    logits_NV.copy_(torch.where(seen_NV != 0, x, logits_NV))


def mark_prompt(seen_SV: Tensor, slots_T: Tensor, ids_T: Tensor, is_real_T: Tensor) -> None:
    """Marks ids_T[t] as part of the prompt of the request in slot slots_T[t]. Tokens may repeat."""
    flat = seen_SV.view(-1)
    places = _places(seen_SV, slots_T, ids_T, is_real_T)
    now = flat[places]
    # Setting the sign bit makes an entry smaller, so the minimum of several writes is right.
    marked = torch.where(is_real_T, now | IN_PROMPT, now.new_full((), 2**31 - 1))
    flat.scatter_reduce_(0, places, marked, "amin")


def count_tokens(seen_SV: Tensor, slots_N: Tensor, ids_N: Tensor, is_real_N: Tensor) -> None:
    """Counts ids_N[n] as an output of the request in slot slots_N[n]; repeated pairs add up."""
    places = _places(seen_SV, slots_N, ids_N, is_real_N)
    seen_SV.view(-1).index_add_(0, places, is_real_N.to(seen_SV.dtype))


def apply_bias(logits_NV: Tensor, ids_NK: Tensor, values_NK: Tensor) -> None:
    """Adds values to the logits of listed tokens, in place. An id of -1 is padding; other ids of a row are distinct."""
    values = torch.where(ids_NK >= 0, values_NK, 0.0)
    logits_NV.scatter_add_(1, ids_NK.clamp(min=0).long(), values)


def suppress(logits_NV: Tensor, ids_NK: Tensor, is_active_N: Tensor) -> None:
    """Forbids the listed tokens (-1 is padding) in active rows, such as end-of-text before the minimum length."""
    forbids = (ids_NK >= 0) & is_active_N[:, None]
    values = torch.where(forbids, float("-inf"), float("inf")).to(logits_NV.dtype)
    logits_NV.scatter_reduce_(1, ids_NK.clamp(min=0).long(), values, "amin")


def allow_only(logits_NV: Tensor, allowed_NW: Tensor) -> None:
    """Forbids every token t whose bit t % 32 of word t // 32 (int32) is 0."""
    tokens = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    bits = (allowed_NW[:, tokens // 32] >> (tokens % 32).to(allowed_NW.dtype)) & 1
    logits_NV.masked_fill_(bits == 0, float("-inf"))


def sample(
    logits_NV: Tensor,
    temperature_N: Tensor,
    top_k_N: Tensor,
    top_p_N: Tensor,
    min_p_N: Tensor,
    seeds_N: Tensor,
    counters_N: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draws one token per row from softmax(logits / temperature) over the tokens that min-p, top-k and top-p keep. Also
    returns each row's floor: tokens with logits >= floor are kept. It is -inf if all are kept.

    min-p keeps the tokens at least min_p times as likely as the likeliest one; top-k keeps the k likeliest of these;
    top-p keeps the fewest of the rest that hold at least that share of their probability. Ties with the last kept token
    are kept too, so the result does not depend on their order. top_k=0, top_p=1 and min_p=0 switch a filter off. A
    temperature below 1e-5 is greedy.

    The drawn token has the largest logit / temperature + Gumbel noise. The noise depends only on (seed, counter,
    token), not on the row, the batch size or the other tokens.
    """
    x_NV = _cleaned(logits_NV)
    is_drawn_N = temperature_N >= MIN_TEMPERATURE
    inverse_N1 = (1.0 / torch.where(is_drawn_N, temperature_N, 1.0))[:, None]
    floor_N = _floor(x_NV, temperature_N, inverse_N1, top_k_N, top_p_N, min_p_N)
    floor_N = torch.where(is_drawn_N, floor_N, float("-inf"))
    noisy = x_NV * inverse_N1 + gumbel(seeds_N, counters_N, x_NV.shape[1])
    scores = torch.where(is_drawn_N[:, None], noisy, x_NV)
    return torch.where(x_NV >= floor_N[:, None], scores, float("-inf")).argmax(dim=1), floor_N


def logprobs(logits_NV: Tensor, ids_N: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The log-probability (float32) of each row's token, its rank, and the k likeliest ids (int64) with their
    log-probabilities (0 <= k <= 20). The rank is 1 plus the number of likelier tokens. Ties are listed by id."""
    x_NV = _cleaned(logits_NV)
    all_NV = torch.log_softmax(x_NV, dim=1)
    picked_N1 = ids_N.clamp(0, x_NV.shape[1] - 1).long()[:, None]
    rank_N = 1 + (x_NV > x_NV.gather(1, picked_N1)).sum(dim=1)
    top_ids_NK = _likeliest(x_NV, k)
    return all_NV.gather(1, picked_N1)[:, 0], rank_N, top_ids_NK, all_NV.gather(1, top_ids_NK)


def _likeliest(x_NV: Tensor, k: int) -> Tensor:
    if k == 0:  # sorting the vocabulary takes longer than computing its logits
        return torch.empty((x_NV.shape[0], 0), dtype=torch.int64, device=x_NV.device)
    return torch.sort(x_NV, dim=1, descending=True, stable=True).indices[:, :k]


def gumbel(seeds_N: Tensor, counters_N: Tensor, num_tokens: int) -> Tensor:
    """Gumbel noise (N, num_tokens): -log(E) with E exponential. Token t uses word t % 4 of Philox-4x32-10 at t // 4.

    E = -log(1 - v) with v in (0, 1) in steps of 2**-32. Winning tokens have the smallest E and so come from small v,
    where floats are dense. Below 1/16 a series replaces the logarithm, because 1 - v would be rounded.
    """
    quads = torch.arange((num_tokens + 3) // 4, device=seeds_N.device)
    counters, seeds = counters_N[:, None], seeds_N[:, None]
    words = philox(
        (
            quads[None, :].expand(len(seeds_N), -1),
            counters & _LOW_32,
            (counters >> 32) & _LOW_32,
            torch.zeros_like(counters),
        ),
        (seeds & _LOW_32, (seeds >> 32) & _LOW_32),
    )
    bits = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(1)[:, :num_tokens]
    v = (bits.float() * 2.0**-32 + 2.0**-33).clamp(max=1.0 - 2.0**-24)
    series = v * (1.0 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5)))))
    return -torch.log(torch.where(v < 1 / 16, series, -torch.log(1.0 - v)))


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Philox-4x32-10 of Salmon et al. (2011); words are int64 in [0, 2**32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap around, but their upper 32 bits are still right.
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((b >> 32) & _LOW_32) ^ c1 ^ k0, b & _LOW_32, ((a >> 32) & _LOW_32) ^ c3 ^ k1, a & _LOW_32
        k0, k1 = (k0 + 0x9E3779B9) & _LOW_32, (k1 + 0xBB67AE85) & _LOW_32
    return c0, c1, c2, c3


def _floor(
    x_NV: Tensor, temperature_N: Tensor, inverse_N1: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor
) -> Tensor:
    """Each filter keeps a prefix of the tokens in descending order, so all of them together are one threshold."""
    vocabulary = x_NV.shape[1]
    sorted_NV = torch.sort(x_NV, dim=1, descending=True).values
    peak_N1 = sorted_NV[:, :1]
    floor_N1 = peak_N1 + (temperature_N * torch.log(min_p_N))[:, None]
    floor_N1 = torch.where(min_p_N[:, None] > 0, torch.minimum(floor_N1, peak_N1), float("-inf"))
    kth_N1 = sorted_NV.gather(1, (top_k_N.long()[:, None] - 1).clamp(0, vocabulary - 1))
    has_k_N1 = ((top_k_N > 0) & (top_k_N < vocabulary))[:, None]
    floor_N1 = torch.where(has_k_N1, torch.maximum(floor_N1, kth_N1), floor_N1)
    weights = torch.where(sorted_NV >= floor_N1, torch.exp((sorted_NV - peak_N1) * inverse_N1), 0.0)
    mass_NV = weights.double().cumsum(dim=1)
    num_before_N1 = (mass_NV < top_p_N[:, None] * mass_NV[:, -1:]).sum(dim=1, keepdim=True)
    least_N1 = sorted_NV.gather(1, num_before_N1.clamp(max=vocabulary - 1))
    floor_N1 = torch.where(top_p_N[:, None] < 1, torch.maximum(floor_N1, least_N1), floor_N1)
    return floor_N1[:, 0]


def _cleaned(x: Tensor) -> Tensor:
    return torch.nan_to_num(x, nan=float("-inf"), posinf=torch.finfo(x.dtype).max, neginf=float("-inf"))


def _places(seen_SV: Tensor, slots: Tensor, ids: Tensor, is_real: Tensor) -> Tensor:
    """Flat positions in `seen`. Padding gets a valid but meaningless position."""
    return torch.where(is_real, slots.long() * seen_SV.shape[1] + ids.long(), 0)
