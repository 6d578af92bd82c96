"""Cached launches with a stand-in for a Triton kernel: which arguments reach the compiled kernel, and when."""

from typing import Any

import pytest
import torch

from saccade.kernels.launch import MAX_CACHED, CachedLaunch, Current


class Compiled:
    """Like Triton's: `run` takes the grid, the stream, the function, its metadata, and every parameter by position."""

    packed_metadata = (4, 1, 0)

    def __init__(self, kernel: "Kernel", device: int) -> None:
        self.kernel, self.device = kernel, device
        self.function = 100 + device

    def run(self, *args: Any) -> None:
        if len(args) != 9 + self.kernel.num_parameters:
            raise TypeError(f"takes {9 + self.kernel.num_parameters} arguments, got {len(args)}")
        grid, (stream, function, numbers, *hooks), parameters = args[:3], args[3:9], args[9:]
        assert function == self.function and numbers == self.packed_metadata and hooks == [None] * 3
        self.kernel.direct.append((grid, stream, parameters))


class Kernel:
    """Like a kernel of `triton.jit`: an ordinary launch returns the kernel compiled for these arguments and this
    device. Also stands in for torch's current device and stream."""

    arg_names: tuple[str, ...] = ("x_ptr", "y_ptr", "stride", "scale", "WIDE", "BLOCK")

    def __init__(self, num_parameters: int = 6) -> None:
        self.num_parameters = num_parameters
        self.current_device, self.streams = 0, {0: 7, 1: 8}
        self.ordinary: list[Any] = []
        self.direct: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **constants: Any) -> Any:
            self.ordinary.append((grid, args, constants))
            return self.compiled()

        return run

    def compiled(self) -> Any:
        return Compiled(self, self.current_device)

    def device(self) -> int:
        return self.current_device

    def stream(self, device: int) -> int:
        return self.streams[device]

    def cached(self) -> CachedLaunch:
        return CachedLaunch(self, self)


CONSTANTS: dict[str, Any] = {"BLOCK": 512, "WIDE": True}


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(8), torch.zeros(8, dtype=torch.int32)


def test_a_repeated_key_is_launched_directly_with_arguments_in_order() -> None:
    kernel, (x, y) = Kernel(), tensors()
    launch = kernel.cached()
    launch("a", (7, 2), x, y, 4, 0.5, **CONSTANTS, num_warps=8)
    assert kernel.ordinary == [((7, 2), (x, y, 4, 0.5), CONSTANTS | {"num_warps": 8})] and not kernel.direct
    assert launch._cached
    for grid in ((9, 1), (1, 3)):
        launch("a", grid, x[:3], y.view(2, 4), 4, 0.5, **CONSTANTS, num_warps=8)
    assert len(kernel.ordinary) == 1
    expected = (x.data_ptr(), y.data_ptr(), 4, 0.5, True, 512)
    assert kernel.direct == [((9, 1, 1), 7, expected), ((1, 3, 1), 7, expected)]


def test_a_new_key_is_an_ordinary_launch_and_both_are_cached() -> None:
    """As when images and videos, which are cut differently, take turns."""
    kernel, (x, y) = Kernel(), tensors()
    launch = kernel.cached()
    for turn in range(10):
        launch(turn % 2, (1, 1), (x, x[1:])[turn % 2], y, 4, float(turn % 2), **CONSTANTS)
    assert [args[3] for _, args, _ in kernel.ordinary] == [0.0, 1.0]
    assert [args[0] for *_, args in kernel.direct] == [x.data_ptr(), x[1:].data_ptr()] * 4


def test_every_launch_uses_the_current_stream() -> None:
    kernel, (x, y) = Kernel(), tensors()
    launch = kernel.cached()
    for stream in (7, 70, 71):
        kernel.streams[0] = stream
        launch("a", (1, 1), x, y, 4, 0.5, **CONSTANTS)
    assert [stream for _, stream, _ in kernel.direct] == [70, 71]


def test_a_kernel_is_launched_only_on_the_device_it_was_compiled_for() -> None:
    kernel, (x, y) = Kernel(), tensors()
    launch = kernel.cached()
    for device in (0, 1, 1, 0, 1):
        kernel.current_device = device
        launch("a", (1, 1), x, y, 4, 0.5, **CONSTANTS)
    assert len(kernel.ordinary) == 2
    assert [stream for _, stream, _ in kernel.direct] == [8, 7, 8], "each with a function of its own device"


def test_the_cache_is_bounded() -> None:
    kernel, (x, y) = Kernel(), tensors()
    launch = kernel.cached()
    for key in range(3 * MAX_CACHED + 1):
        launch(key, (1, 1), x, y, 4, 0.5, **CONSTANTS)
        assert len(launch._cached) <= MAX_CACHED
    launch(key, (1, 1), x, y, 4, 0.5, **CONSTANTS)
    assert len(kernel.direct) == 1, "the newest is still cached"


def test_no_tensor_is_kept_alive() -> None:
    kernel, (x, y) = Kernel(), tensors()
    launch = kernel.cached()
    launch("a", (1, 1), x, y, 4, 0.5, **CONSTANTS)
    assert not any(isinstance(value, torch.Tensor) for _, bound in launch._cached.values() for value in bound)


class NothingCompiled(Kernel):
    """As with the interpreter."""

    def compiled(self) -> Any:
        return None


class Opaque(Kernel):
    """As with a Triton version that launches differently."""

    def compiled(self) -> Any:
        return object()


class Nameless(Kernel):
    arg_names = ()


class WithDefault(Kernel):
    arg_names = (*Kernel.arg_names, "DEFAULT")


class NoStreams(Kernel):
    stream = None  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Kernel, NothingCompiled, Opaque, Nameless, WithDefault, NoStreams])
def test_with_another_triton_interface_every_launch_is_ordinary(kind: type[Kernel]) -> None:
    kernel, (x, y) = kind(num_parameters=4), tensors()  # four, because older versions do not pass constants
    launch = kernel.cached()
    for turn in range(4):
        launch("a", (1 + turn, 1), x, y, 4, 0.5, **CONSTANTS)
    assert [call[0] for call in kernel.ordinary] == [(1, 1), (2, 1), (3, 1), (4, 1)] and not kernel.direct
    assert not launch._cached


def test_a_device_error_is_not_mistaken_for_another_interface() -> None:
    class Broken(Compiled):
        def run(self, *args: Any) -> None:
            raise RuntimeError("Triton Error [CUDA]: out of memory")

    class Failing(Kernel):
        def compiled(self) -> Any:
            return Broken(self, 0)

    kernel, (x, y) = Failing(), tensors()
    launch = kernel.cached()
    launch("a", (1, 1), x, y, 4, 0.5, **CONSTANTS)
    with pytest.raises(RuntimeError, match="out of memory"):
        launch("a", (1, 1), x, y, 4, 0.5, **CONSTANTS)
    assert len(kernel.ordinary) == 1


def test_without_cuda_there_is_no_current_device() -> None:
    if not torch.cuda.is_initialized():
        assert Current().device() == -1
