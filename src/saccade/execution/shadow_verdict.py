"""What a shadow check found, on all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import msgpack

from saccade.graphs import GraphKey
from saccade.graphs.compare import OutputDifference, Tensors
from saccade.layers.parallel import ParallelGroup

ByRank = tuple[Sequence[OutputDifference], ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The differences on every rank, and the results of this rank's eager run."""

    by_rank: ByRank
    right: Tensors

    @property
    def is_equal(self) -> bool:
        return not any(self.by_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A replay whose results differ from an eager run of the same inputs, on some rank."""

    key: GraphKey
    digest: str  # of the inputs, of rank 0 if there are several
    by_rank: ByRank
    path: Path | None  # of the file with the inputs; each rank has one

    @property
    def differences(self) -> Sequence[OutputDifference]:
        """Those of the first rank that has any."""
        return next(filter(None, self.by_rank))

    @property
    def reason(self) -> str:
        """Text for clients, which does not name the file."""
        more = f" (and {len(self.differences) - 1} more results)" if self.differences[1:] else ""
        return (
            f"graph [{self.key}] is out of service: {self._where}it differs from an eager run of inputs {self.digest}: "
            f"{self.differences[0]}{more}"
        )

    @property
    def _where(self) -> str:
        if len(self.by_rank) == 1:
            return ""
        wrong = [str(rank) for rank, found in enumerate(self.by_rank) if found]
        return f"on rank {', '.join(wrong)} of {len(self.by_rank)} "

    def __str__(self) -> str:
        kept = "could not be saved" if self.path is None else f"are in {self.path}: `saccade replay` runs them again"
        return f"{self.reason}. Its batches run without it; the inputs {kept}"


def gather_differences(group: ParallelGroup, own: Sequence[OutputDifference]) -> ByRank:
    found = group.gather(msgpack.encode(own))
    return tuple(msgpack.decode(each, type=list[OutputDifference]) for each in found)
