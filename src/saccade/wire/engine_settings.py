"""How a model is run, and the limits of its scheduler."""

from dataclasses import dataclass, replace

from saccade.config import Mode, Tier, check_at_least, check_not_negative, check_types, refused, setting
from saccade.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerSettings:
    """Every admitted request can finish under these limits, in the worst case alone. Where 0 leaves a limit to the
    machine, `resolved` fills it in."""

    max_num_seqs: int = setting(0, "requests that run at the same time; 0: 256 on a GPU, 4 elsewhere")
    max_num_batched_tokens: int = setting(
        0, "rows of one step, prompts and outputs together; 0: 8192 on a GPU; elsewhere 256, and at most 1024"
    )
    max_model_len: int = setting(
        0, "tokens of one request, prompt and output together; 0: the model's, at most 8192 on a GPU, 4096 elsewhere"
    )
    prefill_chunk_tokens: int = setting(0, "prompt rows of one request in one step; 0 sets no limit")
    max_step_ms: float = setting(
        0.0,
        "about how long a step may take while outputs are being generated: longer prompts and more images are spread "
        "over several steps, by times measured at the start; 0: on a GPU a balance of throughput and steady outputs, "
        "elsewhere no limit; inf sets no limit",
    )
    encoder_budget_tokens: int = setting(
        0, "image rows encoded in one step; a longer image goes alone; 0: 8192 on a GPU, 512 elsewhere"
    )
    max_queued_requests: int = setting(4096, "waiting requests before new ones are refused")
    max_queued_tokens: int = setting(4 * 2**20, "prompt tokens of waiting requests before new ones are refused")
    max_media_bytes: int = setting(
        16 * 2**30, "pixels that requests keep on the host until they end, before new images are refused"
    )
    retry_after_s: float = setting(1.0, "seconds after which a refused client is told to try again")

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, {name: int(name in _AT_LEAST_ONE) for name in self.__slots__})
        if self.max_model_len == 1:
            raise refused("max_model_len", 1, "it must be at least 2")
        if 0 < self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; {self.max_num_seqs} running requests need "
                "a row each (raise --max-num-batched-tokens or lower --max-num-seqs)"
            )

    def resolved(self, *, is_cuda: bool, max_position: int) -> "SchedulerSettings":
        """These limits for a machine and a model: zeros filled in, and no request longer than the model supports."""
        own = GPU_LIMITS if is_cuda else CPU_LIMITS
        chosen = {name: getattr(self, name) or value for name, value in own.items()}
        seqs = chosen["max_num_seqs"]
        if not self.max_num_seqs:
            chosen["max_num_seqs"] = min(seqs, chosen["max_num_batched_tokens"])
        if not self.max_num_batched_tokens:
            chosen["max_num_batched_tokens"] = max(seqs, chosen["max_num_batched_tokens"])
        if not is_cuda:  # longer steps would only take memory: a prompt can use as many steps as it needs
            most = max(CPU_MOST_ROWS, chosen["max_num_seqs"])
            chosen["max_num_batched_tokens"] = min(chosen["max_num_batched_tokens"], most)
        if self.max_model_len > max_position:
            raise ConfigError(
                f"max_model_len is {self.max_model_len}; this model's positions end at {max_position} (--max-model-len)"
            )
        chosen["max_model_len"] = min(chosen["max_model_len"], max_position)
        return replace(self, **chosen)


GPU_LIMITS = {
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "max_model_len": 8192,
    "encoder_budget_tokens": 8192,
}
CPU_LIMITS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "max_model_len": 4096,
    "encoder_budget_tokens": 512,
}
CPU_MOST_ROWS = 1024
_AT_LEAST_ONE = ("max_queued_requests", "max_queued_tokens", "max_media_bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """How a model is run. 0 and "auto" leave a value to the model or the machine."""

    revision: str = setting("", "branch, tag or commit of a model from the hub")
    download_dir: str = setting("", "folder for models from the hub; by default the hub's own cache")
    chat_template: str = setting("", "file with a chat template to use instead of the checkpoint's")
    device: str = setting("auto", "cuda, cpu, or auto")
    dtype: str = setting("auto", "float32, float16, bfloat16, or auto: the checkpoint's (float32 on a CPU)")
    load_format: str = setting("auto", "safetensors, gguf, dummy (random weights), or auto")
    quantization: str = setting(
        "auto", "fp8 rounds the language model's weights while they are loaded; auto: as stored"
    )
    mm_encoder_quantization: str = setting("auto", "fp8 rounds the vision encoder's weights likewise; auto: as stored")
    block_size: int = setting(0, "tokens of a KV block; by default 128 on a GPU, 16 elsewhere")
    kv_cache_tokens: int = setting(0, "tokens of the KV cache; 0: what is left of the GPU's memory, 16384 elsewhere")
    gpu_memory_utilization: float = setting(0.9, "share of the GPU's memory to use")
    enable_prefix_caching: bool = setting(
        True, "keep the KV blocks of finished requests for prompts with the same beginning"
    )
    encoder_cache_tokens: int = setting(
        16384, "image rows kept for requests with the same images; 0 keeps none longer than a request needs them"
    )
    graphs: str = setting(
        "",
        "per phase (none by default for models above 256 MB on a CPU), such as vision=capacity,prefill=piecewise; "
        "prefill and decode: auto, full, piecewise, off; vision: auto (buckets and hot layouts, whichever is faster), "
        "capacity or full (buckets), exact (hot layouts only), off",
    )
    graphs_strict: bool = setting(False, "a step that is not replayed is an error")
    verify: str = setting(
        "auto", "compare graphs with eager runs before serving: short, full, off, or auto (short on a GPU)"
    )
    enforce_eager: bool = setting(False, "no graphs at all")
    shadow: float = setting(
        0.0, "share of replays that are run again without their graph when the engine is idle, and compared; 0: none"
    )
    shadow_dir: str = setting("", "folder for inputs of replays that were wrong; by default one in the user's cache")
    tensor_parallel_size: int = setting(1, "ranks that share the model, each on its own GPU (or as a process on a CPU)")
    mm_encoder_tp_mode: str = setting(
        "auto",
        "how ranks share the vision encoder: weights (each has a part), data (each encodes whole images), or auto "
        "(weights where they can be divided)",
    )
    pooling: str = setting(
        "auto", "how hidden states become embeddings: last (token's), mean, or auto: as the checkpoint says, else last"
    )
    seed: int = setting(0, "seed for requests without one")
    warm_up: bool = setting(True, "run requests of every kind at the start, so that the first ones are not slower")
    watchdog_timeout_s: float = setting(
        120.0, "seconds without an answer after which an engine counts as dead; 0: never"
    )

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise refused("gpu_memory_utilization", self.gpu_memory_utilization, "it must be above 0 and at most 1")
        check_not_negative(self, "block_size", "kv_cache_tokens", "encoder_cache_tokens", "watchdog_timeout_s")
        for name, words in WORDS.items():
            if (value := getattr(self, name)) not in words:
                raise refused(name, repr(value), f"allowed: {', '.join(words)}")
        check_at_least(self, {"tensor_parallel_size": 1})
        if not 0 <= self.shadow <= 1:
            raise refused("shadow", self.shadow, "it must be between 0 and 1")
        self.phase_modes()
        self.vision_tiers()

    def phase_modes(self) -> dict[str, Mode | None]:
        """Mode of each phase; None runs it eagerly."""
        words = self._graph_words()
        if self.enforce_eager:
            return dict.fromkeys(GRAPH_PHASES)
        return {phase: GRAPH_WORDS.get(word, Mode.FULL) for phase, word in words.items()}

    def vision_tiers(self) -> frozenset[Tier]:
        """Kinds of graphs that vision passes may have, if any."""
        word = self._graph_words()["vision"]
        if word == "exact" and self.graphs_strict:
            raise ConfigError(
                "graphs has vision=exact, which replays a layout only after it has come up often, and --graphs-strict "
                "makes passes without a graph an error; drop one of them"
            )
        return VISION_WORDS[word]

    def _graph_words(self) -> dict[str, str]:
        chosen = dict.fromkeys(GRAPH_PHASES, "auto")
        for part in filter(None, self.graphs.split(",")):
            phase, _, word = part.partition("=")
            words = VISION_WORDS if phase == "vision" else GRAPH_WORDS
            if phase not in GRAPH_PHASES or word not in words:
                raise ConfigError(
                    f"graphs has {part!r}; write PHASE=WORD with a phase of {', '.join(GRAPH_PHASES)} and a word of "
                    f"{', '.join(words)} (--graphs){_WHY_NOT.get((phase, word), '')}"
                )
            chosen[phase] = word
        return chosen


WORDS = {
    "dtype": ("auto", "float32", "float", "fp32", "float16", "half", "fp16", "bfloat16", "bf16"),
    "load_format": ("auto", "safetensors", "gguf", "dummy"),
    "quantization": ("auto", "fp8"),
    "mm_encoder_quantization": ("auto", "fp8"),
    "mm_encoder_tp_mode": ("auto", "weights", "data"),
    "pooling": ("auto", "last", "mean"),
    "verify": ("auto", "short", "full", "off"),
}
GRAPH_PHASES = ("vision", "prefill", "decode")
GRAPH_WORDS = {"auto": Mode.FULL, "full": Mode.FULL, "piecewise": Mode.PIECEWISE, "off": None}
_CAPACITY = frozenset({Tier.CAPACITY})
VISION_WORDS = {
    "auto": frozenset({Tier.CAPACITY, Tier.EXACT}),
    "capacity": _CAPACITY,
    "exact": frozenset({Tier.EXACT}),
    "off": frozenset[Tier](),
    "full": _CAPACITY,
}
_WHY_NOT = {("vision", "piecewise"): "; a vision pass calls nothing between pieces, so its graphs are always full"}
