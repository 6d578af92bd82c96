"""Plain-torch oracles of the vision-tower kernels (see `saccade.kernels.reference`). P patch rows, H heads, K columns
of a head, D width, G cells of a position grid, L levels, U merged units, E rows of the encoder cache."""

import torch
from torch import Tensor
from torch.nn import functional

from saccade.errors import ConfigError

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "quick_gelu")


def rotate_packed(qkv_PX: Tensor, num_heads: int, cos_PK: Tensor, sin_PK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The queries and keys of [q | k | v] rows, rotated as in `qk_norm_rotary_store`, and the values. Columns i and
    i + K/2 of cos and sin hold the same angle. May overwrite the input, so use only the results."""
    q_PHK, k_PHK, v_PHK = qkv_PX.view(qkv_PX.shape[0], 3, num_heads, -1).unbind(1)
    q, k = (rotate(x.float(), cos_PK, sin_PK).to(x.dtype) for x in (q_PHK, k_PHK))
    return q, k, v_PHK


def activated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """activation(x weight' + bias); kind is one of `ACTIVATIONS`. The sum may be rounded first or not."""
    return activate(functional.linear(x, weight, bias), kind)


def add_positions(x_PD: Tensor, table_GD: Tensor, indices_4P: Tensor, weights_4P: Tensor) -> Tensor:
    """Adds a weighted sum of four table rows to each row of x. The sum is in float32 and rounded before it is added."""
    total_PD = torch.zeros((), device=table_GD.device)
    for indices_P, weights_P in zip(indices_4P, weights_4P, strict=True):
        total_PD = total_PD + table_GD[indices_P] * weights_P.unsqueeze(-1)
    return x_PD + total_PD.to(table_GD.dtype)


def scatter_rows(rows_LUD: Tensor, targets_U: Tensor, out_LED: Tensor) -> None:
    """Copies row u of every level to row `targets_U[u]`. Padded rows share one target, whose content is undefined."""
    out_LED.index_copy_(1, targets_U, rows_LUD)


def place_rows(embeds_TD: Tensor, rows_LED: Tensor, sources_T: Tensor) -> tuple[Tensor, Tensor]:
    """The embeddings with level 0 of vision row `sources_T[t]` at token t, and the other levels. A source of -1 is
    text, which keeps its embedding and is zero in the other levels. May overwrite `embeds_TD`."""
    is_text_T1 = (sources_T < 0).unsqueeze(-1)
    placed_LTD = rows_LED[:, sources_T.clamp(min=0)]
    return torch.where(is_text_T1, embeds_TD, placed_LTD[0]), placed_LTD[1:].masked_fill(is_text_T1, 0.0)


def activate(x: Tensor, kind: str) -> Tensor:
    if kind == "silu":
        return functional.silu(x)
    if kind == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    if kind not in ACTIVATIONS:
        raise ConfigError(f"unknown activation {kind!r}; allowed: {', '.join(ACTIVATIONS)}")
    return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def rotate(x_PHK: Tensor, cos_PW: Tensor, sin_PW: Tensor) -> Tensor:
    """Computes in float32. Columns past W are unchanged."""
    width = cos_PW.shape[-1]
    turning, rest = x_PHK[..., :width], x_PHK[..., width:]
    first, second = turning.chunk(2, dim=-1)
    partner = torch.cat((-second, first), dim=-1)
    turned = turning * cos_PW.float().unsqueeze(1) + partner * sin_PW.float().unsqueeze(1)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
