"""Limits of the scheduler."""

from dataclasses import dataclass

from saccade.config import Mode, setting
from saccade.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerSettings:
    """Every request that is let in can finish under these limits, alone in the worst case."""

    max_num_seqs: int = setting(256, "requests that run at the same time")
    max_num_batched_tokens: int = setting(8192, "rows of one step, prompts and outputs together")
    max_model_len: int = setting(8192, "tokens of one request, prompt and output together")
    prefill_chunk_tokens: int = setting(0, "prompt rows of one request in one step; 0 sets no limit")
    encoder_budget_tokens: int = setting(8192, "image rows encoded in one step; a longer image goes alone")
    max_queued_requests: int = setting(4096, "waiting requests before new ones are refused")
    max_queued_tokens: int = setting(4 * 2**20, "prompt tokens of waiting requests before new ones are refused")
    retry_after_s: float = setting(1.0, "seconds after which a refused client is told to try again")

    def __post_init__(self) -> None:
        for name, low in _LOWEST.items():
            if not getattr(self, name) >= low:
                flag = name.replace("_", "-")
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {low} (--{flag})")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; {self.max_num_seqs} requests that run need "
                "a row each (raise --max-num-batched-tokens or lower --max-num-seqs)"
            )


_LOWEST = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_model_len": 2,
    "prefill_chunk_tokens": 0,
    "encoder_budget_tokens": 1,
    "max_queued_requests": 1,
    "max_queued_tokens": 1,
    "retry_after_s": 0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """How a model is run. 0 and "auto" leave a value to the model or the machine."""

    device: str = setting("auto", "cuda, cpu, or auto")
    dtype: str = setting("auto", "float32, float16, bfloat16, or auto: the checkpoint's (float32 on a CPU)")
    load_format: str = setting("auto", "safetensors, gguf, dummy (random weights), or auto")
    block_size: int = setting(0, "tokens of a KV block; 0: 128 on a GPU, 16 elsewhere")
    kv_cache_tokens: int = setting(0, "tokens of the KV cache; 0: what is left of the GPU's memory, 16384 elsewhere")
    gpu_memory_utilization: float = setting(0.9, "share of the GPU's memory to use")
    enable_prefix_caching: bool = setting(True, "keep the KV blocks of finished requests for prompts that begin alike")
    encoder_cache_tokens: int = setting(16384, "image rows kept for requests with the same images")
    graphs: str = setting(
        "", "per phase, such as vision=off,prefill=piecewise,decode=full (auto, full, piecewise, off)"
    )
    graphs_strict: bool = setting(False, "a step that is not replayed is an error")
    enforce_eager: bool = setting(False, "no graphs at all")
    seed: int = setting(0, "seed of requests that bring none")

    def __post_init__(self) -> None:
        if not 0 < self.gpu_memory_utilization <= 1:
            met = self.gpu_memory_utilization
            raise ConfigError(f"gpu_memory_utilization is {met}; allowed are above 0 to 1 (--gpu-memory-utilization)")
        if self.block_size < 0 or self.kv_cache_tokens < 0:
            raise ConfigError("block_size and kv_cache_tokens must be 0 or more (--block-size, --kv-cache-tokens)")
        self.phase_modes()

    def phase_modes(self) -> dict[str, Mode | None]:
        """The mode of every phase; None runs it eagerly."""
        chosen: dict[str, Mode | None] = dict.fromkeys(GRAPH_PHASES, Mode.FULL)
        for part in filter(None, self.graphs.split(",")):
            phase, _, word = part.partition("=")
            if phase not in GRAPH_PHASES or word not in GRAPH_WORDS:
                raise ConfigError(
                    f"graphs has {part!r}; write PHASE=WORD with a phase of {', '.join(GRAPH_PHASES)} and a word of "
                    f"{', '.join(GRAPH_WORDS)} (--graphs)"
                )
            chosen[phase] = GRAPH_WORDS[word]
        return dict.fromkeys(GRAPH_PHASES) if self.enforce_eager else chosen


GRAPH_PHASES = ("vision", "prefill", "decode")
GRAPH_WORDS = {"auto": Mode.FULL, "full": Mode.FULL, "piecewise": Mode.PIECEWISE, "off": None}
