"""Runs requests of every kind before the first real one."""

from typing import Any

from saccade.errors import GraphError
from saccade.inputs.placeholders import text_prompt
from saccade.scheduling.engine import Engine
from saccade.scheduling.orders import WarmUp
from saccade.scheduling.request_checks import needs_head
from saccade.wire.engine_metrics import new_step_tokens
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.update import FinishReason

WARM_UP_ID = "warm-up"
WARM_UP_TOKENS = 300
WARM_UP_STEPS = 1000


def warm_up(engine: Engine) -> None:
    """Compiles, loads and allocates everything that runs outside graphs."""
    engine.executor.execute(WarmUp())
    longest = engine.scheduler.settings.max_model_len
    prompt = text_prompt([0] * max(1, min(WARM_UP_TOKENS, longest - 4)))
    common: dict[str, Any] = {"max_tokens": min(3, longest - len(prompt)), "ignore_eos": True}
    for params in (
        SamplingParams(temperature=0, prompt_logprobs=1, logprobs=1, **common),
        SamplingParams(temperature=1, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.1, **common),
        SamplingParams(temperature=0, logit_bias={0: 1.0}, allowed_token_ids=(0, 1), min_tokens=1, **common),
        SamplingParams(max_tokens=0, pooling="mean"),
        SamplingParams(max_tokens=0, pooling="logits", pooled_token_ids=(0, 1)),
    ):
        if needs_head(params) and not engine.composer.has_head:
            continue
        engine.add(WARM_UP_ID, prompt, params, cache_salt=WARM_UP_ID)
        updates = [update for _ in range(WARM_UP_STEPS) if engine.has_work for update in engine.step()]
        if not updates or updates[-1].finish is None or updates[-1].finish.reason is FinishReason.ERROR:
            raise GraphError(f"a warm-up request failed: {updates[-1:]}")
    engine.step_tokens = new_step_tokens()
