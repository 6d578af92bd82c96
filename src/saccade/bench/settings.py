"""What the benchmarks of an engine measure. No torch here: the command line reads it for its flags."""

from dataclasses import dataclass

from saccade.config import setting
from saccade.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineBenchSettings:
    """What `saccade bench offline` measures. Sizes of the engine are its own defaults, so that it has its graphs."""

    load_format: str = setting("auto", "safetensors, gguf, dummy (random weights), or auto")
    device: str = setting("auto", "cuda, cpu, or auto")
    dtype: str = setting("auto", "float32, float16, bfloat16, or auto: the checkpoint's (float32 on a CPU)")
    tokens: tuple[int, ...] = setting(
        (64, 128, 256, 406, 512, 1024, 2048, 4096, 8192), "prompt lengths for prefill, such as 64,406,4K"
    )
    batches: tuple[int, ...] = setting((1, 2, 4, 8, 16, 32, 64, 128, 256), "requests of a decode step")
    context: int = setting(1000, "keys that every request of a decode step reads")
    max_model_len: int = setting(8192, "tokens of one request; raised to the longest prompt or context")
    encoder_budget_tokens: int = setting(8192, "image rows of the largest vision graph")
    block_size: int = setting(0, "tokens of a KV block; 0: 128 on a GPU, 16 elsewhere")
    rounds: int = setting(9, "runs of which the median is taken")
    flop_per_s: float = setting(783e12, "matrix products the device reaches, for the limits; 0 measures it")
    bytes_per_s: float = setting(4.3e12, "memory rate the device reaches, for the limits; 0 measures it")
    json: str = setting("", "file to write the figures to")

    def __post_init__(self) -> None:
        for name in ("tokens", "batches"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give numbers of at least 1 (--{name})")
        for name, low in (("context", 1), ("max_model_len", 1), ("encoder_budget_tokens", 1), ("rounds", 1)):
            if getattr(self, name) < low:
                flag = name.replace("_", "-")
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {low} (--{flag})")
        for name in ("block_size", "flop_per_s", "bytes_per_s"):
            if not getattr(self, name) >= 0:
                flag = name.replace("_", "-")
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 or more (--{flag})")


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionBenchSettings:
    """What `saccade bench vision` measures."""

    load_format: str = setting("auto", "safetensors, gguf, dummy (random weights), or auto")
    device: str = setting("auto", "cuda, cpu, or auto")
    dtype: str = setting("auto", "float32, float16, bfloat16, or auto: the checkpoint's (float32 on a CPU)")
    sizes: tuple[str, ...] = setting(
        ("224x224", "560x560", "1280x720", "1024x1024"), "images, width x height, such as 560x560,1280x720"
    )
    counts: tuple[int, ...] = setting((1, 8, 32), "images of one size that are encoded together")
    mixed: bool = setting(True, "also batches of 1 to 16 images with sides of 224 to 1280 pixels")
    mixed_batches: int = setting(24, "how many of these")
    encoder_budget_tokens: int = setting(8192, "image rows of the largest vision graph")
    rounds: int = setting(9, "runs of which the median is taken")
    flop_per_s: float = setting(783e12, "matrix products the device reaches, for the limits; 0 measures it")
    bytes_per_s: float = setting(4.3e12, "memory rate the device reaches, for the limits; 0 measures it")
    compare_transformers: bool = setting(False, "run the tower of Hugging Face transformers, too")
    plot: str = setting("", "PNG file to draw the figures to")
    json: str = setting("", "file to write the figures to")

    def __post_init__(self) -> None:
        self.pixel_sizes()
        if not self.counts or min(self.counts) < 1:
            raise ConfigError(f"counts is {self.counts}; give numbers of at least 1 (--counts)")
        for name in ("mixed_batches", "encoder_budget_tokens", "rounds"):
            if getattr(self, name) < 1:
                flag = name.replace("_", "-")
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1 (--{flag})")

    def pixel_sizes(self) -> tuple[tuple[int, int], ...]:
        """Width and height of every size."""
        found = []
        for text in self.sizes:
            width, cross, height = text.partition("x")
            if not (cross and width.isdigit() and height.isdigit() and int(width) and int(height)):
                raise ConfigError(f"sizes has {text!r}; write WIDTHxHEIGHT in pixels, such as 560x560 (--sizes)")
            found.append((int(width), int(height)))
        return tuple(found)
