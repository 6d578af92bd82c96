"""The small vision-language model that ships with Saccade: an ordinary checkpoint folder inside the package."""

from pathlib import Path

# Defaults of its settings, for a quick start on a CPU: graphs recorded there hold every temporary, so few and
# small ones. Its images have at most 64 tokens.
LIMITS: dict[str, int] = {
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "encoder_budget_tokens": 256,
    "encoder_cache_tokens": 2048,
}


def path() -> Path:
    """The folder of the bundled checkpoint."""
    return Path(__file__).parent / "checkpoint"
