"""Shared by the pass benchmarks: loads the model, times calls, and measures what the device can reach."""

import gc
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch

from saccade.bench.passes.limits import ItemSizes, Rates
from saccade.bench.passes.pass_settings import ModelBenchSettings
from saccade.errors import ConfigError
from saccade.kernels.weight import Layout
from saccade.models.quantization import Quantize
from saccade.models.vlm import Model
from saccade.models.weights import DTYPES, load_model

A_PRODUCT, A_VISION_PRODUCT = "decoder.layers.0.attention.qkv", "tower.blocks.0.attention.qkv"
NUM_WARM_UPS = 2
TRAIN_LENGTH = 8
HEAD_START_CYCLES = 2_000_000  # about a millisecond, so that the host can queue the timed work
CUDA_SIDE, CPU_SIDE = 8192, 512  # of the square matrices that measure a device
KNOWN_RATES = {"H200": Rates(783e12, 4.3e12, 1490e12)}  # bfloat16 and e4m3, the best measured
FP8_GAIN = {"cuda": 2.0, "cpu": 1.0}  # tensor cores are twice as fast with half the bytes; a CPU converts first
COPIED_BYTES = {"cuda": 4 * 2**30, "cpu": 64 * 2**20}


def load_measured(name: str, settings: ModelBenchSettings, device: torch.device) -> Model:
    dtype = torch.float32 if device.type == "cpu" else None
    if settings.dtype != "auto":
        if settings.dtype not in DTYPES:
            raise ConfigError(f"dtype is {settings.dtype!r}; allowed: auto, {', '.join(DTYPES)} (--dtype)")
        dtype = DTYPES[settings.dtype]
    return load_model(
        name,
        device=device,
        dtype=dtype,
        load_format=settings.load_format,  # type: ignore[arg-type]
        quantize=Quantize.asked_by(settings),
    )


def item_sizes(model: Model, path: str) -> ItemSizes:
    """Sizes for the part of the model (decoder or tower) that the layer at this path belongs to."""
    size = model.place.dtype.itemsize
    return ItemSizes(layers=size if model.place.formats.of(path).layout is Layout.PLAIN else 1, others=size)


def describe_model(model: Model) -> dict[str, Any]:
    place = model.place
    return {
        "device": torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "model": model.spec.architecture,
        "layers": len(model.spec.decoder.layers),
        "dtype": str(place.dtype).removeprefix("torch."),
        "layers_layout": place.formats.of(A_PRODUCT).layout.value,
        "tower_layout": place.formats.of(A_VISION_PRODUCT).layout.value,
        "kernels": place.kernels.name,
    }


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    """Returns the memory of deleted tensors and graphs to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def latency_ms(call: Callable[[], object], device: torch.device, rounds: int) -> tuple[float, float]:
    """Times single calls on an idle device. Returns median ms until the device is done, and until the call returns."""
    times = [_timed(call, device) for _ in range(NUM_WARM_UPS + rounds)][NUM_WARM_UPS:]
    whole, host = zip(*times, strict=True)
    return median(whole) * 1e3, median(host) * 1e3


def compared_ms(calls: Sequence[Callable[[], object]], device: torch.device, rounds: int) -> list[float]:
    """Like `latency_ms`, but the calls take turns, so that a drifting device clock favors none of them."""
    turns = [[_timed(call, device)[0] for call in calls] for _ in range(NUM_WARM_UPS + rounds)][NUM_WARM_UPS:]
    return [median(times) * 1e3 for times in zip(*turns, strict=True)]


def device_ms(call: Callable[[], object], device: torch.device, rounds: int) -> float | None:
    """The median ms on the device, from a call's first kernel to its last. None without a GPU."""
    if device.type != "cuda":
        return None
    times: list[float] = []
    for _ in range(NUM_WARM_UPS + rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        wait(device)
        torch.cuda._sleep(HEAD_START_CYCLES)
        begin.record()
        call()
        end.record()
        wait(device)
        times.append(begin.elapsed_time(end))
    return median(times[NUM_WARM_UPS:])


def _timed(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    wait(device)
    started = perf_counter()
    call()
    returned = perf_counter()
    wait(device)
    return perf_counter() - started, returned - started


def step_ms(call: Callable[[], object], device: torch.device, rounds: int) -> tuple[float, float]:
    """Like `latency_ms`, per call of a back-to-back train, like the steps of an engine that plans ahead."""

    def train() -> None:
        for _ in range(TRAIN_LENGTH):
            call()

    whole, host = latency_ms(train, device, rounds)
    return whole / TRAIN_LENGTH, host / TRAIN_LENGTH


def rates_of(device: torch.device, dtype: torch.dtype, flop_per_s: float, bytes_per_s: float) -> Rates:
    """Returns the given rates. A rate of 0 is looked up, or measured with a large matrix product or a large copy."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" and dtype.itemsize == 2 else ""
    known = next((rates for word, rates in KNOWN_RATES.items() if word in name), Rates(0.0, 0.0))
    flop_per_s = flop_per_s or known.flop_per_s or _product_rate(device, dtype)
    return Rates(
        flop_per_s,
        bytes_per_s or known.bytes_per_s or _copy_rate(device),
        known.fp8_flop_per_s or FP8_GAIN[device.type] * flop_per_s,
    )


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    side = CUDA_SIDE if device.type == "cuda" else CPU_SIDE
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    ms, _ = step_ms(lambda: torch.mm(a, b), device, rounds=5)
    return 2 * side**3 / ms * 1e3


def _copy_rate(device: torch.device) -> float:
    """Counts both the bytes read and the bytes written."""
    source = torch.ones(COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    ms, _ = step_ms(lambda: target.copy_(source), device, rounds=5)
    return 2 * source.nbytes / ms * 1e3
