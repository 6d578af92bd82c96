"""A whole model: a decoder, and a tower where it can see.

T token rows, L deepstack levels, U rows of vision output, D width of the decoder.
"""

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
        deepstack rows are zero at text, and None where the family has none or no row can be an image's.
        """
        if rows_LUD is None or sources_T is None:
            return self.decoder.embed(ids_T), None
        embeds_TD = self.decoder.embed(ids_T.where(sources_T < 0, 0))
        embeds_TD, deepstack_LTD = self.place.kernels.place_rows(embeds_TD, rows_LUD, sources_T)
        return embeds_TD, deepstack_LTD if self.spec.decoder.deepstack_levels else None

    def body(self, step: Step) -> Tensor:
        return self.decoder.body(step)

    def trunk(self, step: Step) -> Tensor:
        return self.decoder.trunk(step)

    def finish(self, trunk_ND: Tensor) -> Tensor:
        return self.decoder.finish(trunk_ND)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        return self.decoder.logits(hidden_TD)
