"""A whole model: a decoder, and a tower where it can see.

T token rows, L deepstack levels, U rows of vision output, D width of the decoder.
"""

import torch
from torch import Tensor

from saccade.layers.layer import Layer, Placement
from saccade.layers.step import Step, VisionStep
from saccade.models.decoder import Decoder
from saccade.models.spec import ModelSpec
from saccade.models.tower import Tower


class Model(Layer):
    def __init__(self, place: Placement, spec: ModelSpec) -> None:
        self.place, self.spec = place, spec
        self.decoder = Decoder(place, spec.decoder)
        self.tower = Tower(place, spec.vision) if spec.vision else None

    def encode(self, step: VisionStep) -> Tensor:
        """(1 + L, U, D) rows of the images and frames of a step; level 0 is what stands in for placeholder tokens."""
        assert self.tower is not None, f"{self.spec.architecture} has no vision tower"
        return self.tower(step)

    def embed(
        self, ids_T: Tensor, rows_LUD: Tensor | None = None, sources_T: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Embeddings and deepstack rows of these tokens.

        `sources_T` says which vision row stands at a token, -1 for text; ids of placeholders are not looked up. The
        deepstack rows are zero at text, and None only where the family has none at all.
        """
        if rows_LUD is None or sources_T is None:
            return self.decoder.embed(ids_T), self._no_deepstack(ids_T)
        is_text_T1 = (sources_T < 0).unsqueeze(-1)
        embeds_TD = self.decoder.embed(ids_T.where(sources_T < 0, 0))
        placed_LTD = rows_LUD[:, sources_T.clamp(min=0)]
        embeds_TD = torch.where(is_text_T1, embeds_TD, placed_LTD[0])
        levels = self.spec.decoder.deepstack_levels
        return embeds_TD, placed_LTD[1:].masked_fill(is_text_T1, 0.0) if levels else None

    def body(self, step: Step) -> Tensor:
        return self.decoder.body(step)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        return self.decoder.logits(hidden_TD)

    def _no_deepstack(self, ids_T: Tensor) -> Tensor | None:
        spec = self.spec.decoder
        if not spec.deepstack_levels:
            return None
        return self.place.parameter(spec.deepstack_levels, ids_T.shape[0], spec.width)
