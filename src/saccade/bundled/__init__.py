"""The small vision-language model that ships with Saccade: an ordinary checkpoint folder inside the package."""

from pathlib import Path
from typing import Any

# Defaults for a quick start on a CPU. Graphs recorded there keep every temporary tensor, so they are few and small. An
# image has at most 64 tokens.
LIMITS: dict[str, int] = {
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "encoder_budget_tokens": 256,
    "encoder_cache_tokens": 2048,
}
# Defaults of a server.
SERVED: dict[str, Any] = {**LIMITS, "served_model_name": ("saccade",)}


def path() -> Path:
    return Path(__file__).parent / "checkpoint"
