"""Names that users of vLLM and SGLang type: mapped where they mean something here, taken with a note where they are
harmless, refused with a reason where neither is so."""

from argparse import SUPPRESS
from collections.abc import Iterator
from typing import Any

from saccade.cli.actions import Budget, GraphWord, Refuse, Take, Translate
from saccade.cli.groups import Group
from saccade.cli.parser import Parser
from saccade.cli.values import is_list, reader_of

# Another engine's name: the setting it is here.
SAME = {
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
    "--fastapi-root-path": "root_path",
    "--shutdown-timeout": "shutdown_timeout_s",
    "--num-warmups": "warmup_requests",
    "--output-file": "result_filename",
    "--endpoint-type": "backend",
    "--random-input": "random_input_len",
    "--random-output": "random_output_len",
}
# SGLang's limits of a batch of prompts: the smaller one is the budget of a step here.
BUDGETS = {"--chunked-prefill-size": "max_num_batched_tokens", "--max-prefill-tokens": "max_num_batched_tokens"}
# A switch of another engine: the setting and what the switch sets it to.
SWITCHES: dict[str, tuple[str, Any]] = {
    "--disable-cuda-graph": ("enforce_eager", True),
    "--disable-radix-cache": ("enable_prefix_caching", False),
    "--log-requests": ("access_log", True),
    "--enable-log-requests": ("access_log", True),
    "--disable-log-requests": ("access_log", False),
    "--no-enable-log-requests": ("access_log", False),
    "--disable-uvicorn-access-log": ("access_log", False),
    "--disable-ignore-eos": ("ignore_eos", False),
    "--output-details": ("save_detailed", True),
}
# Another engine's flag with words of its own: the setting, and its word for each of theirs.
TRANSLATED: dict[str, tuple[str, dict[str, str]]] = {
    "--sampling-defaults": ("generation_config", {"model": "auto", "openai": "none"}),
}
# A switch that says how a phase is captured, unless --graphs says otherwise.
GRAPH_WORDS = {
    "--enable-piecewise-cuda-graph": "prefill=piecewise",
    "--enforce-piecewise-cuda-graph": "prefill=piecewise",
}
_KERNELS = "kernels are chosen by the GPU; `saccade doctor` shows which and why"
_RANKS = "ranks exchange tensors through symmetric memory where they can, else through NCCL (gloo on a CPU)"
_METRICS = "GET /metrics is always there"
_LOG = "the log has starts, ends and errors; --access-log adds a line for each request"
_TIMINGS = "a request with timings: true is told its milliseconds by stage, and GET /metrics has them for all"
_GRAMMARS = "grammars and schemas are followed by llguidance"
_IMAGES = "images are decoded and resized for each request; what stays is the encoder's, see --encoder-cache-tokens"
# A switch that changes nothing: what happens instead.
TAKEN_SWITCHES = {
    "--enable-multimodal": "a model that sees always takes images and videos",
    "--disable-custom-all-reduce": _RANKS,
    "--enable-torch-symm-mem": _RANKS,
    "--enable-symm-mem": _RANKS,
    "--enable-nccl-nvls": _RANKS,
    "--enable-mscclpp": _RANKS,
    "--enable-p2p-check": _RANKS,
    "--disable-piecewise-cuda-graph": "prefill has full graphs; --graphs prefill=off runs it without any",
    "--enable-torch-compile": "kernels are fused already, and graphs are captured without a compiler",
    "--enable-chunked-prefill": "long prompts are always computed in chunks; see --max-num-batched-tokens",
    "--enable-mixed-chunk": "prompts and outputs always share steps",
    "--async-scheduling": "the next step is always planned while one runs",
    "--no-async-scheduling": "the next step is always planned while one runs",
    "--disable-overlap-schedule": "the next step is always planned while one runs",
    "--enable-priority-scheduling": "requests always go by their priority (lower first), then by arrival",
    "--enable-metrics": _METRICS,
    "--disable-log-stats": "statistics are in GET /metrics, never in the log",
    "--enable-server-load-tracking": "GET /load is always there",
    "--enable-request-id-headers": "every reply has an x-request-id",
    "--enable-cache-report": "every usage has prompt_tokens_details.cached_tokens",
    "--enable-prompt-tokens-details": "every usage has prompt_tokens_details",
    "--enable-auto-tool-choice": "tool calls need no switch",
    "--skip-server-warmup": "a server is ready when it is warm",
    "--show-time-cost": _TIMINGS,
    "--enable-request-time-stats-logging": _TIMINGS,
    "--sleep-on-idle": "an idle engine waits without work",
    "--disable-frontend-multiprocessing": "the engine has a process of its own",
    "--disable-fastapi-docs": "there are no such pages; GET /openapi.json is the description",
    "--disable-outlines-disk-cache": _GRAMMARS,
    "--disable-mm-preprocessor-cache": _IMAGES,
    "--disable-fast-image-processor": _IMAGES,
    "--keep-mm-feature-on-device": _IMAGES,
    "--skip-mm-profiling": "the encoder's memory is known from its buffers",
    "--use-tqdm-on-load": "a terminal shows how far a start is",
}
# A flag with a value that changes nothing: what happens instead.
TAKEN_VALUES = {
    "--attention-backend": _KERNELS,
    "--prefill-attention-backend": _KERNELS,
    "--decode-attention-backend": _KERNELS,
    "--mm-attention-backend": _KERNELS,
    "--mm-encoder-attn-backend": _KERNELS,
    "--sampling-backend": _KERNELS,
    "--piecewise-cuda-graph-max-tokens": "prefill graphs cover every step up to --max-num-batched-tokens",
    "--piecewise-cuda-graph-compiler": "pieces are captured as they are, without a compiler",
    "--torch-compile-max-bs": "kernels are fused already, and graphs are captured without a compiler",
    "--grammar-backend": _GRAMMARS,
    "--guided-decoding-backend": _GRAMMARS,
    "--log-level": _LOG,
    "--log-level-http": _LOG,
    "--uvicorn-log-level": _LOG,
    "--max-log-len": "prompts are never logged",
    "--log-requests-level": "prompts and outputs are never logged; --access-log logs method, path and status",
    "--decode-log-interval": "steps are not logged; GET /metrics counts them",
    "--stream-interval": "a stream gets every token when it is there",
    "--schedule-policy": "requests go by priority, then by arrival",
    "--scheduling-policy": "requests go by priority, then by arrival",
    "--schedule-conservativeness": "a request starts when its whole prompt has room",
    "--preemption-mode": "a preempted request is recomputed",
    "--swap-space": "a preempted request is recomputed, not swapped out",
    "--num-continuous-decode-steps": "every step is planned, while the one before it runs",
    "--tokenizer-mode": "the checkpoint's tokenizer.json is used",
    "--chat-template-content-format": "how a template wants contents is read from the template",
    "--mm-processor-cache-gb": _IMAGES,
    "--mm-processor-cache-type": _IMAGES,
    "--mm-feature-transport": _IMAGES,
    "--nccl-port": _RANKS,
    "--distributed-executor-backend": _RANKS,
    "--prefix-caching-hash-algo": "blocks go by BLAKE2 digests of 32 bytes",
    "--max-parallel-loading-workers": "weights are mapped and copied once",
    "--file-storage-path": "nothing is stored",
    "--allowed-methods": "pages of --allowed-origins may use GET and POST",
    "--allowed-headers": "pages of --allowed-origins may send any header",
}
_GRAPHS = "graphs are chosen a phase at a time: --graphs vision=auto,prefill=auto,decode=auto"
_DECODE = "decode graphs cover every batch up to --max-num-seqs; lower that"
_CHECKPOINT = "give a local folder with the files that are wanted instead"
_PARALLEL = "only tensor parallelism is there (--tensor-parallel-size); for more, start servers behind a load balancer"
_ADAPTERS = "adapters are not supported; merge them into the checkpoint"
_DRAFTS = "speculative decoding is not supported"
_TRACES = "there are no traces; a request with timings: true is told its milliseconds by stage"
_KV_DTYPE = "keys and values have the model's dtype: flash-attn-4 reads FP8 on Blackwell GPUs only"
_KV_ELSEWHERE = "keys and values stay on the GPU"
_ONE_MODEL_FILE = "config.json says what the model is; change a copy of it in a local folder"
# A flag that cannot be honoured: why, what to do, and the values that ask for nothing.
REFUSED: dict[str, tuple[str, frozenset[str]]] = {
    "--trust-remote-code": (
        "it would run code that comes with a checkpoint, which is never done here. Leave it out: the families that "
        "are known need no code of their own, and `saccade doctor MODEL` says whether a model is one of them",
        frozenset({"false"}),
    ),
    "--code-revision": ("code from a checkpoint is never run; --revision chooses the weights", frozenset()),
    "--kv-cache-dtype": (_KV_DTYPE, frozenset({"auto"})),
    "--cuda-graph-max-bs": (_DECODE, frozenset()),
    "--cuda-graph-bs": (_DECODE, frozenset()),
    "--cuda-graph-sizes": (_DECODE, frozenset()),
    "--cudagraph-capture-sizes": (_DECODE, frozenset()),
    "--max-cudagraph-capture-size": (_DECODE, frozenset()),
    "--disable-cuda-graph-padding": ("batches are padded to buckets; --graphs vision=exact is without", frozenset()),
    "--piecewise-cuda-graph-tokens": ("buckets follow from --max-num-batched-tokens", frozenset()),
    "--max-seq-len-to-capture": ("graphs cover every length up to --max-num-batched-tokens", frozenset()),
    "--compilation-config": (_GRAPHS, frozenset()),
    "--cuda-graph-config": (_GRAPHS, frozenset()),
    "--cudagraph-mode": (_GRAPHS, frozenset()),
    "--pipeline-parallel-size": (_PARALLEL, frozenset({"1"})),
    "--pp-size": (_PARALLEL, frozenset({"1"})),
    "--pp": (_PARALLEL, frozenset({"1"})),
    "--data-parallel-size": (_PARALLEL, frozenset({"1"})),
    "--dp-size": (_PARALLEL, frozenset({"1"})),
    "--dp": (_PARALLEL, frozenset({"1"})),
    "--ep-size": (_PARALLEL, frozenset({"1"})),
    "--ep": (_PARALLEL, frozenset({"1"})),
    "--enable-expert-parallel": (_PARALLEL, frozenset({"false"})),
    "--enable-dp-attention": (_PARALLEL, frozenset({"false"})),
    "--nnodes": (_PARALLEL, frozenset({"1"})),
    "--node-rank": (_PARALLEL, frozenset({"0"})),
    "--dist-init-addr": (_PARALLEL, frozenset()),
    "--base-gpu-id": ("the first GPU that CUDA shows is taken; choose it by CUDA_VISIBLE_DEVICES", frozenset({"0"})),
    "--tokenizer": (_CHECKPOINT, frozenset()),
    "--tokenizer-path": (_CHECKPOINT, frozenset()),
    "--tokenizer-revision": ("model and tokenizer are of one --revision", frozenset()),
    "--skip-tokenizer-init": ("answers are text; a request may still send token ids", frozenset({"false"})),
    "--hf-overrides": (_ONE_MODEL_FILE, frozenset({"{}"})),
    "--json-model-override-args": (_ONE_MODEL_FILE, frozenset({"{}"})),
    "--hf-token": ("keys do not belong on a command line; set HF_TOKEN", frozenset()),
    "--hf-chat-template-name": ("--chat-template takes a file with the template", frozenset({"default"})),
    "--default-chat-template-kwargs": ("a request brings its own chat_template_kwargs", frozenset({"{}"})),
    "--completion-template": ("/v1/completions takes text as it is", frozenset()),
    "--response-role": ("answers are the assistant's", frozenset({"assistant"})),
    "--override-generation-config": ("a request brings its own values; see --generation-config", frozenset({"{}"})),
    "--model-impl": ("families have one implementation each", frozenset({"auto", "vllm", "sglang"})),
    "--task": ("models write text; embeddings are not supported", frozenset({"auto", "generate"})),
    "--runner": ("models write text; embeddings are not supported", frozenset({"auto", "generate"})),
    "--is-embedding": ("models write text; embeddings are not supported", frozenset({"false"})),
    "--model-loader-extra-config": ("weights are read from safetensors; see --load-format", frozenset({"{}"})),
    "--no-enable-chunked-prefill": ("prompts are always chunked to --max-num-batched-tokens; raise that", frozenset()),
    "--cpu-offload-gb": ("weights stay on the GPU; `saccade plan` says what fits", frozenset({"0"})),
    "--enable-lora": (_ADAPTERS, frozenset({"false"})),
    "--lora-modules": (_ADAPTERS, frozenset()),
    "--lora-paths": (_ADAPTERS, frozenset()),
    "--speculative-config": (_DRAFTS, frozenset()),
    "--speculative-algorithm": (_DRAFTS, frozenset()),
    "--speculative-draft-model-path": (_DRAFTS, frozenset()),
    "--kv-cache-memory-bytes": ("use --kv-cache-tokens; `saccade plan` shows the bytes of a token", frozenset()),
    "--kv-transfer-config": (_KV_ELSEWHERE, frozenset()),
    "--enable-hierarchical-cache": (_KV_ELSEWHERE, frozenset({"false"})),
    "--disaggregation-mode": ("prefill and decode share a GPU", frozenset({"null"})),
    "--mm-processor-kwargs": ("pixel limits come from the checkpoint's preprocessor_config.json", frozenset()),
    "--enable-sleep-mode": ("a running server keeps its memory; stop it to free the GPU", frozenset({"false"})),
    "--enable-memory-saver": ("a running server keeps its memory; stop it to free the GPU", frozenset({"false"})),
    "--enable-deterministic-inference": (
        "seeds do not depend on the batch, but sums of other batches may differ in the last bits",
        frozenset({"false"}),
    ),
    "--allow-auto-truncate": ("a prompt that is too long is refused, not cut", frozenset({"false"})),
    "--enable-custom-logit-processor": ("code from requests is never run", frozenset({"false"})),
    "--logits-processors": ("code by name is never loaded", frozenset()),
    "--middleware": ("code by name is never loaded", frozenset()),
    "--enable-force-include-usage": ('a request asks: stream_options: {"include_usage": true}', frozenset({"false"})),
    "--otlp-traces-endpoint": (_TRACES, frozenset()),
    "--enable-trace": (_TRACES, frozenset({"false"})),
    "--tool-call-parser": (
        "tool calls of Qwen models are parsed as Hermes does",
        frozenset({"hermes", "qwen", "qwen25"}),
    ),
}
_COUNTED = "the server counts tokens with the model's own tokenizer"
# The same for benchmarks of servers.
BENCH_TAKEN_SWITCHES = {
    "--apply-chat-template": "chat backends have the server apply the model's template, others send plain text",
    "--trust-remote-code": _COUNTED,
    "--disable-tqdm": "a bar is drawn on terminals only",
}
BENCH_TAKEN_VALUES = {
    "--tokenizer": _COUNTED,
    "--tokenizer-mode": _COUNTED,
    "--ready-check-timeout-sec": "a server that does not answer is an error at once",
}
BENCH_REFUSED = {
    "--profile": ("profilers are started with the server, from outside", frozenset({"false"})),
    "--lora-name": (_ADAPTERS, frozenset()),
    "--tokenize-prompt": ("prompts are text; their lengths are counted by the server", frozenset({"false"})),
}


def add_aliases(parser: Parser) -> None:
    """What the commands that run a model take of other engines' flags."""
    group = _add_mapped(parser)
    _add_taken(parser, group, TAKEN_SWITCHES, TAKEN_VALUES)
    _add_refused(parser, group, REFUSED)
    if "tensor_parallel_size" in parser.kinds:
        parser.add_foreign(group, "-tp", dest="tensor_parallel_size", type=reader_of(int))
    if parser.max_words:
        group.add("--model", "--model-path", dest="model", help=SUPPRESS)


def add_bench_aliases(parser: Parser) -> None:
    """What the benchmark of servers takes of other benchmarks' flags."""
    group = _add_mapped(parser)
    _add_taken(parser, group, BENCH_TAKEN_SWITCHES, BENCH_TAKEN_VALUES)
    _add_refused(parser, group, BENCH_REFUSED)


def _add_mapped(parser: Parser) -> Group:
    """Other names of settings that a parser has."""
    group = parser.new_group("aliases", "names of other engines")
    for flag, field, how in _mapped():
        if field in parser.kinds and not parser.knows(flag):
            if "action" not in how:
                assert not is_list(parser.kinds[field]), f"{flag} would replace a list"
                how = {"type": reader_of(parser.kinds[field])}
                parser.aliases[flag[2:].replace("-", "_")] = field
            parser.add_foreign(group, flag, dest=field, **how)
    return group


def _mapped() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every flag that sets something, the setting, and how; without an action it reads what the setting reads."""
    yield from ((flag, field, {}) for flag, field in SAME.items())
    yield from ((flag, field, {"action": Budget, "type": reader_of(int)}) for flag, field in BUDGETS.items())
    yield from ((flag, field, {"action": "store_const", "const": to}) for flag, (field, to) in SWITCHES.items())
    yield from ((flag, field, {"action": Translate, "words": of}) for flag, (field, of) in TRANSLATED.items())
    yield from ((flag, "graphs", {"action": GraphWord, "word": word}) for flag, word in GRAPH_WORDS.items())


def _add_taken(parser: Parser, group: Group, switches: dict[str, str], values: dict[str, str]) -> None:
    for flag, note in switches.items():
        if not parser.knows(flag):
            parser.add_foreign(group, flag, sets=False, action=Take, note=note, nargs=0)
    for flag, note in values.items():
        if not parser.knows(flag):
            parser.add_foreign(group, flag, sets=False, action=Take, note=note)


def _add_refused(parser: Parser, group: Group, refused: dict[str, tuple[str, frozenset[str]]]) -> None:
    for flag, (reason, neutral) in refused.items():
        if not parser.knows(flag):
            parser.add_foreign(group, flag, sets=False, action=Refuse, reason=reason, neutral=neutral)
