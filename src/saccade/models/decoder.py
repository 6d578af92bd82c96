"""The decoder that all families share. T token rows, L deepstack levels, K columns of a head, D width, V vocabulary."""

import torch
from torch import Tensor

from saccade.layers.attention import Attention
from saccade.layers.layer import Layer, Placement, first_of_each, new_exchange
from saccade.layers.layer_spec import MoESpec
from saccade.layers.mlp import GatedMLP, PlainMLP, new_mlp
from saccade.layers.moe import MoE
from saccade.layers.norm import new_norm
from saccade.layers.rotary import Rotary
from saccade.layers.step import Cache, Step
from saccade.layers.vocabulary import VocabTable
from saccade.models.model_spec import DecoderSpec, LayerSpec


class Decoder(Layer):
    """From ids to embeddings, hidden states and logits. Only `body` is meant for a graph: image rows are inserted into
    the embeddings before it, and the rows that need logits differ from step to step."""

    def __init__(self, place: Placement, spec: DecoderSpec) -> None:
        self.place, self.spec = place, spec
        self.exchange = new_exchange(place.group)
        self.embedding = VocabTable(place.inside("embedding"), spec.vocab_size, spec.width)
        # Embeddings are scaled in the model's dtype, so the factor is rounded to it.
        self.embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=place.dtype))
        self.rotaries = [Rotary(place, rotary) for rotary in spec.rotaries]
        self.layers = [DecoderLayer(place.inside(f"layers.{i}"), spec, layer) for i, layer in enumerate(spec.layers)]
        assert spec.deepstack_levels < len(self.layers), "deepstack rows go between layers"
        self.warmup_layers = self._warmup_layers()
        self.norm = new_norm(place, spec.width, spec.norm)
        self.head = None if spec.tied_head else VocabTable(place.inside("head"), spec.vocab_size, spec.width)

    def embed(self, ids_T: Tensor) -> Tensor:
        rows_TD = self.embedding.rows(ids_T)
        return rows_TD if self.embedding_scale == 1.0 else rows_TD * self.embedding_scale

    def body(self, step: Step) -> Tensor:
        """Hidden states after the final norm. Writes the keys and values of the step's rows to its caches."""
        return self.finish(*self._attend(step))

    def trunk(self, step: Step) -> Tensor:
        """The body up to the last attention. The rest (`finish`) works row by row, so a prompt needs the last MLP only
        for one row."""
        x_TD, residual_TD = self._attend(step)
        return x_TD + residual_TD

    def finish(self, trunk_ND: Tensor, residual_ND: Tensor | None = None) -> Tensor:
        """Trunk rows to hidden states after the final norm."""
        return self.norm.close(*self.layers[-1].feed(trunk_ND, residual_ND))

    def _attend(self, step: Step) -> tuple[Tensor, Tensor]:
        rotations = [rotary(step.positions_3T) for rotary in self.rotaries]
        x_TD: Tensor = step.embeds_TD
        residual_TD: Tensor | None = None
        for i in self.warmup_layers if step.is_warmup else range(len(self.layers)):
            if i:
                x_TD, residual_TD = self.layers[i - 1].feed(x_TD, residual_TD)
            if 0 < i <= self.spec.deepstack_levels and step.deepstack_LTD is not None:
                x_TD = x_TD + step.deepstack_LTD[i - 1]
            cos_TK, sin_TK = rotations[self.spec.layers[i].rotary]
            x_TD, residual_TD = self.layers[i].attend(x_TD, residual_TD, cos_TK, sin_TK, step, step.caches[i])
        assert residual_TD is not None, "a decoder has layers"
        return x_TD, residual_TD

    def _warmup_layers(self) -> list[int]:
        """The smallest set of layers that launches every kernel of `_attend`. A layer runs the MLP before it, whose
        weights may have another format; all leave their result in the same form."""
        return first_of_each(
            (
                self.spec.layers[i],
                layer.attention.kind(),
                None if i == 0 else (self.spec.layers[i - 1].mlp, self.layers[i - 1].mlp.kind()),
                0 < i <= self.spec.deepstack_levels,
            )
            for i, layer in enumerate(self.layers)
        )

    def logits(self, hidden_TD: Tensor, out: Tensor | None = None) -> Tensor:
        """float32 logits of all tokens, written to `out` if given."""
        scores_TV, cap = (self.head or self.embedding).logits(hidden_TD), self.spec.logit_softcap
        if cap is not None:
            scores_TV = torch.tanh(scores_TV.float() / cap) * cap
        return scores_TV.float() if out is None else out.copy_(scores_TV)

    def exchanged_bytes(self, *, rows: int, logit_rows: int) -> int:
        """The largest input of one collective, in bytes per rank, in a pass of this size."""
        logits = logit_rows * (self.head or self.embedding).weight.shape[0]
        return max(rows * self.spec.width, logits) * self.place.dtype.itemsize

    def new_caches(self, num_blocks: int, block_size: int) -> list[Cache]:
        """One (keys, values) pair per layer, for the heads of this rank."""
        heads = self.layers[0].attention.qkv
        shape = num_blocks, block_size, heads.num_kv_heads, heads.head_dim
        return [(self.place.parameter(*shape), self.place.parameter(*shape)) for _ in self.layers]


class DecoderLayer(Layer):
    """Attention and MLP; both take and return (x, residual), whose sum is the hidden state."""

    def __init__(self, place: Placement, spec: DecoderSpec, layer: LayerSpec) -> None:
        self.attention_norm = new_norm(place, spec.width, spec.norm)
        self.attention = Attention(place.inside("attention"), spec.width, spec.attention, layer.window)
        self.attention_post_norm = new_norm(place, spec.width, spec.norm) if spec.post_norms else None
        self.mlp_norm = new_norm(place, spec.width, spec.norm)
        self.mlp: GatedMLP | PlainMLP | MoE
        if isinstance(layer.mlp, MoESpec):
            self.mlp = MoE(place.inside("mlp"), spec.width, layer.mlp)
        else:
            self.mlp = new_mlp(place.inside("mlp"), spec.width, layer.mlp)
        self.mlp_post_norm = new_norm(place, spec.width, spec.norm) if spec.post_norms else None

    def attend(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        cos_TK: Tensor,
        sin_TK: Tensor,
        step: Step,
        cache: Cache,
    ) -> tuple[Tensor, Tensor]:
        inputs, residual_TD = self.attention_norm.carry(x_TD, residual_TD, self.attention.qkv.weight)
        x_TD = self.attention(inputs, cos_TK, sin_TK, step, cache)
        if self.attention_post_norm is not None:
            x_TD = self.attention_post_norm(x_TD)
        return x_TD, residual_TD

    def feed(self, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        inputs, residual_TD = self.mlp_norm.carry(x_TD, residual_TD, self.mlp.fed)
        x_TD = self.mlp(inputs)
        if self.mlp_post_norm is not None:
            x_TD = self.mlp_post_norm(x_TD)
        return x_TD, residual_TD
