"""Compares results: bit for bit where the same kernels ran on the same shapes, else against an estimated error.

To estimate the error, the body runs a few times with noise: every operation's result moves at random by up to one unit
in the last place (Monte Carlo arithmetic), and products by the rounding of their sums. How far an output moves then is
how far rounding may move it: by row and channel, so that one large channel excuses nothing in the others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.graphs.operation_mode import OperationMode
from saccade.graphs.recorded import EMPTY, is_fresh, leaves_of, storages_of

Tensors = Mapping[str, Tensor]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NUM_NOISY_RUNS = 4
ALLOWED_ERRORS = 16  # times the estimate, because the largest of millions of roundings is several times as large


@dataclass(frozen=True, slots=True)
class OutputDifference:
    """Where an output is wrong, and by how much. `row` is the first wrong row. `size` is the largest error: relative to
    the expected value in a comparison of bits, else in multiples of the allowed error; infinite if it has no size."""

    output: str
    num_wrong: int
    num_values: int
    row: int
    size: float

    def __str__(self) -> str:
        return f"{self.num_wrong} of {self.num_values} values of {self.output!r} differ, the first in row {self.row}"


def bit_differences(actual: Tensors, expected: Tensors) -> list[OutputDifference]:
    """Every output whose bits differ. A NaN equals the same NaN, and -inf equals -inf."""
    found = (_bit_difference(name, actual[name], right) for name, right in expected.items())
    return [one for one in found if one is not None]


def _bit_difference(name: str, actual: Tensor, right: Tensor) -> OutputDifference | None:
    if actual.shape != right.shape or actual.dtype != right.dtype:
        return OutputDifference(name, right.numel(), right.numel(), 0, float("inf"))
    bits = _BITS[right.dtype.itemsize]
    is_wrong = actual.view(bits) != right.view(bits)
    return _located(name, is_wrong, lambda: _relative(actual, right, is_wrong))


def _relative(actual: Tensor, right: Tensor, is_wrong: Tensor) -> float:
    """The largest difference relative to the expected value."""
    off = (actual[is_wrong].double() - right[is_wrong].double()).abs()
    share = (off / right[is_wrong].double().abs().clamp_min(1e-30)).max().item()
    return share if share == share else float("inf")


def _located(name: str, is_wrong: Tensor, size: Callable[[], float]) -> OutputDifference | None:
    num_wrong = int(is_wrong.sum())
    if num_wrong == 0:
        return None
    rows = is_wrong.reshape(-1, is_wrong.shape[-1]).any(-1) if is_wrong.ndim > 1 else is_wrong.reshape(-1)
    return OutputDifference(name, num_wrong, is_wrong.numel(), int(rows.int().argmax()), size())


def error_differences(actual: Tensors, expected: Tensors, noisy: Sequence[Tensors]) -> list[OutputDifference]:
    """Every output further from the expected one than rounding explains. `noisy` comes from `noisy_runs`; where its
    runs agree on an integer or a non-finite value, rounding explains nothing."""
    found = (
        _error_difference(name, actual[name], right, [run[name] for run in noisy]) for name, right in expected.items()
    )
    return [one for one in found if one is not None]


def _error_difference(name: str, actual: Tensor, right: Tensor, noisy: Sequence[Tensor]) -> OutputDifference | None:
    if actual.shape != right.shape or actual.dtype != right.dtype:
        return OutputDifference(name, right.numel(), right.numel(), 0, float("inf"))
    if right.numel() == 0:
        return None
    plain, found, runs = right.double(), actual.double(), torch.stack([run.double() for run in noisy])
    is_number = runs.isfinite().all(0) & plain.isfinite()
    is_settled = (runs == plain).all(0) | (runs.isnan().all(0) & plain.isnan())
    is_same = (found == plain) | (found.isnan() & plain.isnan())
    if not right.is_floating_point():
        return _located(name, is_settled & ~is_same, lambda: float("inf"))
    distance = (found - plain).abs().where(is_number, 0)
    last_place = torch.finfo(right.dtype).eps * plain.abs()  # one element in 81 stays put in all four noisy runs
    error = _smoothed(torch.maximum((runs - plain).abs().amax(0), last_place).where(is_number, 0))
    allowed = ALLOWED_ERRORS * error
    is_wrong = torch.where(is_number, ~(distance <= allowed), is_settled & ~is_same)
    worst = (distance / allowed.clamp_min(1e-300))[is_wrong & is_number & found.isfinite()]
    return _located(name, is_wrong, lambda: worst.max().item() if worst.numel() else float("inf"))


def _smoothed(error: Tensor) -> Tensor:
    """A few runs underestimate some elements, so each gets at least the average of its row and channel."""
    table = error.reshape(-1, error.shape[-1] if error.ndim > 1 else 1)
    squares = table.square()
    rows, channels, mean = squares.mean(1, keepdim=True), squares.mean(0, keepdim=True), squares.mean()
    product = (rows * channels / mean.clamp_min(1e-300)).sqrt()
    return torch.maximum(table, product).reshape(error.shape)


def noisy_runs(run: Callable[[], Tensors]) -> list[Tensors]:
    """The results of a few runs with noise in the last place of every operation."""
    found = []
    for seed in range(NUM_NOISY_RUNS):
        with _LastPlaceNoise(seed):
            found.append(run())
    return found


class _LastPlaceNoise(OperationMode):
    """Skips in-place operations: they may write to weights and caches, which outlive the run."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable or func.overloadpacket in (*EMPTY, torch.ops.aten.clone):
            return result
        given = storages_of((args, kwargs))
        for leaf in leaves_of(result):
            if is_fresh(leaf, given) and leaf.is_floating_point() and leaf.numel():
                if func.overloadpacket in _PRODUCTS:
                    self._perturb_sums(leaf, *args[-2:])
                self._perturb(leaf)
        return result

    def _perturb(self, tensor: Tensor) -> None:
        steps = torch.randint(-1, 2, tensor.shape, generator=self._generator(tensor), device=tensor.device)
        tensor.mul_(1 + steps.to(tensor.dtype) * torch.finfo(tensor.dtype).eps)

    def _perturb_sums(self, tensor: Tensor, one: Tensor, other: Tensor) -> None:
        """Products sum in float32 or wider, and their rounding errors add up like a random walk."""
        precise = torch.promote_types(tensor.dtype, torch.float32)
        walk = torch.matmul(one.to(precise).square(), other.to(precise).square()).sqrt()
        steps = torch.randn(tensor.shape, generator=self._generator(tensor), device=tensor.device, dtype=precise)
        tensor.add_((steps * walk * torch.finfo(precise).eps).to(tensor.dtype))

    def _generator(self, tensor: Tensor) -> torch.Generator:
        device = tensor.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm)
