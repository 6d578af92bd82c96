"""A whole model: a decoder, and a tower where it can see.

T token rows, L deepstack levels, U rows of vision output, D width of the decoder.
"""

from dataclasses import replace
from typing import Literal

from torch import Tensor

from saccade.errors import ConfigError
from saccade.layers.layer import Layer, Placement
from saccade.layers.parallel import ALONE, ParallelGroup
from saccade.layers.step import VisionStep
from saccade.models.decoder import Decoder
from saccade.models.spec import ModelSpec, VisionSpec
from saccade.models.tower import Tower

EncoderMode = Literal["auto", "weights", "data"]


class Model(Layer):
    """`vision_group` has the ranks of `place` and a communicator of its own, because the tower runs on another stream.

    In the encoder mode "weights" the tower is split over the ranks, as the decoder is; in "data" every rank holds it
    whole and encodes images of its own. "auto" is "weights" where the tower can be split, else "data", and `why_whole`
    says why.
    """

    why_whole = ""

    def __init__(
        self,
        place: Placement,
        spec: ModelSpec,
        *,
        vision_group: ParallelGroup | None = None,
        encoder_mode: EncoderMode = "weights",
    ) -> None:
        self.place, self.spec = place, spec
        self.decoder = Decoder(place, spec.decoder)
        self.tower = None
        if spec.vision is not None:
            group = place.group if vision_group is None else vision_group
            self.tower = self._new_tower(place, spec.vision, group, encoder_mode)

    def _new_tower(self, place: Placement, spec: VisionSpec, group: ParallelGroup, mode: EncoderMode) -> Tower:
        if mode != "data":
            try:
                return Tower(replace(place, group=group), spec)
            except ConfigError as error:
                if mode == "weights":
                    raise ConfigError(
                        f"{error}, or let ranks encode whole images (--mm-encoder-tp-mode data)"
                    ) from None
                self.why_whole = str(error).partition(";")[0]
        return Tower(replace(place, group=ALONE), spec, group)

    @property
    def encoder_mode(self) -> EncoderMode | None:
        """How ranks share the tower; None where they do not."""
        if self.tower is None or self.tower.group.size == 1:
            return None
        return "data" if self.tower.sharing.size > 1 else "weights"

    def reserve(self, *, rows: int, logit_rows: int, patches: int) -> None:
        """Make room for what ranks exchange in the largest passes: of the decoder, of its head, of the tower on one
        rank. All ranks call it with the same numbers, once, before they run or capture anything."""
        language, vision = self.exchanged_bytes(rows=rows, logit_rows=logit_rows, patches=patches)
        if language:
            self.place.group.reserve(language)
        if vision and self.tower is not None:
            self.tower.group.reserve(vision)

    def exchanged_bytes(self, *, rows: int, logit_rows: int, patches: int) -> tuple[int, int]:
        """The most that a rank brings to one sum or join, in decoder and tower; 0 where nothing is exchanged."""
        has_peers = self.place.group.size > 1
        language = self.decoder.exchanged_bytes(rows=rows, logit_rows=logit_rows) if has_peers else 0
        tower = self.tower if self.tower is not None and self.tower.group.size > 1 else None
        return language, 0 if tower is None else tower.exchanged_bytes(patches=patches)

    def encode(self, step: VisionStep) -> Tensor:
        """(1 + L, U, D) rows of the images and frames of a step; level 0 is what stands in for placeholder tokens.
        In the encoder mode "data", of the steps of all ranks."""
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
