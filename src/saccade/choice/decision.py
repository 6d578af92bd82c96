"""How one batch is to be run, and why."""

from dataclasses import dataclass
from enum import StrEnum

from saccade.choice.key import Capacity, GraphKey
from saccade.config import Tier


class Reason(StrEnum):
    """Why a batch was run the way it was."""

    EXACT_GRAPH = "its structure has a graph of its own"
    FITS_BUCKET = "it fits a bucket"
    GRAPHS_OFF = "graphs are off"
    TOO_LARGE = "it is larger than every bucket"
    NOT_CAPTURED = "no graph is captured for it yet"
    EAGER_FASTER = "a replay measured no faster"
    OUT_OF_SERVICE = "its graph was found wrong and taken out of service"


@dataclass(frozen=True, slots=True)
class Decision:
    """How to run one batch, and why: in the graph of `key`; without one eagerly, at the shapes of `padded_to` if given.

    With graphs off the same padded shapes are run, so that switching them off changes no answer by a bit.
    """

    tier: Tier
    reason: Reason
    key: GraphKey | None = None
    detail: str = ""
    padded_to: Capacity | None = None

    def __str__(self) -> str:
        place = f" [{self.key}]" if self.key else ""
        return f"{self.tier}{place}: {self.reason}" + (f" ({self.detail})" if self.detail else "")
