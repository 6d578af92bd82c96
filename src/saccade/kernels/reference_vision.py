"""Plain-torch oracles of the vision-tower kernels, see `saccade.kernels.reference`. P patch rows, H heads, K columns of
a head, D width, G cells of a position grid, L levels, U merged units, E rows of the encoder cache."""

import torch
from torch import Tensor
from torch.nn import functional

from saccade.errors import ConfigError

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


def rotate_packed(qkv_PX: Tensor, num_heads: int, cos_PK: Tensor, sin_PK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys of [q | k | v] rows, turned as in `qk_norm_rotary_store`, and the values. Columns i and i + K/2
    of the tables hold the same angle. May overwrite its input: use the results only."""
    q_PHK, k_PHK, v_PHK = qkv_PX.view(qkv_PX.shape[0], 3, num_heads, -1).unbind(1)
    q, k = (rotate(x.float(), cos_PK, sin_PK).to(x.dtype) for x in (q_PHK, k_PHK))
    return q, k, v_PHK


def activated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """activation(x weight' + bias); kind is "silu", "gelu_tanh" or "gelu". The sum may or may not be rounded first."""
    return activate(functional.linear(x, weight, bias), kind)


def add_positions(x_PD: Tensor, table_GD: Tensor, indices_4P: Tensor, weights_4P: Tensor) -> Tensor:
    """x plus four table rows each, weighted in float32, whose sum is rounded before it is added."""
    total_PD = torch.zeros((), device=table_GD.device)
    for indices_P, weights_P in zip(indices_4P, weights_4P, strict=True):
        total_PD = total_PD + table_GD[indices_P] * weights_P.unsqueeze(-1)
    return x_PD + total_PD.to(table_GD.dtype)


def scatter_rows(rows_LUD: Tensor, targets_U: Tensor, out_LED: Tensor) -> None:
    """Row u of every level goes to row `targets_U[u]`. Padded rows share one target, whose content is undefined."""
    out_LED.index_copy_(1, targets_U, rows_LUD)


def place_rows(embeds_TD: Tensor, rows_LED: Tensor, sources_T: Tensor) -> tuple[Tensor, Tensor]:
    """Embeddings with level 0 of vision row `sources_T[t]` at token t (-1: text, keeps its own), and the other levels,
    zero at text. May overwrite the embeddings: use the results only."""
    is_text_T1 = (sources_T < 0).unsqueeze(-1)
    placed_LTD = rows_LED[:, sources_T.clamp(min=0)]
    return torch.where(is_text_T1, embeds_TD, placed_LTD[0]), placed_LTD[1:].masked_fill(is_text_T1, 0.0)


def activate(x: Tensor, kind: str) -> Tensor:
    if kind == "silu":
        return functional.silu(x)
    if kind not in ACTIVATIONS:
        raise ConfigError(f"activation {kind!r} is not known; allowed: {', '.join(ACTIVATIONS)}")
    return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def rotate(x_PHK: Tensor, cos_PW: Tensor, sin_PW: Tensor) -> Tensor:
    """In float32; columns past W are unchanged."""
    width = cos_PW.shape[-1]
    turning, rest = x_PHK[..., :width], x_PHK[..., width:]
    first, second = turning.chunk(2, dim=-1)
    partner = torch.cat((-second, first), dim=-1)
    turned = turning * cos_PW.float().unsqueeze(1) + partner * sin_PW.float().unsqueeze(1)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
