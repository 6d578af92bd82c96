"""Settings of the pass benchmarks. Imports no torch, because the command line builds its flags from them."""

from dataclasses import dataclass, replace
from typing import Any, TypeVar

from saccade.config import Word, check_at_least, check_not_negative, setting
from saccade.errors import ConfigError

S = TypeVar("S", bound="ModelBenchSettings | AllReduceBenchSettings")

_GPU: dict[str, Any] = {"encoder_budget_tokens": 8192, "rounds": 9}
_CPU: dict[str, Any] = {"encoder_budget_tokens": 256, "rounds": 3}
ON_GPU: dict[str, dict[str, Any]] = {
    "OfflineBenchSettings": {
        **_GPU,
        "max_model_len": 8192,
        "tokens": (64, 128, 256, 406, 512, 1024, 2048, 4096, 8192),
        "batches": (1, 2, 4, 8, 16, 32, 64, 128, 256),
    },
    "VisionBenchSettings": {**_GPU, "counts": (1, 8, 32), "mixed_batches": 24},
    "AllReduceBenchSettings": {"rows": (1, 8, 32, 128, 512, 2048, 8192), "rounds": 20, "dtype": "bfloat16"},
}
ON_CPU: dict[str, dict[str, Any]] = {
    "OfflineBenchSettings": {**_CPU, "tokens": (64, 128, 256, 406), "batches": (1, 2, 4, 8)},
    "VisionBenchSettings": {**_CPU, "counts": (1, 4), "mixed_batches": 4},
    "AllReduceBenchSettings": {"rows": (1, 8, 64, 512), "rounds": 5, "dtype": "float32"},
}


def suited_to(device_type: str, settings: S) -> S:
    """Fills in device-dependent defaults for settings that were not given."""
    own = (ON_GPU if device_type == "cuda" else ON_CPU)[type(settings).__name__]
    chosen = {name: getattr(settings, name) for name in own if getattr(settings, name) not in (0, (), "auto")}
    return replace(settings, **own | chosen)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelBenchSettings:
    """Settings that benchmarks of a model's passes share."""

    load_format: str = setting("auto", "safetensors, gguf, dummy (random weights), or auto")
    device: str = setting("auto", "cuda, cpu, or auto")
    dtype: str = setting("auto", "float32, float16, bfloat16, or auto: the checkpoint's (float32 on a CPU)")
    quantization: str = setting("auto", "fp8 rounds the language model's weights; auto: as stored")
    mm_encoder_quantization: str = setting("auto", "fp8 rounds the vision encoder's weights; auto: as stored")
    encoder_budget_tokens: int = setting(
        0, "image rows of the largest vision graph; by default 8192 on a GPU, 256 elsewhere"
    )
    rounds: int = setting(0, "runs to take the median of; by default 9 on a GPU, 3 elsewhere")
    flop_per_s: float = setting(
        0.0, "floating-point operations per second of the device; by default known (H200) or measured"
    )
    bytes_per_s: float = setting(0.0, "bytes per second of the device's memory; by default known (H200) or measured")
    json: str = setting("", "file to write the figures to")

    def __post_init__(self) -> None:
        check_not_negative(self, "encoder_budget_tokens", "rounds", "flop_per_s", "bytes_per_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineBenchSettings(ModelBenchSettings):
    """What `saccade bench offline` measures. Sizes default to the engine's, so that the graphs are the same."""

    tokens: tuple[int, ...] = setting(
        (), "prompt lengths for prefill, such as 64,406,4K; by default what suits the device"
    )
    batches: tuple[int, ...] = setting((), "requests of a decode step; by default what suits the device")
    context: int = setting(1000, "keys that every request of a decode step reads")
    max_model_len: int = setting(
        0, "tokens of one request, at least the longest prompt or context; by default 8192 on a GPU, no more elsewhere"
    )
    block_size: int = setting(0, "tokens of a KV block; by default 128 on a GPU, 16 elsewhere")

    def __post_init__(self) -> None:
        for name in ("tokens", "batches"):
            if min(getattr(self, name), default=1) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give numbers of at least 1 (--{name})")
        check_at_least(self, {"context": 1})
        check_not_negative(self, "max_model_len", "block_size")
        ModelBenchSettings.__post_init__(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionBenchSettings(ModelBenchSettings):
    """What `saccade bench vision` measures."""

    sizes: tuple[Word, ...] = setting(
        ("224x224", "560x560", "1280x720", "1024x1024"), "images, width x height, such as 560x560,1280x720"
    )
    counts: tuple[int, ...] = setting((), "images of one size per batch; by default 1,8,32 on a GPU, 1,4 elsewhere")
    mixed: bool = setting(True, "also batches of 1 to 16 images with sides of 224 to 1280 pixels")
    mixed_batches: int = setting(0, "number of mixed batches; by default 24 on a GPU, 4 elsewhere")
    compare_transformers: bool = setting(False, "also run the tower of Hugging Face transformers")
    plot: str = setting("", "PNG file to draw the figures to")

    def __post_init__(self) -> None:
        self.pixel_sizes()
        if min(self.counts, default=1) < 1:
            raise ConfigError(f"counts is {self.counts}; give numbers of at least 1 (--counts)")
        check_not_negative(self, "mixed_batches")
        ModelBenchSettings.__post_init__(self)

    def pixel_sizes(self) -> tuple[tuple[int, int], ...]:
        """(width, height) of each size."""
        found = []
        for text in self.sizes:
            width, cross, height = text.partition("x")
            if not (cross and width.isdigit() and height.isdigit() and int(width) and int(height)):
                raise ConfigError(f"sizes has {text!r}; write WIDTHxHEIGHT in pixels, such as 560x560 (--sizes)")
            found.append((int(width), int(height)))
        return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduceBenchSettings:
    """What `saccade bench allreduce` measures. It starts the ranks itself."""

    ranks: int = setting(2, "processes that take part; with fewer GPUs than ranks, all share the first one")
    rows: tuple[int, ...] = setting((), "rows of the tensors, such as 1,64,2K; by default what suits the device")
    width: int = setting(4096, "values of a row")
    dtype: str = setting("auto", "float32, bfloat16, or auto: bfloat16 on a GPU, float32 elsewhere")
    device: str = setting("auto", "cuda, cpu, or auto")
    rounds: int = setting(0, "runs to take the median of; by default 20 on a GPU, 5 elsewhere")
    json: str = setting("", "file to write the figures to")

    def __post_init__(self) -> None:
        if not 2 <= self.ranks <= 64:
            raise ConfigError(f"ranks is {self.ranks}; 2 to 64 are allowed (--ranks)")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ConfigError(f"dtype is {self.dtype!r}; allowed: auto, float32, bfloat16 (--dtype)")
        if min(self.rows, default=1) < 1 or self.width < 1:
            raise ConfigError(
                f"rows is {self.rows} and width {self.width}; give numbers of at least 1 (--rows, --width)"
            )
        check_not_negative(self, "rounds")


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphBenchSettings:
    """What `saccade bench graphs` measures."""

    size: str = setting("auto", "model to make up: 8b, tiny, or auto (8b on a GPU, tiny elsewhere)")
    layers: int = setting(0, "number of layers; 0 takes the size's own")
    tokens: tuple[int, ...] = setting(
        (), "token counts, such as 64,406,4K; by default eight up to 4096 on a GPU, six up to 1024 elsewhere"
    )
    device: str = setting("auto", "cuda, cpu, or auto")
    json: str = setting("", "file to write the figures to")
