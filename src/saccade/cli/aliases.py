"""Flags of vLLM and SGLang. Each sets one of our settings, or is accepted with a note, or is refused with a reason."""

from argparse import SUPPRESS
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from saccade.cli.actions import Budget, GraphWord, Refuse, Take, Translate
from saccade.cli.parser import Parser, did_you_mean
from saccade.cli.values import is_list, reader_of
from saccade.config import ENVIRONMENT_PREFIX, environment, foreign_variables

Refused = dict[str, tuple[str, frozenset[str]]]

# Another engine's flag, and our setting of the same meaning.
SAME = {
    "--oltp-traces-endpoint": "otlp_traces_endpoint",  # SGLang's spelling
    "--mem-fraction-static": "gpu_memory_utilization",
    "--context-length": "max_model_len",
    "--max-running-requests": "max_num_seqs",
    "--long-prefill-token-threshold": "prefill_chunk_tokens",
    "--page-size": "block_size",
    "--max-total-tokens": "kv_cache_tokens",
    "--random-seed": "seed",
    "--limit-mm-data-per-request": "limit_mm_per_prompt",
    "--media-url-max-file-size": "max_fetch_bytes",
    "--watchdog-timeout": "watchdog_timeout_s",
    "--tp-size": "tensor_parallel_size",
    "--tp": "tensor_parallel_size",
    "--dp-size": "data_parallel_size",
    "--dp": "data_parallel_size",
    "--fastapi-root-path": "root_path",
    "--shutdown-timeout": "shutdown_timeout_s",
    "--request-timeout": "request_timeout_s",
    "--num-warmups": "warmup_requests",
    "--output-file": "result_filename",
    "--endpoint-type": "backend",
    "--random-input": "random_input_len",
    "--random-output": "random_output_len",
}
# SGLang's limits on a batch of prompts. The smaller one becomes the token budget of a step.
BUDGETS = {"--chunked-prefill-size": "max_num_batched_tokens", "--max-prefill-tokens": "max_num_batched_tokens"}
# Another engine's switch, our setting, and the value the switch gives it.
SWITCHES: dict[str, tuple[str, Any]] = {
    "--disable-cuda-graph": ("enforce_eager", True),
    "--disable-radix-cache": ("enable_prefix_caching", False),
    "--enable-priority-scheduling": ("allow_priority", True),
    "--log-requests": ("access_log", True),
    "--enable-log-requests": ("access_log", True),
    "--disable-log-requests": ("access_log", False),
    "--no-enable-log-requests": ("access_log", False),
    "--disable-uvicorn-access-log": ("access_log", False),
    "--disable-log-stats": ("log_stats", False),
    "--disable-ignore-eos": ("ignore_eos", False),
    "--output-details": ("save_detailed", True),
}
# Another engine's flag, our setting, and our value for each of theirs.
TRANSLATED: dict[str, tuple[str, dict[str, Any]]] = {
    "--sampling-defaults": ("generation_config", {"model": "auto", "openai": "none"}),
    "--scheduling-policy": ("allow_priority", {"fcfs": False, "priority": True}),
}
# A switch, and the word it adds to --graphs. The user's own --graphs overrides it.
GRAPH_WORDS = {
    "--enable-piecewise-cuda-graph": "prefill=piecewise",
    "--enforce-piecewise-cuda-graph": "prefill=piecewise",
}
_KERNELS = "kernels are chosen by the GPU; `saccade doctor` shows which and why"
_RANKS = "ranks exchange tensors through symmetric memory where they can, else through NCCL (gloo on a CPU)"
_LOG = "the log has starts, ends and errors; --access-log adds a line for each request"
_TIMINGS = "a request with timings: true is told its milliseconds by stage, and GET /metrics has them for all"
_GRAMMARS = "grammars and schemas are followed by llguidance"
_IMAGES = "images are decoded and resized for each request; what stays is the encoder's, see --encoder-cache-tokens"
_NO_COMPILER = "kernels are fused already, and graphs are captured without a compiler"
_PLANNED = "the next step is always planned while one runs"


def _each(notes: dict[str, str]) -> dict[str, str]:
    return {name: note for names, note in notes.items() for name in names.split()}


def _refused(notes: dict[str, str | tuple[str, str]]) -> Refused:
    """Maps each flag to its reason and its neutral values, if it has any."""
    pairs = {flags: (note, "") if isinstance(note, str) else note for flags, note in notes.items()}
    return {
        flag: (reason, frozenset(neutral.split()))
        for flags, (reason, neutral) in pairs.items()
        for flag in flags.split()
    }


# A switch without effect, and what happens instead.
TAKEN_SWITCHES = _each(
    {
        "--enable-multimodal": "a model that sees always takes images and videos",
        "--disable-custom-all-reduce --enable-torch-symm-mem --enable-symm-mem --enable-nccl-nvls --enable-mscclpp "
        "--enable-p2p-check": _RANKS,
        "--disable-piecewise-cuda-graph": "prefill has full graphs; --graphs prefill=off runs it without any",
        "--enable-torch-compile": _NO_COMPILER,
        "--enable-chunked-prefill": "long prompts are always computed in chunks; see --max-num-batched-tokens",
        "--enable-mixed-chunk": "prompts and outputs always share steps",
        "--async-scheduling --no-async-scheduling --disable-overlap-schedule": _PLANNED,
        "--is-embedding": "every model answers /v1/embeddings",
        "--enable-metrics": "GET /metrics is always there",
        "--enable-server-load-tracking": "GET /load is always there",
        "--enable-request-id-headers": "every reply has an x-request-id",
        "--enable-cache-report": "every usage has prompt_tokens_details.cached_tokens",
        "--enable-prompt-tokens-details": "every usage has prompt_tokens_details",
        "--enable-auto-tool-choice": "tool calls need no switch",
        "--skip-server-warmup": "a server is ready when it is warm",
        "--show-time-cost --enable-request-time-stats-logging": _TIMINGS,
        "--sleep-on-idle": "an idle engine waits without work",
        "--disable-frontend-multiprocessing": "the engine has a process of its own",
        "--disable-fastapi-docs": "/docs and /openapi.json stay: they say what any server of this version takes",
        "--disable-outlines-disk-cache": _GRAMMARS,
        "--disable-mm-preprocessor-cache --disable-fast-image-processor --keep-mm-feature-on-device": _IMAGES,
        "--skip-mm-profiling": "the encoder's memory is known from its buffers",
        "--enable-ssl-refresh": "TLS files are always read again when they change",
        "--use-tqdm-on-load": "a terminal shows how far a start is",
    }
)
# A flag with a value, without effect, and what happens instead.
TAKEN_VALUES = _each(
    {
        "--attention-backend --prefill-attention-backend --decode-attention-backend --mm-attention-backend "
        "--mm-encoder-attn-backend --sampling-backend --attention-config": _KERNELS,
        "--piecewise-cuda-graph-max-tokens": "prefill graphs cover every step up to --max-num-batched-tokens",
        "--piecewise-cuda-graph-compiler": "pieces are captured as they are, without a compiler",
        "--torch-compile-max-bs --optimization-level": _NO_COMPILER,
        "--grammar-backend --guided-decoding-backend --structured-outputs-config": _GRAMMARS,
        "--api-server-count": "one front end serves all engines of a machine; for more machines see docs/scaling.md",
        "--log-level --log-level-http --uvicorn-log-level": _LOG,
        "--max-log-len": "prompts are never logged",
        "--log-requests-level": "prompts and outputs are never logged; --access-log logs method, path and status",
        "--decode-log-interval": "steps are not logged; GET /metrics counts them",
        "--stream-interval": "a stream gets every token when it is there",
        "--schedule-policy": "requests go by priority, then in fair turns of callers, then by arrival",
        "--schedule-conservativeness": "a request starts when its whole prompt has room",
        "--preemption-mode": "a preempted request is recomputed",
        "--swap-space": "a preempted request is recomputed, not swapped out",
        "--num-continuous-decode-steps": "every step is planned, while the one before it runs",
        "--tokenizer-mode": "the checkpoint's tokenizer.json is used",
        "--chat-template-content-format": "how a template wants contents is read from the template",
        "--mm-processor-cache-gb --mm-processor-cache-type --mm-feature-transport": _IMAGES,
        "--nccl-port --distributed-executor-backend": _RANKS,
        "--prefix-caching-hash-algo": "blocks go by BLAKE2 digests of 32 bytes",
        "--max-parallel-loading-workers": "weights are mapped and copied once",
        "--file-storage-path": "nothing is stored",
        "--allowed-methods": "pages of --allowed-origins may use GET and POST",
        "--allowed-headers": "pages of --allowed-origins may send any header",
    }
)
_CODE = (
    "it would run code that comes with a checkpoint, which is never done here. Leave it out: the families that are "
    "known need no code of their own, and `saccade doctor MODEL` says whether a model is one of them"
)
_GRAPHS = "graphs are chosen a phase at a time: --graphs vision=auto,prefill=auto,decode=auto"
_PARALLEL = (
    "ranks share a model by tensor parallelism (--tensor-parallel-size), and engines requests (--data-parallel-size); "
    "for more machines see docs/scaling.md"
)
_ADAPTERS = "adapters are not supported; merge them into the checkpoint"
_DRAFTS = "speculative decoding is not supported"
_TASKS = "models write text, embed and rank; other tasks are not supported"
_KV_DTYPE = "keys and values have the model's dtype: flash-attn-4 reads FP8 on Blackwell GPUs only"
_KV_ELSEWHERE = "keys and values stay on the GPU"
_ONE_MODEL_FILE = "config.json says what the model is; change a copy of it in a local folder"
_MEMORY = "a running server keeps its memory; stop it to free the GPU"
_SUMS = "seeds do not depend on the batch, but sums of other batches may differ in the last bits"
_BY_NAME = "code by name is never loaded"
_CALLS = "calls are read as Hermes (Qwen) or Llama 3's JSON has them, whichever the chat template uses; leave it out"
# A flag that cannot be honoured: why, what to do, and any neutral values, which ask for nothing.
REFUSED = _refused(
    {
        "--trust-remote-code": (_CODE, "false"),
        "--code-revision": "code from a checkpoint is never run; --revision chooses the weights",
        "--kv-cache-dtype": (_KV_DTYPE, "auto"),
        "--cuda-graph-max-bs --cuda-graph-bs --cuda-graph-sizes --cudagraph-capture-sizes "
        "--max-cudagraph-capture-size": "decode graphs cover every batch up to --max-num-seqs; lower that",
        "--disable-cuda-graph-padding": "batches are padded to buckets; --graphs vision=exact is without",
        "--piecewise-cuda-graph-tokens": "buckets follow from --max-num-batched-tokens",
        "--max-seq-len-to-capture": "graphs cover every length up to --max-num-batched-tokens",
        "--compilation-config --cuda-graph-config --cudagraph-mode": _GRAPHS,
        "--pipeline-parallel-size --pp-size --pp --ep-size --ep --nnodes": (
            _PARALLEL,
            "1",
        ),
        "--enable-expert-parallel --enable-dp-attention": (_PARALLEL, "false"),
        "--node-rank": (_PARALLEL, "0"),
        "--dist-init-addr": _PARALLEL,
        "--base-gpu-id": ("the first GPU that CUDA shows is taken; choose it by CUDA_VISIBLE_DEVICES", "0"),
        "--tokenizer --tokenizer-path": "give a local folder with the files that are wanted instead",
        "--tokenizer-revision": "model and tokenizer are of one --revision",
        "--skip-tokenizer-init": ("answers are text; a request may still send token ids", "false"),
        "--hf-overrides --json-model-override-args": (_ONE_MODEL_FILE, "{}"),
        "--hf-token": "keys do not belong on a command line; set HF_TOKEN",
        "--hf-chat-template-name": ("--chat-template takes a file with the template", "default"),
        "--default-chat-template-kwargs": ("a request brings its own chat_template_kwargs", "{}"),
        "--completion-template": "/v1/completions takes text as it is",
        "--response-role": ("answers are the assistant's", "assistant"),
        "--override-generation-config": ("a request brings its own values; see --generation-config", "{}"),
        "--model-impl": ("families have one implementation each", "auto sglang vllm"),
        "--task --runner": (_TASKS, "auto generate embed embedding score pooling"),
        "--model-loader-extra-config": ("weights are read from safetensors; see --load-format", "{}"),
        "--no-enable-chunked-prefill": "prompts are always chunked to --max-num-batched-tokens; raise that",
        "--cpu-offload-gb": ("weights stay on the GPU; `saccade plan` says what fits", "0"),
        "--enable-lora": (_ADAPTERS, "false"),
        "--lora-modules --lora-paths": _ADAPTERS,
        "--speculative-config --speculative-algorithm --speculative-draft-model-path": _DRAFTS,
        "--kv-cache-memory-bytes": "use --kv-cache-tokens; `saccade plan` shows the bytes of a token",
        "--kv-transfer-config": _KV_ELSEWHERE,
        "--kv-offloading-size": (_KV_ELSEWHERE, "0"),
        "--enable-hierarchical-cache": (_KV_ELSEWHERE, "false"),
        "--disaggregation-mode": ("prefill and decode share a GPU", "null"),
        "--mm-processor-kwargs": "preprocessor_config.json bounds pixels; a request may send mm_processor_kwargs",
        "--enable-sleep-mode --enable-memory-saver": (_MEMORY, "false"),
        "--enable-deterministic-inference": (_SUMS, "false"),
        "--allow-auto-truncate": ("a prompt that is too long is refused, not cut", "false"),
        "--enable-custom-logit-processor": ("code from requests is never run", "false"),
        "--logits-processors --middleware": _BY_NAME,
        "--tool-parser-plugin --reasoning-parser-plugin": _BY_NAME,
        "--enable-prompt-embeds": ("prompts are text, token ids, images and videos", "false"),
        "--enable-force-include-usage": ('a request asks: stream_options: {"include_usage": true}', "false"),
        "--enable-trace": ("an address turns spans on: --otlp-traces-endpoint URL", "false"),
        "--tool-call-parser": (_CALLS, "hermes qwen qwen25 qwen3 llama3_json llama3"),
    }
)
_COUNTED = "the server counts tokens with the model's own tokenizer"
# The same for benchmarks of servers.
BENCH_TAKEN_SWITCHES = {
    "--apply-chat-template": "chat backends have the server apply the model's template, others send plain text",
    "--trust-remote-code": _COUNTED,
    "--disable-tqdm": "a bar is drawn on terminals only",
}
BENCH_TAKEN_VALUES = _each(
    {
        "--tokenizer --tokenizer-mode": _COUNTED,
        "--ready-check-timeout-sec": "a server that does not answer is an error at once",
    }
)
BENCH_REFUSED = _refused(
    {
        "--profile": (
            "POST /start_profile and /stop_profile before and behind a run, on a server with --profile-folder",
            "false",
        ),
        "--lora-name": _ADAPTERS,
        "--tokenize-prompt": ("prompts are text; their lengths are counted by the server", "false"),
    }
)
_KEPT = "compiled kernels are kept below XDG_CACHE_HOME, checkpoints by the hub (--download-dir)"
_POSITIONS = "a request has at most the positions that the model was made for"
# An environment variable of another engine: what to use instead. None of them is read.
INSTEAD = _each(
    {
        "SGLANG_MM_FEATURE_CACHE_MB": "pixels of waiting requests are bounded by --max-media-bytes",
        "SGLANG_USE_CUDA_IPC_TRANSPORT": "pixels reach the engine over a local socket and the GPU from pinned memory",
        "SGLANG_VLM_CACHE_SIZE_MB": "use --encoder-cache-tokens; 0 keeps no image between requests",
        "SGLANG_VIT_ENABLE_CUDA_GRAPH": "vision passes are graph replays anyway; --graphs vision=off runs them without",
        "SGLANG_ENABLE_TORCH_COMPILE": _NO_COMPILER,
        "SGLANG_HOST_IP VLLM_HOST_IP": "use --host",
        "SGLANG_PORT VLLM_PORT": "use --port",
        "SGLANG_API_KEY VLLM_API_KEY": "NO KEY is taken from it; use --api-key or SACCADE_API_KEY",
        "SGLANG_USE_MODELSCOPE VLLM_USE_MODELSCOPE": "models are local folders or come from the Hugging Face hub",
        "SGLANG_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL VLLM_CONFIGURE_LOGGING": _LOG,
        "SGLANG_CACHE_DIR VLLM_CACHE_ROOT": _KEPT,
        "SGLANG_REQ_WAITING_TIMEOUT SGLANG_REQ_RUNNING_TIMEOUT": "use --request-timeout-s",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN VLLM_ALLOW_LONG_MAX_MODEL_LEN": _POSITIONS,
        "VLLM_ATTENTION_BACKEND": _KERNELS,
        "VLLM_TORCH_PROFILER_DIR SGLANG_TORCH_PROFILER_DIR": "use --profile-folder",
        "VLLM_IMAGE_FETCH_TIMEOUT": "use --image-fetch-timeout-s",
        "VLLM_VIDEO_FETCH_TIMEOUT": "use --video-fetch-timeout-s",
    }
)
_OTHERS = "settings here are flags, a --config file and SACCADE_ variables"


def variable_notes(variables: Mapping[str, str] | None = None) -> list[str]:
    """One line for each variable that is set. Values are not shown, because one may be a key."""
    return [f"{name} changes nothing: {INSTEAD.get(name, _OTHERS)}" for name in foreign_variables(variables)]


def unknown_variables(kinds: Iterable[type[Any]], variables: Mapping[str, str] | None = None) -> list[str]:
    """One line for each unknown SACCADE_ variable: with SACCADE_API_KEY misspelt, a server would be open."""
    known = {"config", *(field.name for settings in kinds for field in fields(settings))}
    flags = [_flag(name) for name in sorted(known)]
    found = {name: _flag(name) for name in sorted(set(environment(variables)) - known)}
    return [
        f"{ENVIRONMENT_PREFIX}{name.upper()} changes nothing: there is no {flag}{did_you_mean(flag, flags)}"
        for name, flag in found.items()
    ]


def _flag(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"


def add_aliases(parser: Parser) -> None:
    _add_mapped(parser)
    _add_silent(parser, TAKEN_SWITCHES, TAKEN_VALUES, REFUSED)
    if "tensor_parallel_size" in parser.kinds:
        parser.add_foreign("-tp", dest="tensor_parallel_size", type=reader_of(int))
    if parser.max_words:
        parser.add_argument("--model", "--model-path", dest="model", default=SUPPRESS, help=SUPPRESS)


def add_bench_aliases(parser: Parser) -> None:
    _add_mapped(parser)
    _add_silent(parser, BENCH_TAKEN_SWITCHES, BENCH_TAKEN_VALUES, BENCH_REFUSED)


def _add_mapped(parser: Parser) -> None:
    """Adds the foreign flags whose setting this parser has."""
    for flag, field, how in _mapped():
        if field in parser.kinds and not parser.knows(flag):
            if "action" not in how:
                assert not is_list(parser.kinds[field]), f"{flag} would replace a list"
                how = {"type": reader_of(parser.kinds[field])}
                parser.aliases[flag[2:].replace("-", "_")] = field
            parser.add_foreign(flag, dest=field, **how)


def _mapped() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields (flag, setting, arguments of `add_argument`). A flag without an action is read like the setting itself."""
    yield from ((flag, field, {}) for flag, field in SAME.items())
    yield from ((flag, field, {"action": Budget, "type": reader_of(int)}) for flag, field in BUDGETS.items())
    yield from ((flag, field, {"action": "store_const", "const": to}) for flag, (field, to) in SWITCHES.items())
    yield from ((flag, field, {"action": Translate, "words": of}) for flag, (field, of) in TRANSLATED.items())
    yield from ((flag, "graphs", {"action": GraphWord, "word": word}) for flag, word in GRAPH_WORDS.items())


def _add_silent(parser: Parser, switches: Mapping[str, str], values: Mapping[str, str], refused: Refused) -> None:
    silent: dict[str, dict[str, Any]] = {flag: {"action": Take, "note": note} for flag, note in values.items()}
    silent |= {flag: {"action": Take, "note": note, "nargs": 0} for flag, note in switches.items()}
    for flag, (reason, neutral) in refused.items():
        silent[flag] = {"action": Refuse, "reason": reason, "neutral": neutral}
    for flag, how in silent.items():
        if not parser.knows(flag):
            parser.add_foreign(flag, sets=False, **how)
