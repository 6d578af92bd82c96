"""Qwen3-VL in plain torch for training: Hugging Face's parameter names, dense attention, one image grid per batch.

B samples, T tokens, P patches, U merged units, D a width, H heads, K columns of a head, L levels of deepstack.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

PATCH, MERGE, TEMPORAL = 16, 2, 2
FACTOR = PATCH * MERGE


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model, under the names of its configuration file where those are clear."""

    vocab_size: int = 1024
    hidden_size: int = 192
    layers: int = 6
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 512
    sections: tuple[int, int, int] = (6, 5, 5)
    rope_theta: float = 10000.0
    eps: float = 1e-6
    vision_size: int = 160
    vision_layers: int = 6
    vision_heads: int = 5
    vision_intermediate_size: int = 512
    grid_side: int = 16
    deepstack: tuple[int, ...] = (1, 2, 3)


class Model(nn.Module):
    """`see` turns pixels into rows of the decoder's width, `read` a sequence of rows into hidden states."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = nn.ModuleDict({"visual": Tower(shape), "language_model": Decoder(shape)})

    @property
    def tower(self) -> "Tower":
        tower = self.model["visual"]
        assert isinstance(tower, Tower)
        return tower

    @property
    def decoder(self) -> "Decoder":
        decoder = self.model["language_model"]
        assert isinstance(decoder, Decoder)
        return decoder

    def compile_blocks(self) -> None:
        """Fuses the operations between matrix products. Blocks of a kind share one compilation for all sizes.

        Mergers are not compiled: they are few, and compiling their two kinds takes longer than it saves in a run.
        """
        for part in (*self.tower.blocks, *self.decoder.layers):
            part.compile(dynamic=True)

    def embed(self, ids_BT: Tensor) -> Tensor:
        rows: Tensor = _Lookup.apply(ids_BT, self.decoder.embed_tokens.weight)  # type: ignore[no-untyped-call]
        return rows

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        return functional.linear(hidden_BTD, self.decoder.embed_tokens.weight)

    def forward(self, batch: "Batch") -> Tensor:
        """Logits (B, A, V) of the rows that predict answers."""
        return self.answer(batch, self.see(batch))

    def see(self, batch: "Batch") -> Tensor | None:
        """Encodes all images of a sample into (L, B, N, D): final rows, then the rows of each deepstack level."""
        if batch.levels is not None or batch.layout is None or batch.patches is None:
            return batch.levels
        levels: Tensor = self.tower(batch.patches.flatten(0, 1), batch.layout)
        joined: Tensor = levels.unflatten(1, batch.patches.shape[:2]).flatten(2, 3)
        return joined

    def answer(self, batch: "Batch", levels: Tensor | None) -> Tensor:
        hidden_BTD = self.decoder(self.embed(batch.ids), batch.positions, levels, batch.places)
        rows = batch.rows.unsqueeze(-1).expand(-1, -1, hidden_BTD.shape[-1])
        return self.logits(hidden_BTD.gather(1, rows))

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Draws normal weights, scaled by their input width, and output projections also by the depth.

        Positions are about as large as the patches they are added to; the model ignores smaller ones for thousands of
        steps.
        """
        depth = {"visual": self.shape.vision_layers, "language_model": self.shape.layers}
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            std = {"embed_tokens.weight": 0.08, "pos_embed.weight": 0.5}.get(
                name.split(".", 2)[2], parameter[0].numel() ** -0.5
            )
            if name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight", "mlp.linear_fc2.weight")):
                std *= (2 * depth[name.split(".")[1]]) ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


class _Lookup(torch.autograd.Function):
    """An embedding whose gradient is one matrix product, without sorting or collisions, so that it can be captured."""

    @staticmethod
    def forward(ctx: Any, ids_BT: Tensor, table_VD: Tensor) -> Tensor:
        ctx.save_for_backward(ids_BT)
        ctx.num_rows = table_VD.shape[0]
        return functional.embedding(ids_BT, table_VD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        (ids_BT,) = ctx.saved_tensors
        (gradient,) = gradients
        names = torch.arange(ctx.num_rows, device=ids_BT.device)
        hits_NV = (ids_BT.flatten()[:, None] == names).to(gradient.dtype)
        return None, hits_NV.T @ gradient.flatten(0, 1)


class Tower(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.vision_size
        self.patch_embed = nn.ModuleDict(
            {"proj": nn.Conv3d(3, width, (TEMPORAL, PATCH, PATCH), (TEMPORAL, PATCH, PATCH))}
        )
        self.pos_embed = nn.Embedding(shape.grid_side**2, width)
        self.blocks = nn.ModuleList([VisionBlock(shape) for _ in range(shape.vision_layers)])
        self.merger = Merger(shape, after_merge=False)
        self.deepstack_merger_list = nn.ModuleList([Merger(shape, after_merge=True) for _ in shape.deepstack])

    def forward(self, patches_BPC: Tensor, layout: "Layout") -> Tensor:
        """(L, B, U, D): the merged rows, then those of each deepstack level. A patch holds one frame or two."""
        x_BPD = self._embed(patches_BPC) + layout.interpolation_PG @ self.pos_embed.weight
        levels: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            x_BPD = block(x_BPD, layout.cos_PK, layout.sin_PK)
            if i in self.shape.deepstack:
                levels.append(self.deepstack_merger_list[len(levels)](x_BPD))
        return torch.stack([self.merger(x_BPD), *levels])

    def _embed(self, patches_BPC: Tensor) -> Tensor:
        """A still picture is the same frame twice, so its patches use the sum of both frames' weights."""
        convolution = self.patch_embed["proj"]
        assert isinstance(convolution, nn.Conv3d)
        weight: Tensor = convolution.weight
        if patches_BPC.shape[-1] == 3 * PATCH * PATCH:
            weight = weight.sum(2)
        return functional.linear(patches_BPC, weight.flatten(1), convolution.bias)


class VisionBlock(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.vision_size
        self.heads = shape.vision_heads
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        hidden = shape.vision_intermediate_size
        self.mlp = nn.ModuleDict({"linear_fc1": nn.Linear(width, hidden), "linear_fc2": nn.Linear(hidden, width)})

    def forward(self, x_BPD: Tensor, cos_PK: Tensor, sin_PK: Tensor) -> Tensor:
        qkv = self.attn["qkv"](self.norm1(x_BPD)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        o_BHPK = attend(rotate(q, cos_PK, sin_PK), rotate(k, cos_PK, sin_PK), v)
        x_BPD = x_BPD + self.attn["proj"](o_BHPK.transpose(1, 2).flatten(2))
        inner = functional.gelu(self.mlp["linear_fc1"](self.norm2(x_BPD)), approximate="tanh")
        out: Tensor = x_BPD + self.mlp["linear_fc2"](inner)
        return out


class Merger(nn.Module):
    def __init__(self, shape: Shape, *, after_merge: bool) -> None:
        super().__init__()
        joined = shape.vision_size * MERGE * MERGE
        self.after_merge = after_merge
        self.norm = nn.LayerNorm(joined if after_merge else shape.vision_size, eps=1e-6)
        self.linear_fc1 = nn.Linear(joined, joined)
        self.linear_fc2 = nn.Linear(joined, shape.hidden_size)

    def forward(self, x_BPD: Tensor) -> Tensor:
        if self.after_merge:
            x = self.norm(x_BPD.unflatten(1, (-1, MERGE * MERGE)).flatten(2))
        else:
            x = self.norm(x_BPD).unflatten(1, (-1, MERGE * MERGE)).flatten(2)
        out: Tensor = self.linear_fc2(functional.gelu(self.linear_fc1(x)))
        return out


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList([DecoderLayer(shape) for _ in range(shape.layers)])
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.eps)

    def forward(self, x_BTD: Tensor, positions_3BT: Tensor, levels_LBND: Tensor | None, places_BN: Tensor) -> Tensor:
        """Hidden states after the last norm. Padding may follow a sample's tokens: attention is causal.

        The first of the levels are rows of images, which stand at `places`; the others are added there after the first
        layers.
        """
        cos, sin = self.rotation(positions_3BT, x_BTD.dtype)
        index = places_BN.unsqueeze(-1).expand(-1, -1, x_BTD.shape[-1])
        if levels_LBND is not None:
            x_BTD = x_BTD.scatter(1, index, levels_LBND[0])
        for i, layer in enumerate(self.layers):
            x_BTD = layer(x_BTD, cos, sin)
            if levels_LBND is not None and i + 1 < levels_LBND.shape[0]:
                x_BTD = x_BTD.scatter_add(1, index, levels_LBND[i + 1])
        out: Tensor = self.norm(x_BTD)
        return out

    def rotation(self, positions_3BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines (B, 1, T, K). Frequencies follow time, row and column in turn; time takes the rest."""
        shape, device = self.shape, positions_3BT.device
        axes = torch.zeros(shape.head_dim // 2, dtype=torch.long, device=device)
        for axis in (1, 2):
            axes[axis : shape.sections[axis] * 3 : 3] = axis
        exponents = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32) / shape.head_dim
        angles_BTF = positions_3BT[axes].permute(1, 2, 0).float() * shape.rope_theta**-exponents
        angles_BTK = torch.cat((angles_BTF, angles_BTF), -1).unsqueeze(1)
        return angles_BTK.cos().to(dtype), angles_BTK.sin().to(dtype)


class DecoderLayer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, head = shape.hidden_size, shape.head_dim
        self.input_layernorm = nn.RMSNorm(width, eps=shape.eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=shape.eps)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(width, shape.heads * head, bias=False),
                "k_proj": nn.Linear(width, shape.kv_heads * head, bias=False),
                "v_proj": nn.Linear(width, shape.kv_heads * head, bias=False),
                "o_proj": nn.Linear(shape.heads * head, width, bias=False),
                "q_norm": nn.RMSNorm(head, eps=shape.eps),
                "k_norm": nn.RMSNorm(head, eps=shape.eps),
            }
        )
        hidden = shape.intermediate_size
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(width, hidden, bias=False),
                "up_proj": nn.Linear(width, hidden, bias=False),
                "down_proj": nn.Linear(hidden, width, bias=False),
            }
        )

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_BTD = x_BTD + self._attend(self.input_layernorm(x_BTD), cos, sin)
        h_BTD = self.post_attention_layernorm(x_BTD)
        inner = functional.silu(self.mlp["gate_proj"](h_BTD)) * self.mlp["up_proj"](h_BTD)
        out: Tensor = x_BTD + self.mlp["down_proj"](inner)
        return out

    def _attend(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        part, head = self.self_attn, self.shape.head_dim
        q = part["q_norm"](part["q_proj"](x_BTD).unflatten(-1, (-1, head))).transpose(1, 2)
        k = part["k_norm"](part["k_proj"](x_BTD).unflatten(-1, (-1, head))).transpose(1, 2)
        v = part["v_proj"](x_BTD).unflatten(-1, (-1, head)).transpose(1, 2)
        groups = self.shape.heads // self.shape.kv_heads
        k, v = (part.repeat_interleave(groups, dim=1) for part in (rotate(k, cos, sin), v))
        o_BHTK = attend(rotate(q, cos, sin), k, v, is_causal=True)
        out: Tensor = part["o_proj"](o_BHTK.transpose(1, 2).flatten(2))
        return out


@dataclass(frozen=True)
class Layout:
    """What a grid of U = rows x columns merged units fixes: rotary tables and the interpolation of positions."""

    rows: int
    columns: int
    cos_PK: Tensor
    sin_PK: Tensor
    interpolation_PG: Tensor

    @property
    def units(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class Batch:
    """What one step reads: I images a sample as patches (B, I, P, C), tokens, positions, the tokens (B, N) that the
    images' rows replace, and the rows (B, A) that predict the targets; `marks` as in marks.py, or None; `levels` where
    the tower has seen the images already."""

    patches: Tensor | None
    layout: Layout | None
    ids: Tensor
    positions: Tensor
    places: Tensor
    rows: Tensor
    targets: Tensor
    kind: Tensor
    marks: Any = None
    levels: Tensor | None = None


def place_images(starts_BI: Tensor, num_tokens: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Positions (3, B, T) and the tokens (B, N) of images that begin at `starts`, in order, all of one size."""
    device, units = starts_BI.device, rows * columns
    token = torch.arange(num_tokens, device=device)[None]
    inner = torch.arange(units, device=device)
    saved = units - max(rows, columns)
    ended = (token[:, None] >= starts_BI[:, :, None] + units).sum(1)
    text = token - ended * saved
    places = (starts_BI[:, :, None] + inner).flatten(1).clamp(max=num_tokens - 1)
    order = torch.arange(starts_BI.shape[1], device=device)
    base = (starts_BI - order * saved)[:, :, None].expand(-1, -1, units)
    grid = torch.stack([base, base + inner // columns, base + inner % columns]).flatten(2)
    positions = text.expand(3, -1, -1).scatter(2, places.expand(3, -1, -1), grid)
    return positions, places


def make_layout(rows: int, columns: int, shape: Shape, device: torch.device, dtype: torch.dtype) -> Layout:
    """The layout of an image of rows x columns merged units; patches come unit by unit."""
    units = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    inner = torch.cartesian_prod(torch.arange(MERGE), torch.arange(MERGE))
    places_P2 = (units[:, None] * MERGE + inner[None]).flatten(0, 1).float()
    half = shape.vision_size // shape.vision_heads // 2
    frequencies = 10000.0 ** -(torch.arange(0, half, 2).float() / half)
    angles_PF = (places_P2[:, :, None] * frequencies).flatten(1)
    angles_PK = torch.cat((angles_PF, angles_PF), -1)
    spots_P2 = places_P2 * (shape.grid_side - 1) / torch.tensor([rows * MERGE - 1, columns * MERGE - 1]).clamp(min=1)
    ticks = torch.arange(shape.grid_side).float()
    shares = (1 - (spots_P2[:, :, None] - ticks).abs()).clamp(min=0)
    interpolation = (shares[:, 0, :, None] * shares[:, 1, None, :]).flatten(1)
    moved = [tensor.to(device=device, dtype=dtype) for tensor in (angles_PK.cos(), angles_PK.sin(), interpolation)]
    return Layout(rows, columns, *moved)


def patchify(frames_BFCHW: Tensor) -> Tensor:
    """(B, P, channels x frames x 16 x 16), patches in the order of a layout."""
    batch, frames, channels, height, width = frames_BFCHW.shape
    cells = frames_BFCHW.reshape(batch, frames, channels, height // FACTOR, MERGE, PATCH, width // FACTOR, MERGE, PATCH)
    order = cells.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return order.reshape(batch, height * width // PATCH**2, channels * frames * PATCH**2)


def attend(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, *, is_causal: bool = False) -> Tensor:
    """On a CPU in bf16, torch's fused attention takes three times as long forward and backward as plain products."""
    if q_BHTK.is_cuda or q_BHTK.dtype != torch.bfloat16:
        return functional.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=is_causal)
    scores_BHTT = (q_BHTK * q_BHTK.shape[-1] ** -0.5) @ k_BHTK.transpose(-1, -2)
    if is_causal:
        num = scores_BHTT.shape[-1]
        scores_BHTT = scores_BHTT + torch.full((num, num), -torch.inf, dtype=scores_BHTT.dtype).triu_(1)
    out: Tensor = scores_BHTT.softmax(-1) @ v_BHTK
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation of the last dimension."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin
