"""A whole model: a decoder and, in vision-language models, a tower.

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
from saccade.models.model_spec import ModelSpec, VisionSpec
from saccade.models.tower import Tower

EncoderMode = Literal["auto", "weights", "data"]


class Model(Layer):
    """`vision_group` has the ranks of `place` but its own communicator, because the tower runs on another stream.

    In encoder mode "weights" the tower is split over the ranks like the decoder. In "data" each rank holds the whole
    tower and encodes different images. "auto" picks "weights" if the tower can be split, else "data"; `why_whole` then
    says why.
    """

    why_whole = ""
    has_head = True

    def __init__(
        self,
        place: Placement,
        spec: ModelSpec,
        *,
        vision_group: ParallelGroup | None = None,
        encoder_mode: EncoderMode = "weights",
    ) -> None:
        self.place, self.spec = place, spec
        self.decoder = Decoder(place.inside("decoder"), spec.decoder)
        self.tower = None
        if spec.vision is not None:
            group = place.group if vision_group is None else vision_group
            self.tower = self._new_tower(place, spec.vision, group, encoder_mode)

    def _new_tower(self, place: Placement, spec: VisionSpec, group: ParallelGroup, mode: EncoderMode) -> Tower:
        if mode != "data":
            try:
                return Tower(replace(place.inside("tower"), group=group), spec)
            except ConfigError as error:
                if mode == "weights":
                    raise ConfigError(
                        f"{error}, or let ranks encode whole images (--mm-encoder-tp-mode data)"
                    ) from None
                self.why_whole = str(error).partition(";")[0]
        return Tower(replace(place.inside("tower"), group=ALONE), spec, group)

    def drop_head(self) -> None:
        """Call if the checkpoint has no head: hidden states are right, but logits are meaningless."""
        self.decoder.head, self.has_head = None, False

    @property
    def encoder_mode(self) -> EncoderMode | None:
        """How ranks share the tower; None if they do not."""
        if self.tower is None or self.tower.group.size == 1:
            return None
        return "data" if self.tower.sharing.size > 1 else "weights"

    def reserve(self, *, rows: int, logit_rows: int, patches: int) -> None:
        """Reserve memory for the collectives of the largest passes; `patches` is per rank. Every rank calls this once,
        with the same numbers, before it runs or captures anything."""
        language, vision = self.exchanged_bytes(rows=rows, logit_rows=logit_rows, patches=patches)
        if language:
            self.place.group.reserve(language)
        if vision and self.tower is not None:
            self.tower.group.reserve(vision)

    def exchanged_bytes(self, *, rows: int, logit_rows: int, patches: int) -> tuple[int, int]:
        """The largest input of one collective, in bytes per rank, of decoder and tower; 0 if there are none."""
        has_peers = self.place.group.size > 1
        language = self.decoder.exchanged_bytes(rows=rows, logit_rows=logit_rows) if has_peers else 0
        tower = self.tower if self.tower is not None and self.tower.group.size > 1 else None
        return language, 0 if tower is None else tower.exchanged_bytes(patches=patches)

    def encode(self, step: VisionStep) -> Tensor:
        """(1 + L, U, D) rows of the images and frames of a step, or of all ranks' steps in encoder mode "data". Level 0
        replaces the embeddings of placeholder tokens."""
        assert self.tower is not None, f"{self.spec.architecture} has no vision tower"
        return self.tower(step)

    def embed(
        self, ids_T: Tensor, rows_LUD: Tensor | None = None, sources_T: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Embeddings and deepstack rows of these tokens. `sources_T` is the vision row of each token, or -1 for text.
        Ids of placeholders are not looked up. Deepstack rows are zero for text, and None if the family has none or no
        vision rows are given."""
        if rows_LUD is None or sources_T is None:
            return self.decoder.embed(ids_T), None
        embeds_TD = self.decoder.embed(ids_T.where(sources_T < 0, 0))
        embeds_TD, deepstack_LTD = self.place.kernels.place_rows(embeds_TD, rows_LUD, sources_T)
        return embeds_TD, deepstack_LTD if self.spec.decoder.deepstack_levels else None
