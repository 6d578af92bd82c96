"""All-reduce and all-gather through NCCL, for GPUs that cannot read each other's memory."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from saccade.kernels.collectives import Collectives


class NcclCollectives(Collectives):
    algorithms = ("nccl",)

    def __init__(self, group: ProcessGroup, device: torch.device, reason: str) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._group, self._reason = group, reason
        # NCCL connects at the first call, which cannot be captured.
        dist.all_reduce(torch.zeros(1, device=device), group=group)

    def reserve(self, nbytes: int) -> None:
        """Does nothing: NCCL has its own buffers."""

    def all_reduce(self, x: Tensor, out: Tensor | None = None, *, algorithm: str = "") -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format) if out is None or not out.is_contiguous() else out
        if total is out and out is not x:
            out.copy_(x)
        if total.numel():
            dist.all_reduce(total, group=self._group)
        return total if out is None or total is out else out.copy_(total)

    def all_gather(self, x: Tensor, dim: int, out: Tensor | None = None) -> Tensor:
        size = self._group.size()
        everyone = x.new_empty(size * x.shape[0], *x.shape[1:])
        if x.numel():
            self._group._allgather_base(everyone, x.contiguous()).wait()
        return torch.cat(everyone.view(size, *x.shape).unbind(0), dim=dim, out=out)

    def describe(self) -> dict[str, Any]:
        return {"backend": "NCCL", "reason": self._reason}
