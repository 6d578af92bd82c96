"""All-reduce and all-gather through torch's symmetric memory: GPU memory that all other ranks have mapped.

| algorithm | every rank | good for |
|---|---|---|
| one_shot | reads all inputs and adds them | small tensors: one synchronisation |
| two_shot | adds its share and sends it to all | large tensors: less to read |
| multimem | as two_shot, but the switch adds and copies | large tensors, if the GPUs have multicast |
| gather | copies all inputs, then adds them | dtypes that the others do not support |

All add in rank order (multimem adds in the switch, once for all ranks), so all ranks get the same bits. Each is a
kernel on the current stream with fixed addresses, so it can be captured. A separate kernel copies an input into the
reserved memory: torch's `one_shot_all_reduce_copy` lets other ranks read before all threads of a block have written.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor
from torch.distributed import ProcessGroup

from saccade.kernels.collectives import AlgorithmChoice, Collectives, Control, check_room, choose, fastest

ALIGNED_BYTES = 16  # width of the kernels' loads and stores
SUMMED = (torch.bfloat16, torch.float32)  # dtypes that torch's kernels support
OUT_SIZES = (2, 4, 8)  # numbers of ranks for which torch has an out-of-place two-shot sum
SMALLEST_BYTES, STEP = 16 * 2**10, 4  # measured sizes, each STEP times the last
NUM_SUMS = 8  # in the timed graph
ops = torch.ops.symm_mem


class SymmetricCollectives(Collectives):
    def __init__(self, group: ProcessGroup, device: torch.device, control: Control) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)
        self.choices: tuple[AlgorithmChoice, ...] = (AlgorithmChoice("one_shot"),)
        self._group, self._device, self._control = group, device, control
        self._name, self._size = group.group_name, group.size()
        self._handle: Any = None
        self._timings: dict[int, dict[str, float]] = {}

    def refusal(self) -> str:
        """Tries to map the ranks' memory and returns why that failed, or an empty string."""
        try:
            self._shared(SMALLEST_BYTES)
        except RuntimeError as error:
            return f"symmetric memory cannot be used ({str(error).splitlines()[0]})"
        return ""

    @property
    def algorithms(self) -> tuple[str, ...]:
        has_multicast = bool(getattr(self._handle, "multicast_ptr", 0))
        return ("one_shot", "two_shot", *(("multimem",) if has_multicast else ()))

    def taken(self, nbytes: int) -> str:
        return choose(self.choices, nbytes)

    def reserve(self, nbytes: int) -> None:
        """Also measures which algorithm is fastest at each size. All ranks use rank 0's timings."""
        room = _aligned(max(nbytes, SMALLEST_BYTES))
        torch.cuda.synchronize(self._device)
        self._control.barrier()  # no rank still reads the memory released below
        self.memory, self._handle = self._shared(room)
        torch.cuda.synchronize(self._device)
        self._control.barrier()
        self._timings = {size: self._measure(size) for size in measured_sizes(room)}
        timings = self._control.broadcast([[size, times] for size, times in self._timings.items()])
        self._timings = {int(size): times for size, times in timings}
        self.choices = fastest(self._timings)

    def staging(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        nbytes = prod(shape) * dtype.itemsize
        check_room(_aligned(nbytes), self.memory.numel())
        return self.memory[:nbytes].view(dtype).view(*shape)

    def all_reduce(self, x: Tensor, out: Tensor | None = None, *, algorithm: str = "") -> Tensor:
        if not x.numel():
            return x.clone() if out is None else out
        algorithm = algorithm or (self.taken(x.nbytes) if x.dtype in SUMMED else "gather")
        if algorithm == "gather":
            everyone = x.new_empty(self._size, *x.shape)
            self._copy_from_all(x, everyone.unbind(0))
            total = everyone.sum(0, dtype=x.dtype)
            return total if out is None else out.copy_(total)
        staged = self._stage(x)
        is_direct = out is not None and _can_be_written(out, staged)
        target = out.view(-1) if out is not None and is_direct else torch.empty_like(staged)
        self._sum(algorithm, staged, target)
        if out is not None and is_direct:
            return out
        total = target[: x.numel()].view(x.shape)
        return total if out is None else out.copy_(total)

    def all_gather(self, x: Tensor, dim: int, out: Tensor | None = None) -> Tensor:
        shape = [n * self._size if i == dim % x.ndim else n for i, n in enumerate(x.shape)]
        found = x.new_empty(shape) if out is None else out
        assert list(found.shape) == shape, f"{list(found.shape)} for {shape}"
        self._copy_from_all(x, found.chunk(self._size, dim=dim) if x.numel() else ())
        return found

    def describe(self) -> dict[str, Any]:
        return {
            "backend": "symmetric memory",
            "reason": "every GPU can read the others' memory",
            "reserved_bytes": self.memory.numel(),
            "all_reduce": [{"algorithm": c.algorithm, "up_to_bytes": c.up_to_bytes} for c in self.choices],
            "microseconds": {str(size): times for size, times in self._timings.items()},
        }

    def _shared(self, nbytes: int) -> tuple[Tensor, Any]:
        """Allocates memory that the other ranks map. Returns it with a handle to theirs."""
        memory = symmetric.empty(nbytes, dtype=torch.uint8, device=self._device)
        handle = symmetric.rendezvous(memory, self._group)
        memory.zero_()
        return memory, handle

    def _sum(self, algorithm: str, staged: Tensor, target: Tensor) -> None:
        if algorithm == "one_shot":
            ops.one_shot_all_reduce_out(staged, "sum", self._name, target)
        elif algorithm == "two_shot" and self._size in OUT_SIZES:
            ops.two_shot_all_reduce_out(staged, "sum", self._name, target)
        elif algorithm == "two_shot":
            target.copy_(ops.two_shot_all_reduce_(staged, "sum", self._name))
        else:
            target.copy_(ops.multimem_all_reduce_(staged, "sum", self._name))

    def _stage(self, x: Tensor) -> Tensor:
        """The input in the reserved memory, as one flat tensor. The padding at its end is undefined."""
        nbytes = _aligned(x.nbytes)
        check_room(nbytes, self.memory.numel())
        if x.data_ptr() != self.memory.data_ptr() or not x.is_contiguous():
            home = self.memory[: x.nbytes].view(x.dtype).view(x.shape)
            home.copy_(x.clone() if _overlaps(x, self.memory) else x)
        return self.memory[:nbytes].view(x.dtype)

    def _copy_from_all(self, x: Tensor, targets: Sequence[Tensor]) -> None:
        """The first barrier waits until all ranks have written, the second until all have read."""
        if not targets:
            return
        self._stage(x)
        self._handle.barrier(channel=0)
        for rank, target in enumerate(targets):
            target.copy_(self._handle.get_buffer(rank, x.shape, x.dtype, 0))
        self._handle.barrier(channel=0)

    def _measure(self, nbytes: int) -> dict[str, float]:
        staged = self.memory[:nbytes].view(torch.bfloat16)
        target = torch.empty_like(staged)
        return {name: self._microseconds(partial(self._sum, name, staged, target)) for name in self.algorithms}

    def _microseconds(self, call: Callable[[], None]) -> float:
        """Microseconds per call, from the second replay of a graph of several calls."""
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.no_grad(), torch.cuda.stream(stream):
            call()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(NUM_SUMS):
                call()
            graph.capture_end()
            self._control.barrier()
            graph.replay()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / NUM_SUMS


def measured_sizes(room: int) -> list[int]:
    found = [SMALLEST_BYTES]
    while found[-1] * STEP <= room:
        found.append(found[-1] * STEP)
    return found


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED_BYTES) * ALIGNED_BYTES


def _can_be_written(out: Tensor, staged: Tensor) -> bool:
    """Whether a kernel may write the sum straight to `out`. It must not write where other ranks still read."""
    starts = (out.data_ptr(), out.storage_offset() * out.element_size())
    is_aligned = all(start % ALIGNED_BYTES == 0 for start in starts)
    is_alike = out.is_contiguous() and out.dtype == staged.dtype and out.numel() == staged.numel()
    return is_aligned and is_alike and not _overlaps(out, staged)


def _overlaps(x: Tensor, memory: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
