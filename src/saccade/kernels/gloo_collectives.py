"""All-reduce and all-gather on a CPU, through gloo.

Each call is one torch operation that names its process group, so a recording has one node for it and a replay exchanges
the current contents. Every rank receives all tensors and adds them in rank order, so all get the same bits.

On a size mismatch gloo aborts the process that receives too much and leaves mixed data in the other. So ranks exchange
sizes first, in a message of fixed length that also has room for a small tensor.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

from saccade.errors import GraphError
from saccade.kernels.collectives import Collectives, check_room

SIZE_BYTES = 8
SMALL_BYTES = 8192

_LIBRARY = torch.library.Library("saccade", "FRAGMENT")
_LIBRARY.define("all_reduce(Tensor x, Tensor(a!) memory, str group) -> Tensor")
_LIBRARY.define("all_gather(Tensor x, Tensor(a!) memory, str group, int dim) -> Tensor")


class GlooCollectives(Collectives):
    algorithms = ("gloo",)

    def __init__(self, group: ProcessGroup) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._name, self._size = group.group_name, group.size()

    def reserve(self, nbytes: int) -> None:
        self.memory = torch.zeros(self._size * nbytes, dtype=torch.uint8)

    def all_reduce(self, x: Tensor, out: Tensor | None = None, *, algorithm: str = "") -> Tensor:
        check_room(x.nbytes, self.memory.numel() // self._size)
        found: Tensor = torch.ops.saccade.all_reduce(x, self.memory, self._name)
        return found if out is None else out.copy_(found)

    def all_gather(self, x: Tensor, dim: int, out: Tensor | None = None) -> Tensor:
        check_room(x.nbytes, self.memory.numel() // self._size)
        found: Tensor = torch.ops.saccade.all_gather(x, self.memory, self._name, dim)
        return found if out is None else out.copy_(found)

    def describe(self) -> dict[str, Any]:
        return {"backend": "gloo", "reason": "the device is a CPU", "reserved_bytes": self.memory.numel()}


def _all_reduce(x: Tensor, memory: Tensor, group: str) -> Tensor:
    return _exchange(x, memory, group).sum(0, dtype=x.dtype)


def _all_gather(x: Tensor, memory: Tensor, group: str, dim: int) -> Tensor:
    return torch.cat(_exchange(x, memory, group).unbind(0), dim=dim)


def _exchange(x: Tensor, memory: Tensor, group: str) -> Tensor:
    """Every rank's tensor, stacked (ranks, ...) in the reserved memory."""
    found: ProcessGroup = distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]
    size, nbytes = found.size(), x.nbytes
    data, everyone = x.contiguous().view(-1).view(torch.uint8), memory[: size * nbytes]
    message = torch.empty(SIZE_BYTES + SMALL_BYTES, dtype=torch.uint8)
    message[:SIZE_BYTES].view(torch.int64).fill_(nbytes)
    if nbytes <= SMALL_BYTES:
        message[SIZE_BYTES : SIZE_BYTES + nbytes] = data
    messages = torch.empty(size, len(message), dtype=torch.uint8)
    found._allgather_base(messages.view(-1), message).wait()
    sizes = messages[:, :SIZE_BYTES].view(torch.int64).view(-1).tolist()
    if sizes != [nbytes] * size:
        raise GraphError(f"ranks pass {', '.join(map(str, sizes))} bytes to one collective: their passes differ")
    if nbytes <= SMALL_BYTES:
        everyone.view(size, nbytes).copy_(messages[:, SIZE_BYTES : SIZE_BYTES + nbytes])
    else:
        found._allgather_base(everyone, data).wait()
    return everyone.view(x.dtype).view(size, *x.shape)


_LIBRARY.impl("all_reduce", _all_reduce, "CPU")
_LIBRARY.impl("all_gather", _all_gather, "CPU")
