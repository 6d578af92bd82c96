"""Names that users of vLLM and SGLang type: taken where they mean something here, refused with a reason where not."""

from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from typing import Any, NoReturn

from saccade.cli.groups import Group
from saccade.cli.parser import Parser
from saccade.cli.values import is_list, reader_of

# SGLang's name: the setting it is here.
SAME = {
    "--mem-fraction-static": "gpu_memory_utilization",
    "--context-length": "max_model_len",
    "--max-running-requests": "max_num_seqs",
    "--max-prefill-tokens": "max_num_batched_tokens",
    "--chunked-prefill-size": "prefill_chunk_tokens",
    "--page-size": "block_size",
    "--max-total-tokens": "kv_cache_tokens",
    "--random-seed": "seed",
    "--limit-mm-data-per-request": "limit_mm_per_prompt",
    "--media-url-max-file-size": "max_fetch_bytes",
    "--watchdog-timeout": "watchdog_timeout_s",
    "--num-warmups": "warmup_requests",
    "--output-file": "result_filename",
    "--shutdown-timeout": "shutdown_timeout_s",
}
# A switch of another engine: the setting and what the switch sets it to.
SWITCHES: dict[str, tuple[str, Any]] = {
    "--disable-cuda-graph": ("enforce_eager", True),
    "--disable-radix-cache": ("enable_prefix_caching", False),
}
_GRAPHS = "graphs are chosen a phase at a time: --graphs vision=auto,prefill=auto,decode=auto"
_CHECKPOINT = "give a local folder with the files that are wanted instead"
_PARALLEL = "a model runs on one GPU; for more throughput start one server a GPU behind a load balancer"
# A flag without a meaning here: why, and the values that ask for nothing.
REFUSED: dict[str, tuple[str, frozenset[str]]] = {
    "--trust-remote-code": ("code from a checkpoint is never run; leave the flag out", frozenset({"false"})),
    "--quantization": ("weights are loaded as bfloat16, float16 or float32; see --dtype", frozenset()),
    "--kv-cache-dtype": ("keys and values have the model's dtype", frozenset({"auto"})),
    "--cuda-graph-max-bs": ("decode graphs cover every batch up to --max-num-seqs; lower that", frozenset()),
    "--cuda-graph-bs": ("decode graphs cover every batch up to --max-num-seqs; lower that", frozenset()),
    "--max-seq-len-to-capture": ("graphs cover every length up to --max-num-batched-tokens", frozenset()),
    "--compilation-config": (_GRAPHS, frozenset()),
    "--cuda-graph-config": (_GRAPHS, frozenset()),
    "--cudagraph-mode": (_GRAPHS, frozenset()),
    "--enable-piecewise-cuda-graph": ("use --graphs prefill=piecewise", frozenset()),
    "--pipeline-parallel-size": (_PARALLEL, frozenset({"1"})),
    "--data-parallel-size": (_PARALLEL, frozenset({"1"})),
    "--attention-backend": ("kernels are chosen by the GPU; `saccade doctor` shows which and why", frozenset()),
    "--mm-attention-backend": ("kernels are chosen by the GPU; `saccade doctor` shows which and why", frozenset()),
    "--tokenizer": (_CHECKPOINT, frozenset()),
    "--tokenizer-path": (_CHECKPOINT, frozenset()),
    "--revision": (_CHECKPOINT, frozenset({"main"})),
    "--chat-template": ("the template is the checkpoint's chat_template.jinja; change it there", frozenset()),
    "--enable-chunked-prefill": ("chunked prefill is always on; see --prefill-chunk-tokens", frozenset({"true"})),
    "--no-enable-chunked-prefill": ("prompts are always chunked to --max-num-batched-tokens; raise that", frozenset()),
    "--swap-space": ("there is no swapping: preempted requests are recomputed", frozenset({"0"})),
    "--cpu-offload-gb": ("weights stay on the GPU; `saccade plan` says what fits", frozenset({"0"})),
    "--enable-lora": ("adapters are not supported; merge them into the checkpoint", frozenset({"false"})),
    "--speculative-config": ("speculative decoding is not supported", frozenset()),
    "--speculative-algorithm": ("speculative decoding is not supported", frozenset()),
    "--kv-cache-memory-bytes": ("use --kv-cache-tokens; `saccade plan` shows the bytes of a token", frozenset()),
    "--mm-processor-kwargs": ("pixel limits come from the checkpoint's preprocessor_config.json", frozenset()),
    "--enable-auto-tool-choice": ("tool calls need no switch", frozenset({"true", ""})),
    "--tool-call-parser": (
        "tool calls of Qwen models are parsed as Hermes does",
        frozenset({"hermes", "qwen", "qwen25"}),
    ),
}


def add_same(parser: Parser) -> Group:
    """Adds to a parser, behind its settings, other names of them that it does not know already."""
    group = parser.new_group("aliases", "names of other engines")
    for flag, field in SAME.items():
        if field in parser.kinds and not parser.knows(flag):
            kind = parser.kinds[field]
            assert not is_list(kind), f"{flag} would replace a list"
            group.add(flag, dest=field, type=reader_of(kind), help=SUPPRESS)
            parser.aliases[flag[2:].replace("-", "_")] = field
    return group


def add_aliases(parser: Parser) -> None:
    """Adds other names of settings, and all that is refused with a reason."""
    group = add_same(parser)
    for flag, (field, value) in SWITCHES.items():
        if field in parser.kinds and not parser.knows(flag):
            group.add(flag, dest=field, action="store_const", const=value, help=SUPPRESS)
    for flag, (reason, neutral) in REFUSED.items():
        if not parser.knows(flag):
            group.add(flag, action=Refuse, reason=reason, neutral=neutral, help=SUPPRESS)
    _add_parallel(parser, group)
    if parser.max_words:
        group.add("--model", "--model-path", dest="model", help=SUPPRESS)


class Refuse(Action):
    """A flag that cannot be honoured says so, unless it asks for what is done anyway."""

    def __init__(self, option_strings: list[str], dest: str, *, reason: str, neutral: frozenset[str], **how: Any):
        super().__init__(option_strings, dest, nargs="?", **how)
        self.reason, self.neutral = reason, neutral

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: Any = None) -> None:
        if str(values or "").lower() not in self.neutral:
            parser.error(f"{option_string} has no meaning here: {self.reason}")


class OneGPU(Action):
    """Tensor parallelism of 1."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: Any = None) -> None:
        if values != 1:
            _refuse_parallel(parser, option_string, values)


def _add_parallel(parser: Parser, group: Group) -> None:
    flags = [f for f in ("-tp", "--tensor-parallel-size", "--tp-size", "--tp") if not parser.knows(f)]
    if flags:
        group.add(*flags, action=OneGPU, type=reader_of(int), dest="tensor_parallel_size", help=SUPPRESS)


def _refuse_parallel(parser: ArgumentParser, flag: str, size: int) -> NoReturn:
    parser.error(f"{flag} is {size}; supported is 1: the layers and kernels shard, but in this version {_PARALLEL}")
