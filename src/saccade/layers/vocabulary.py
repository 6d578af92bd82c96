"""Embedding and output head. T rows, D width, V tokens of this rank."""

from collections.abc import Iterator

from torch import Tensor
from torch.nn import functional

from saccade.layers.formats import ALIGNED, Slot
from saccade.layers.layer import Layer, Placement


class VocabTable(Layer):
    """The vocabulary's rows, split over the ranks. The shares of the last ranks may end in padding."""

    def __init__(self, place: Placement, num_tokens: int, width: int) -> None:
        self.group, self.kernels = place.group, place.kernels
        self.num_tokens = num_tokens
        self.start, self.count, share = place.group.spread(num_tokens, "vocab_size", multiple=ALIGNED)
        self.weight, self.format = place.weight(share, width)

    def rows(self, ids_T: Tensor) -> Tensor:
        """The embeddings of `ids_T`, which must all be valid tokens."""
        if self.group.size == 1:
            return functional.embedding(ids_T, self.weight.data)
        local_T = ids_T - self.start
        is_mine_T = (local_T >= 0) & (local_T < self.count)
        rows_TD = functional.embedding(local_T.where(is_mine_T, 0), self.weight.data)
        return self.group.all_reduce(rows_TD.masked_fill(~is_mine_T.unsqueeze(-1), 0.0))

    def logits(self, x_TD: Tensor) -> Tensor:
        scores = self.group.all_gather(self.kernels.linear(x_TD, self.weight.data))
        return scores[..., : self.num_tokens]

    def own_slots(self) -> Iterator[tuple[str, Slot]]:
        shape = (self.num_tokens, self.weight.shape[1])
        held = self.weight.rows(0, self.count)
        yield from self.format.slots(held, shape, dim=0, start=self.start, std=shape[1] ** -0.5)
