"""Chooses which of the questions that fit a sample are asked, one after the other. B samples, O offers."""

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from training.dialogue import KINDS, REPLIES, VALUES, Turn
from training.two_parts import TWO_PARTS

Columns = Mapping[str, Tensor]
_COUNTS = ("count all", "count shape", "count color", "count both", "counts of two", "count and color")
_HAS = ("has shape", "has color", "has both")
_READING = (
    *("digit", "number", "read", "is digit", "first letter", "last letter", "letters", "describe"),
    *("digit and color", "word and color"),
)
_SHAPE_PLACES = ("shape and side", "shape and height")
_COLOR_PLACES = ("color and side", "color and height")
_NAMES = (
    *("shape", "color", "shape and color", "color of", "colors of two", "shape of", "describe", "count and name"),
    *("thing at", *_SHAPE_PLACES, *_COLOR_PLACES),
)
_OF_PAIRS = (
    *("shape in", "color in", "digit in", "same shape", "same color", "more", "more all", "which has", "larger"),
    *("describe", "describe pair"),
)
_PLACES = ("relation", "relation both", "left or right", "above or below", "where", "next to")

TOLD: Mapping[str, tuple[str, ...]] = {
    "shape": ("shape of", "shape moves", "describe", "shape and color", "count and name", "thing at", *_SHAPE_PLACES),
    "color": (
        *("color of", "color moves", "describe", "shape and color", "count and name", "thing at", "count and color"),
        *_COLOR_PLACES,
    ),
    "shape and color": (*_NAMES, *_COUNTS, *_HAS),
    "color of": ("shape", "color", "shape of", "shape and color", "colors of two", "count and color", *_COLOR_PLACES),
    "colors of two": (*_NAMES, "count and color"),
    "shape of": ("shape", "color", "color of", "shape and color", "colors of two", "count and color", *_COLOR_PLACES),
    "describe": (*_NAMES, *_COUNTS, *_HAS, *_PLACES, *_READING, "shape at", "color at", *_OF_PAIRS),
    "count and name": (*_NAMES, *_COUNTS, *_HAS),
    "count all": ("describe", "count and name"),
    "count shape": ("counts of two", "count and color"),
    "counts of two": ("count shape", "count and color"),
    "count and color": (*_NAMES, *_COUNTS, *_HAS),
    "shape at": ("thing at",),
    "color at": ("thing at",),
    "thing at": (*_NAMES, *_HAS, "shape at", "color at"),
    "on the left": ("shape and side", "color and side", "shape"),
    "at the top": ("shape and height", "color and height", "shape"),
    "shape and side": (*_NAMES, *_HAS, "on the left"),
    "shape and height": (*_NAMES, *_HAS, "at the top"),
    "color and side": (*_NAMES, *_HAS, "on the left", "count and color"),
    "color and height": (*_NAMES, *_HAS, "at the top", "count and color"),
    "relation both": ("where", "color of", "shape of", *_COLOR_PLACES),
    "where": ("relation both",),
    "digit": _READING,
    "number": _READING,
    "read": _READING,
    "digit and color": (*_READING, "color of digit"),
    "word and color": (*_READING, "color of text"),
    "color of digit": ("digit and color",),
    "color of text": ("word and color",),
    "is digit": ("digit", "digit and color", "describe"),
    "describe pair": _OF_PAIRS,
    "shape in": ("same shape", "describe pair", "which has"),
    "color in": ("same color", "describe pair"),
    "digit in": ("larger", "describe pair"),
    "move": ("shape moves",),
    "grow": ("shape moves",),
}
"""What an answer, or the wording of its question, gives away. These kinds are not asked after it."""

TOLD_OF_TWO: Mapping[str, tuple[str, ...]] = {
    "relation": _PLACES,
    "relation both": _PLACES,
    "left or right": ("relation", "relation both", "where", "next to"),
    "above or below": ("relation", "relation both", "where", "next to"),
    "where": _PLACES,
    "next to": _PLACES,
    "shape at": _PLACES,
    "color at": _PLACES,
    "shape of": ("color of",),
    "color of": ("shape of",),
}
"""What else it gives away if the picture has only two things to ask about."""


LONGER = frozenset((*TWO_PARTS, "describe", "describe pair"))
"""Questions that take more than one fact to answer."""


class Offer(NamedTuple):
    """A question that could be asked. `weight` (B,) counts for the first turn, `later` times as much afterwards."""

    kind: str
    weight: Tensor
    later: float | Tensor
    reply: str | Tensor
    columns: Columns


class Draft:
    """Collects the questions that could be asked, each with a weight (B,), a reply and values, and draws turns from
    those with a weight above zero."""

    def __init__(self, batch: int, device: torch.device, longer: float = 1.0) -> None:
        """Questions with two parts and descriptions get `longer` times their weight."""
        self.batch, self.device, self.longer = batch, device, longer
        self.offers: list[Offer] = []

    def offer(
        self, kind: str, weight: Tensor | float, reply: str | Tensor, later: float | Tensor = 1.0, **columns: Tensor
    ) -> None:
        """Offers a question. Weights of several offers of one kind add up."""
        weights = torch.full((self.batch,), weight, device=self.device) if isinstance(weight, float) else weight
        factor = self.longer if kind in LONGER else 1.0
        self.offers.append(Offer(kind, weights.float() * factor, later, reply, columns))

    def unknown(self, weight: float, num_words: int) -> None:
        """Offers a question without an answer, rarely after the first turn, so that refusals do not fill up samples."""
        word = torch.randint(0, num_words, (self.batch,), device=self.device)
        self.offer("unknown", weight, "unknown", later=self.seldom(0.02), word=word)

    def seldom(self, share: float) -> Tensor:
        """Returns 1 for a share of the samples, else 0: the `later` of questions that are easy or teach little."""
        return (torch.rand(self.batch, device=self.device) < share).float()

    def turns(self, num: int, is_rich: Tensor | None = None) -> list[Turn]:
        """Draws `num` turns of different kinds, whose answers earlier turns do not give away. Samples with nothing left
        to ask are not `given` further turns. `is_rich` (B,) marks scenes with so many things that two questions rarely
        concern the same ones."""
        kinds_O, replies_O, free_OO, free_of_two_OO = _tables(
            tuple(offer.kind for offer in self.offers),
            tuple(offer.reply if isinstance(offer.reply, str) else "unknown" for offer in self.offers),
            self.device,
        )
        replies_BO = self._spread([offer.reply for offer in self.offers], replies_O)
        later_BO = torch.stack([self._factor(offer.later) for offer in self.offers], 1)
        names, values_BOV = self._values()
        weights_BO = torch.stack([offer.weight for offer in self.offers], 1)
        noise = -torch.rand(num, *weights_BO.shape, device=self.device).clamp(1e-9, 1 - 1e-7).log().neg().log()
        made = []
        for number in range(num):
            score_BO = (weights_BO.clamp(min=1e-30).log() + noise[number]).masked_fill(weights_BO <= 0, -1e9)
            best_B1 = score_BO.argmax(1, keepdim=True)
            chosen = values_BOV.gather(1, best_B1.unsqueeze(-1).expand(-1, -1, len(names)))[:, 0]
            made.append(
                Turn(
                    kinds_O[best_B1[:, 0]],
                    replies_BO.gather(1, best_B1)[:, 0],
                    self._columns(names, chosen),
                    weights_BO.amax(1) > 0,
                )
            )
            free_BO = free_OO[best_B1[:, 0]]
            if is_rich is not None:
                free_BO = free_BO * torch.where(is_rich[:, None], free_BO, free_of_two_OO[best_B1[:, 0]])
            weights_BO = weights_BO * free_BO * (later_BO if number == 0 else 1.0)
        return made

    def _factor(self, later: float | Tensor) -> Tensor:
        return torch.full((self.batch,), later, device=self.device) if isinstance(later, float) else later

    def _spread(self, replies: list[str | Tensor], replies_O: Tensor) -> Tensor:
        columns = [
            replies_O[k].expand(self.batch) if isinstance(reply, str) else reply for k, reply in enumerate(replies)
        ]
        return torch.stack(columns, 1)

    def _values(self) -> tuple[list[str], Tensor]:
        """The names of the values in use, and their values for each offer (B, O, names)."""
        names = sorted({name for offer in self.offers for name in offer.columns})
        zero = torch.zeros(self.batch, dtype=torch.long, device=self.device)
        rows = [
            offer.columns[name].long() if name in offer.columns else zero for offer in self.offers for name in names
        ]
        return names, torch.stack(rows, 1).unflatten(1, (len(self.offers), len(names)))

    def _columns(self, names: list[str], chosen_BV: Tensor) -> Tensor:
        zero = torch.zeros_like(chosen_BV[:, 0])
        return torch.stack([chosen_BV[:, names.index(name)] if name in names else zero for name in VALUES], 1)


@cache
def _tables(
    kinds: tuple[str, ...], replies: tuple[str, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Offers as numbers, and which may follow which. Cached, because a copy to the device waits for all queued work."""

    def free(told: Mapping[str, tuple[str, ...]]) -> Tensor:
        rows = [[float(b != a and b not in told.get(a, ())) for b in kinds] for a in kinds]
        return torch.tensor(rows, device=device)

    return (
        torch.tensor([KINDS.index(kind) for kind in kinds], device=device),
        torch.tensor([REPLIES.index(reply) for reply in replies], device=device),
        free(TOLD),
        free(TOLD_OF_TWO),
    )
