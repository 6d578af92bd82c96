"""Facts about the ranks of a running engine: how they all-reduce, and what each holds."""

from msgspec import Struct

KIB = 1024


class RankShare(Struct, frozen=True, kw_only=True):
    rank: int
    weights_bytes: int
    num_blocks: int  # of the KV cache, block 0 included


class AllReduceChoice(Struct, frozen=True, kw_only=True):
    """The algorithm for tensors of at most `up_to_bytes`; None means all larger ones."""

    algorithm: str
    up_to_bytes: int | None = None


class TensorParallel(Struct, frozen=True, kw_only=True):
    size: int = 1
    backend: str = "none"
    reason: str = ""  # why this backend
    reserved_bytes: int = 0  # per rank, for communication buffers
    all_reduce: tuple[AllReduceChoice, ...] = ()  # empty where the backend has one algorithm
    microseconds: dict[str, dict[str, float]] = {}  # measured at the start, by bytes and then by algorithm
    held: tuple[RankShare, ...] = ()
    encoder_mode: str = ""  # "weights": each rank has a part of the vision encoder; "data": each encodes whole images
    encoder_reason: str = ""  # why its weights are not split, if the engine chose

    def summary(self) -> str:
        """One line, such as "2 ranks; all-reduce: symmetric memory, one-shot up to 256 KiB, two-shot above"."""
        if self.size == 1:
            return "1 rank"
        why = f" ({self.reason})" if self.backend == "NCCL" and self.reason else ""
        sums = ", ".join([f"{self.size} ranks; all-reduce: {self.backend}{why}", *map(self._words, self.all_reduce)])
        return f"{sums}; {self._images()}" if self.encoder_mode == "data" else sums

    def _images(self) -> str:
        return "each rank encodes whole images" + (f" ({self.encoder_reason})" if self.encoder_reason else "")

    def _words(self, choice: AllReduceChoice) -> str:
        name = choice.algorithm.replace("_", "-")
        if choice.up_to_bytes is not None:
            return f"{name} up to {choice.up_to_bytes // KIB:,} KiB"
        return f"{name} above" if len(self.all_reduce) > 1 else name


ONE_RANK = TensorParallel()
