"""Environment variables of vLLM and SGLang: none is read, and whoever set one is told what to use instead."""

from collections.abc import Mapping

from saccade.config import foreign_variables

_KERNELS = "kernels are chosen by the GPU; `saccade doctor` shows which and why"
_KEY = "NO KEY is taken from it; use --api-key or SACCADE_API_KEY"
_HUB = "models are local folders or come from the Hugging Face hub"
_LOG = "the log has starts, ends and errors; --access-log adds a line for each request"
_OTHERS = "settings here are flags, a --config file and SACCADE_ variables"
INSTEAD = {
    "SGLANG_MM_FEATURE_CACHE_MB": "pixels of waiting requests are bounded by --max-media-bytes",
    "SGLANG_USE_CUDA_IPC_TRANSPORT": "pixels reach the engine over a local socket and the GPU from pinned memory",
    "SGLANG_VLM_CACHE_SIZE_MB": "use --encoder-cache-tokens; 0 keeps no image between requests",
    "SGLANG_VIT_ENABLE_CUDA_GRAPH": "vision passes are graph replays anyway; --graphs vision=off runs them without",
    "SGLANG_ENABLE_TORCH_COMPILE": "kernels are fused already, and graphs are captured without a compiler",
    "SGLANG_HOST_IP": "use --host",
    "SGLANG_PORT": "use --port",
    "SGLANG_API_KEY": _KEY,
    "SGLANG_USE_MODELSCOPE": _HUB,
    "SGLANG_LOGGING_CONFIG_PATH": _LOG,
    "SGLANG_CACHE_DIR": "compiled kernels are kept below XDG_CACHE_HOME, checkpoints by the hub (--download-dir)",
    "SGLANG_REQ_WAITING_TIMEOUT": "use --request-timeout-s",
    "SGLANG_REQ_RUNNING_TIMEOUT": "use --request-timeout-s",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "a request has at most the positions that the model was made for",
    "VLLM_HOST_IP": "use --host",
    "VLLM_PORT": "use --port",
    "VLLM_API_KEY": _KEY,
    "VLLM_USE_MODELSCOPE": _HUB,
    "VLLM_ATTENTION_BACKEND": _KERNELS,
    "VLLM_LOGGING_LEVEL": _LOG,
    "VLLM_CONFIGURE_LOGGING": _LOG,
    "VLLM_CACHE_ROOT": "compiled kernels are kept below XDG_CACHE_HOME, checkpoints by the hub (--download-dir)",
    "VLLM_IMAGE_FETCH_TIMEOUT": "use --image-fetch-timeout-s",
    "VLLM_VIDEO_FETCH_TIMEOUT": "use --video-fetch-timeout-s",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "a request has at most the positions that the model was made for",
}


def variable_notes(variables: Mapping[str, str] | None = None) -> list[str]:
    """A line for each variable that is set. Values are not shown: one may be a key."""
    return [f"{name} changes nothing: {INSTEAD.get(name, _OTHERS)}" for name in foreign_variables(variables)]
