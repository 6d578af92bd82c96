"""Flags of vLLM and SGLang. Each sets one of our settings, or is accepted with a note, or is refused with a reason."""

from argparse import SUPPRESS
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from saccade.cli.actions import Budget, GraphWord, Ignore, Refuse, Translate
from saccade.cli.parser import Parser, did_you_mean
from saccade.cli.values import is_list, reader_of
from saccade.config import ENVIRONMENT_PREFIX, environment, flag_of, foreign_variables

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
    "--json": "result_filename",  # as our other benchmarks call it
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
_RANKS = "ranks exchange tensors through symmetric memory where possible, else through NCCL (gloo on a CPU)"
_LOG = "the log has starts, ends and errors; --access-log adds a line for each request"
_TIMINGS = "a request with timings: true gets its milliseconds by stage, and GET /metrics has those of all requests"
_GRAMMARS = "llguidance enforces grammars and schemas"
_IMAGES = "images are decoded and resized for each request; only encoder outputs are cached (--encoder-cache-tokens)"
_NO_COMPILER = "kernels are already fused, and graphs are captured without a compiler"
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
IGNORED_SWITCHES = _each(
    {
        "--enable-multimodal": "a vision model always takes images and videos",
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
        "--enable-auto-tool-choice": "tool calls are always enabled",
        "--skip-server-warmup": "the server reports ready only once it is warm",
        "--show-time-cost --enable-request-time-stats-logging": _TIMINGS,
        "--sleep-on-idle": "an idle engine sleeps",
        "--disable-frontend-multiprocessing": "the engine always runs in its own process",
        "--disable-fastapi-docs": "/docs and /openapi.json stay: they are the same for every server of this version",
        "--disable-outlines-disk-cache": _GRAMMARS,
        "--disable-mm-preprocessor-cache --disable-fast-image-processor --keep-mm-feature-on-device": _IMAGES,
        "--skip-mm-profiling": "the encoder's memory is known from its buffers",
        "--enable-ssl-refresh": "TLS files are always reloaded when they change",
        "--use-tqdm-on-load": "a terminal always shows the progress of a start",
    }
)
# A flag with a value, without effect, and what happens instead.
IGNORED_VALUES = _each(
    {
        "--attention-backend --prefill-attention-backend --decode-attention-backend --mm-attention-backend "
        "--mm-encoder-attn-backend --sampling-backend --attention-config": _KERNELS,
        "--piecewise-cuda-graph-max-tokens": "prefill graphs cover every step up to --max-num-batched-tokens",
        "--piecewise-cuda-graph-compiler": "pieces are captured as they are, without a compiler",
        "--torch-compile-max-bs --optimization-level": _NO_COMPILER,
        "--grammar-backend --guided-decoding-backend --structured-outputs-config": _GRAMMARS,
        "--api-server-count": "one front end serves all engines on a machine; for more machines see docs/scaling.md",
        "--log-level --log-level-http --uvicorn-log-level": _LOG,
        "--max-log-len": "prompts are never logged",
        "--log-requests-level": "prompts and outputs are never logged; --access-log logs method, path and status",
        "--decode-log-interval": "steps are not logged; GET /metrics counts them",
        "--stream-interval": "a stream gets every token as soon as it is generated",
        "--schedule-policy": "requests are ordered by priority, then by fair turns of their callers, then by arrival",
        "--schedule-conservativeness": "a request starts when its whole prompt has room",
        "--preemption-mode": "a preempted request is recomputed",
        "--swap-space": "a preempted request is recomputed, not swapped out",
        "--num-continuous-decode-steps": "every step is planned while the one before it runs",
        "--tokenizer-mode": "the checkpoint's tokenizer.json is used",
        "--chat-template-content-format": "the format is detected from the template",
        "--mm-processor-cache-gb --mm-processor-cache-type --mm-feature-transport": _IMAGES,
        "--nccl-port --distributed-executor-backend": _RANKS,
        "--prefix-caching-hash-algo": "blocks are identified by BLAKE2 digests of 32 bytes",
        "--max-parallel-loading-workers": "weights are memory-mapped and copied once",
        "--file-storage-path": "nothing is stored",
        "--allowed-methods": "pages of --allowed-origins may use GET and POST",
        "--allowed-headers": "pages of --allowed-origins may send any header",
    }
)
_CODE = (
    "code from a checkpoint is never run. Leave the flag out: supported families need no such code, and `saccade "
    "doctor MODEL` says whether a model is supported"
)
_GRAPHS = "graphs are chosen by phase: --graphs vision=auto,prefill=auto,decode=auto"
_PARALLEL = (
    "a machine offers tensor parallelism (--tensor-parallel-size) and data parallelism (--data-parallel-size); for "
    "more machines see docs/scaling.md"
)
_ADAPTERS = "adapters are not supported; merge them into the checkpoint"
_DRAFTS = "speculative decoding is not supported"
_TASKS = "models generate text, embed and rank; other tasks are not supported"
_KV_DTYPE = "keys and values have the model's dtype: flash-attn-4 reads FP8 on Blackwell GPUs only"
_KV_ELSEWHERE = "keys and values stay on the GPU"
_ONE_MODEL_FILE = "config.json defines the model; change it in a local copy of the folder"
_MEMORY = "a running server keeps its memory; stop it to free the GPU"
_SUMS = "seeded sampling does not depend on the batch, but the last bits of sums do"
_BY_NAME = "custom code is never loaded"
_CALLS = "the chat template decides how calls are parsed: Hermes (Qwen) or Llama 3's JSON; leave the flag out"
# A flag that is refused, why, what to use instead, and the neutral values, which are accepted.
REFUSED = _refused(
    {
        "--trust-remote-code": (_CODE, "false"),
        "--code-revision": "code from a checkpoint is never run; --revision chooses the weights",
        "--kv-cache-dtype": (_KV_DTYPE, "auto"),
        "--cuda-graph-max-bs --cuda-graph-bs --cuda-graph-sizes --cudagraph-capture-sizes "
        "--max-cudagraph-capture-size": "decode graphs cover every batch up to --max-num-seqs; lower that",
        "--disable-cuda-graph-padding": "batches are padded to buckets; --graphs vision=exact avoids that for images",
        "--piecewise-cuda-graph-tokens": "buckets follow from --max-num-batched-tokens",
        "--max-seq-len-to-capture": "graphs cover every length up to --max-num-batched-tokens",
        "--compilation-config --cuda-graph-config --cudagraph-mode": _GRAPHS,
        "--pipeline-parallel-size --pp-size --pp --ep-size --ep --nnodes": (_PARALLEL, "1"),
        "--enable-expert-parallel --enable-dp-attention": (_PARALLEL, "false"),
        "--node-rank": (_PARALLEL, "0"),
        "--dist-init-addr": _PARALLEL,
        "--base-gpu-id": ("the first visible GPU is used; choose it with CUDA_VISIBLE_DEVICES", "0"),
        "--tokenizer --tokenizer-path": "use a local folder that has the tokenizer you want",
        "--tokenizer-revision": "model and tokenizer come from the same --revision",
        "--skip-tokenizer-init": ("answers are text; a request may still send token ids", "false"),
        "--hf-overrides --json-model-override-args": (_ONE_MODEL_FILE, "{}"),
        "--hf-token": "keys do not belong on a command line; set HF_TOKEN",
        "--hf-chat-template-name": ("--chat-template takes a file with the template", "default"),
        "--default-chat-template-kwargs": ("each request sends its own chat_template_kwargs", "{}"),
        "--completion-template": "/v1/completions takes text as it is",
        "--response-role": ("the role of answers is always assistant", "assistant"),
        "--override-generation-config": ("each request sends its own values; see --generation-config", "{}"),
        "--model-impl": ("each family has one implementation", "auto sglang vllm"),
        "--task --runner": (_TASKS, "auto generate embed embedding score pooling"),
        "--model-loader-extra-config": ("weights are read from safetensors; see --load-format", "{}"),
        "--no-enable-chunked-prefill": "prompts are always chunked to --max-num-batched-tokens; raise that",
        "--cpu-offload-gb": ("weights stay on the GPU; `saccade plan` shows what fits", "0"),
        "--enable-lora": (_ADAPTERS, "false"),
        "--lora-modules --lora-paths": _ADAPTERS,
        "--speculative-config --speculative-algorithm --speculative-draft-model-path": _DRAFTS,
        "--kv-cache-memory-bytes": "use --kv-cache-tokens; `saccade plan` shows the bytes of a token",
        "--kv-transfer-config": _KV_ELSEWHERE,
        "--kv-offloading-size": (_KV_ELSEWHERE, "0"),
        "--enable-hierarchical-cache": (_KV_ELSEWHERE, "false"),
        "--disaggregation-mode": ("prefill and decode share a GPU", "null"),
        "--mm-processor-kwargs": "preprocessor_config.json limits pixels; a request can send mm_processor_kwargs",
        "--enable-sleep-mode --enable-memory-saver": (_MEMORY, "false"),
        "--enable-deterministic-inference": (_SUMS, "false"),
        "--allow-auto-truncate": ("a prompt that is too long is refused, not cut", "false"),
        "--enable-custom-logit-processor": ("code from requests is never run", "false"),
        "--logits-processors --middleware": _BY_NAME,
        "--tool-parser-plugin --reasoning-parser-plugin": _BY_NAME,
        "--enable-prompt-embeds": ("prompts are text, token ids, images and videos", "false"),
        "--enable-force-include-usage": ('a request asks for it: stream_options: {"include_usage": true}', "false"),
        "--enable-trace": ("--otlp-traces-endpoint URL turns on spans", "false"),
        "--tool-call-parser": (_CALLS, "hermes qwen qwen25 qwen3 llama3_json llama3"),
    }
)
_COUNTED = "the server counts tokens with the model's own tokenizer"
# The same for `bench serve`.
BENCH_IGNORED_SWITCHES = {
    "--apply-chat-template": "with a chat backend the server applies the model's template; others send plain text",
    "--trust-remote-code": _COUNTED,
    "--disable-tqdm": "progress is shown on terminals only",
}
BENCH_IGNORED_VALUES = _each(
    {
        "--tokenizer --tokenizer-mode": _COUNTED,
        "--ready-check-timeout-sec": "a server that does not answer is an immediate error",
    }
)
BENCH_REFUSED = _refused(
    {
        "--profile": (
            "POST /start_profile before and /stop_profile after the run, on a server with --profile-folder",
            "false",
        ),
        "--lora-name": _ADAPTERS,
        "--tokenize-prompt": ("prompts are text; the server counts their tokens", "false"),
    }
)
_KEPT = "compiled kernels are cached under XDG_CACHE_HOME, checkpoints in the hub's cache (--download-dir)"
_POSITIONS = "a request cannot exceed the positions in the model's config.json"
# An environment variable of another engine, and what to use instead. None of them is read.
INSTEAD = _each(
    {
        "SGLANG_MM_FEATURE_CACHE_MB": "--max-media-bytes limits the pixels of waiting requests",
        "SGLANG_USE_CUDA_IPC_TRANSPORT": "pixels reach the engine over a local socket and the GPU from pinned memory",
        "SGLANG_VLM_CACHE_SIZE_MB": "use --encoder-cache-tokens; 0 keeps no image between requests",
        "SGLANG_VIT_ENABLE_CUDA_GRAPH": "vision passes are graph replays by default; --graphs vision=off stops that",
        "SGLANG_ENABLE_TORCH_COMPILE": _NO_COMPILER,
        "SGLANG_HOST_IP VLLM_HOST_IP": "use --host",
        "SGLANG_PORT VLLM_PORT": "use --port",
        "SGLANG_API_KEY VLLM_API_KEY": "it sets NO KEY; use --api-key or SACCADE_API_KEY",
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
_OTHERS = "settings come from flags, a --config file and SACCADE_ variables"


def variable_notes(variables: Mapping[str, str] | None = None) -> list[str]:
    """One line for each variable that is set. Values are not shown, because one may be a key."""
    return [f"{name} changes nothing: {INSTEAD.get(name, _OTHERS)}" for name in foreign_variables(variables)]


def unknown_variables(kinds: Iterable[type[Any]], variables: Mapping[str, str] | None = None) -> list[str]:
    """One line for each unknown SACCADE_ variable: with SACCADE_API_KEY misspelt, a server would be open."""
    known = {"config", *(field.name for settings in kinds for field in fields(settings))}
    flags = [flag_of(name) for name in sorted(known)]
    found = {name: flag_of(name) for name in sorted(set(environment(variables)) - known)}
    return [
        f"{ENVIRONMENT_PREFIX}{name.upper()} changes nothing: there is no {flag}{did_you_mean(flag, flags)}"
        for name, flag in found.items()
    ]


def add_aliases(parser: Parser) -> None:
    _add_mapped(parser)
    _add_unmapped(parser, IGNORED_SWITCHES, IGNORED_VALUES, REFUSED)
    if "tensor_parallel_size" in parser.kinds:
        parser.add_foreign("-tp", dest="tensor_parallel_size", type=reader_of(int))
    if parser.max_words:
        parser.add_argument("--model", "--model-path", dest="model", default=SUPPRESS, help=SUPPRESS)


def add_bench_aliases(parser: Parser) -> None:
    _add_mapped(parser)
    _add_unmapped(parser, BENCH_IGNORED_SWITCHES, BENCH_IGNORED_VALUES, BENCH_REFUSED)


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


def _add_unmapped(parser: Parser, switches: Mapping[str, str], values: Mapping[str, str], refused: Refused) -> None:
    unmapped: dict[str, dict[str, Any]] = {flag: {"action": Ignore, "note": note} for flag, note in values.items()}
    unmapped |= {flag: {"action": Ignore, "note": note, "nargs": 0} for flag, note in switches.items()}
    for flag, (reason, neutral) in refused.items():
        unmapped[flag] = {"action": Refuse, "reason": reason, "neutral": neutral}
    for flag, how in unmapped.items():
        if not parser.knows(flag):
            parser.add_foreign(flag, sets=False, **how)
