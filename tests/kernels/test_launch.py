"""Direct launches with a stand-in for a Triton kernel: which arguments reach the compiled kernel, and when. And with
Triton itself, whose compiler is a stand-in: which compiled kernel is launched."""

import importlib
import importlib.util
import os
import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from saccade.kernels.launch import Current, Launcher


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

    def launcher(self) -> Launcher:
        return Launcher(self, self)


CONSTANTS: dict[str, Any] = {"BLOCK": 512, "WIDE": True}


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(8), torch.zeros(8, dtype=torch.int32)


def test_a_repeated_launch_is_direct_with_arguments_in_order() -> None:
    kernel, (x, y) = Kernel(), tensors()
    launch = kernel.launcher()
    launch[7, 2](x, y, 4, 0.5, **CONSTANTS, num_warps=8)
    assert kernel.ordinary == [((7, 2), (x, y, 4, 0.5), CONSTANTS | {"num_warps": 8})] and not kernel.direct
    others = tensors()
    for grid, (one, other) in (((9,), (x[:3], y.view(2, 4))), ((1, 3), others), ((1, 3, 5), others)):
        launch[grid](one, other, 4, 0.5, **CONSTANTS, num_warps=8)
    assert len(kernel.ordinary) == 1
    (first, second), rest = ([one.data_ptr() for one in pair] for pair in ((x, y), others)), (4, 0.5, True, 512)
    assert kernel.direct == [
        ((9, 1, 1), 7, (*first, *rest)),
        ((1, 3, 1), 7, (*second, *rest)),
        ((1, 3, 5), 7, (*second, *rest)),
    ]


def test_launches_that_differ_in_more_than_addresses_are_ordinary_once() -> None:
    kernel, (x, y) = Kernel(), tensors()
    launch = kernel.launcher()
    options = {"num_warps": 8}
    launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, y, 4, 0.5), CONSTANTS | options),
        ((x, y, 5, 0.5), CONSTANTS | options),
        ((x, y, 4, 0.25), CONSTANTS | options),
        ((x.int(), y, 4, 0.5), CONSTANTS | options),
        ((x, y.float(), 4, 0.5), CONSTANTS | options),
        ((x[1:], y, 4, 0.5), CONSTANTS | options),
        ((x, y[1:], 4, 0.5), CONSTANTS | options),
        ((x, y, 4, 0.5), CONSTANTS | {"WIDE": False} | options),
        ((x, y, 4, 0.5), CONSTANTS | {"num_warps": 4}),
        ((x, y, 4, 0.5), CONSTANTS | {"num_stages": 8}),
        ((x, y, 4, 0.5), CONSTANTS),
    ]
    for _ in range(3):
        for args, constants in launches:
            launch[1, 1](*args, **constants)
    assert len(kernel.ordinary) == len(launches) and len(kernel.direct) == 2 * len(launches)
    assert kernel.direct[len(launches) :] == kernel.direct[: len(launches)]


def test_values_of_constants_that_were_exchanged_are_not_confused() -> None:
    kernel, (x, y) = Kernel(), tensors()
    launch = kernel.launcher()
    for constants in ({"WIDE": 2, "BLOCK": 1}, {"BLOCK": 2, "WIDE": 1}):
        launch[1, 1](x, y, 4, 0.5, **constants)
        launch[1, 1](x, y, 4, 0.5, **constants)
    assert [parameters[-2:] for *_, parameters in kernel.direct] == [(2, 1), (1, 2)]


def test_every_launch_uses_the_current_stream() -> None:
    kernel, (x, y) = Kernel(), tensors()
    launch = kernel.launcher()
    for stream in (7, 70, 71):
        kernel.streams[0] = stream
        launch[1, 1](x, y, 4, 0.5, **CONSTANTS)
    assert [stream for _, stream, _ in kernel.direct] == [70, 71]


def test_a_kernel_is_launched_only_on_the_device_it_was_compiled_for() -> None:
    kernel, (x, y) = Kernel(), tensors()
    launch = kernel.launcher()
    for device in (0, 1, 1, 0, 1):
        kernel.current_device = device
        launch[1, 1](x, y, 4, 0.5, **CONSTANTS)
    assert len(kernel.ordinary) == 2
    assert [stream for _, stream, _ in kernel.direct] == [8, 7, 8], "each with a function of its own device"


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.kernels.launch.MAX_CACHED", 16)
    kernel, (x, y) = Kernel(), tensors()
    launch = kernel.launcher()
    for number in range(50):
        launch[1, 1](x, y, number, 0.5, **CONSTANTS)
        assert len(launch._cached) <= 16
    launch[1, 1](x, y, number, 0.5, **CONSTANTS)
    assert len(kernel.direct) == 1, "the newest is still cached"


def test_no_tensor_is_kept_alive() -> None:
    kernel, (x, y) = Kernel(), tensors()
    launch = kernel.launcher()
    launch[1, 1](x, y, 4, 0.5, **CONSTANTS)
    assert launch._cached
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
    launch = kernel.launcher()
    for turn in range(4):
        launch[1 + turn, 1](x, y, 4, 0.5, **CONSTANTS)
    assert [call[0] for call in kernel.ordinary] == [(1, 1), (2, 1), (3, 1), (4, 1)] and not kernel.direct
    assert not launch._cached


class Hashed(Kernel):
    """Like Triton 3.6, it is hashed at its first launch, with what its helpers refer to only if they are hashed."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.fn, self.found = function, ""

    @property
    def cache_key(self) -> str:
        if not self.found:
            helpers = [self.fn.__globals__[name] for name in self.fn.__code__.co_names]
            known = [helper.found for helper in helpers]
            self.found = f"{self.fn.__name__}{known}{[helper.cache_key for helper in helpers]}"
        return self.found

    def compiled(self) -> Any:
        assert self.cache_key
        return super().compiled()


HASHED = "def constant(): 1\ndef helper(): constant()\ndef one(): helper()\ndef two(): helper()"


def test_a_kernel_has_the_same_key_whichever_kernel_is_launched_first() -> None:
    keys: list[dict[str, str]] = []
    for order in (("one", "two"), ("two", "one")):
        names: dict[str, Any] = {}
        exec(HASHED, names)
        kernels = {name: Hashed(function) for name, function in names.items() if name != "__builtins__"}
        names.update(kernels)
        for name in order:
            Launcher(kernels[name], kernels[name])[1,](*tensors(), 8, 1.0, **CONSTANTS)
        keys.append({name: kernels[name].cache_key for name in sorted(order)})
    assert keys[0] == keys[1]


def test_a_device_error_is_not_mistaken_for_another_interface() -> None:
    class Broken(Compiled):
        def run(self, *args: Any) -> None:
            raise RuntimeError("Triton Error [CUDA]: out of memory")

    class Failing(Kernel):
        def compiled(self) -> Any:
            return Broken(self, 0)

    kernel, (x, y) = Failing(), tensors()
    launch = kernel.launcher()
    launch[1, 1](x, y, 4, 0.5, **CONSTANTS)
    with pytest.raises(RuntimeError, match="out of memory"):
        launch[1, 1](x, y, 4, 0.5, **CONSTANTS)
    assert len(kernel.ordinary) == 1


def test_without_cuda_there_is_no_current_device() -> None:
    if not torch.cuda.is_initialized():
        assert Current().device() == -1


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton is interpreting")
def test_a_direct_launch_runs_the_kernel_that_triton_would_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = importlib.import_module("triton")
    run: list[Any] = []

    def compiled(source: Any, **how: Any) -> Any:
        found = SimpleNamespace(function=0, packed_metadata=(), launch_metadata=lambda *args: None)
        found.run = partial(lambda one, *args: run.append((one, args[9:])), found)
        return found

    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    device = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: id(run), get_current_stream=lambda device: 0
    )
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # else Triton warns
    monkeypatch.setattr(triton.runtime.driver, "_active", device)
    monkeypatch.setattr("triton.compiler.compile", compiled)
    kernel = importlib.import_module("saccade.kernels.triton_fused").norm_kernel.kernel
    launch, chance = Launcher(kernel, Kernel()), random.Random(0)
    memory = torch.zeros(64, 8)
    num_direct = 0
    for _ in range(2000):
        rows = memory.view(chance.choice((torch.float32, torch.float16)))
        pointers = [rows[chance.randrange(64)] for _ in range(6)]
        pointers[0] = pointers[0][chance.randrange(2) :]
        numbers = [
            *chance.choice(((1, 8, 16, 16), (2, 16, 15, 1), (2, 2**31, 16, 16))),
            1e-6,
            chance.choice((0.0, 1.0)),
        ]
        flags = {name: chance.random() < 0.5 for name in ("HAS_BIAS", "OVERLAPS")}
        constants = {"ADDS": True, "CENTRES": False, **flags, "ROWS": 1, "BLOCK": chance.choice((8, 16))}
        options = {"num_warps": chance.choice((4, 8))}
        num_known = len(launch._cached)
        launch[1,](*pointers, *numbers, **constants, **options)
        num_direct += len(launch._cached) == num_known
        kernel[1,](*pointers, *numbers, **constants, **options)
        (launched, given), (chosen, expected) = run[-2:]
        assert launched is chosen
        addresses = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in expected]
        assert [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in given] == addresses
    assert 500 < num_direct < 1900, num_direct
