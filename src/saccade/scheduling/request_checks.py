"""Admission checks: refuse requests that the model cannot serve, that could never run, or that are too much for now."""

from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from saccade.cache.blocks import BlockPool
from saccade.cache.encoder import EncoderIndex
from saccade.cache.prefix import Span
from saccade.choice.catalogue import Catalogue
from saccade.errors import CapacityError, RequestError, too_long
from saccade.inputs.placeholders import Prompt
from saccade.inputs.positions import FeatureRows
from saccade.scheduling.request import Request, RequestQueue
from saccade.wire.engine_settings import SchedulerSettings
from saccade.wire.sampling_params import SamplingParams


def needs_head(params: SamplingParams) -> bool:
    return params.pooling not in ("last", "mean")


def check_head(params: SamplingParams, *, has_head: bool) -> None:
    if needs_head(params) and not has_head:
        message = "this checkpoint has no output head, so it makes embeddings only (/v1/embeddings)"
        raise RequestError(message, code="unsupported")


def check_tokens(prompt: Prompt, params: SamplingParams, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
    """Raises for tokens outside the vocabulary."""
    ids = prompt.token_ids
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        raise RequestError(f"prompt has token ids outside 0..{vocab_size - 1}", param="prompt")
    named = {name: getattr(params, name) for name in ("logit_bias", "allowed_token_ids", "pooled_token_ids")}
    for name, tokens in named.items():
        if tokens and (largest := max(tokens)) >= vocab_size:
            raise RequestError(f"{name} names token {largest}; the vocabulary has {vocab_size}", param=name)
    ends = {*eos_token_ids, *params.stop_token_ids}
    if params.min_tokens and params.allowed_token_ids and ends.issuperset(params.allowed_token_ids):
        message = f"allowed_token_ids are all end tokens, which min_tokens ({params.min_tokens}) forbids at first"
        raise RequestError(message, param="allowed_token_ids")


def check_frames(prompt: Prompt, vision: Catalogue) -> None:
    """With `--graphs-strict` a frame that no graph holds would fail its request later, so it is refused right away."""
    if vision.settings.strict:
        limit = vision.shape.limits["units"]
        longest = max((media.plan.num_tokens // media.plan.grid_thw[0] for media in prompt.media), default=0)
        if longest > limit:
            message = f"an image or video has {longest} rows; the limit is {limit} (--encoder-budget-tokens)"
            raise RequestError(message, code="image_too_large")


class PixelAccount:
    """Bytes of pixels that live requests keep on the host. They stay until the request ends, because it may be
    preempted and its images evicted. A prompt's pixels count once for all its outputs, until the last one ends."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._uses: Counter[int] = Counter()  # live outputs of each prompt, by `id`

    def check(self, prompt: Prompt, limits: SchedulerSettings) -> None:
        """Raises if there is no room for a prompt's pixels. A request alone always has room."""
        needed = prompt.pixel_bytes
        if needed and self.nbytes and self.nbytes + needed > limits.max_media_bytes:
            raise CapacityError(
                f"requests hold {self.nbytes} bytes of pixels and {needed} would join them; "
                f"the limit is {limits.max_media_bytes} (--max-media-bytes)",
                retry_after_s=limits.retry_after_s,
            )

    def count(self, prompt: Prompt, num_outputs: int) -> None:
        """Adds outputs to a prompt's count, or removes them if negative."""
        before, now = self._uses[id(prompt)], self._uses[id(prompt)] + num_outputs
        if bool(before) != bool(now):
            self.nbytes += prompt.pixel_bytes if now else -prompt.pixel_bytes
        self._uses[id(prompt)] = now
        if not now:
            del self._uses[id(prompt)]


def spans_of(prompt: Prompt, *, is_whole: bool) -> tuple[Span, ...]:
    """Media spans with all that tells them apart in the prefix cache."""
    return tuple(
        Span(
            offset=rows.offset,
            length=rows.length,
            digest=prompt.media[rows.media_idx].digest,
            media_idx=rows.media_idx,
            first_row=rows.feature_offset,
            layout=b"" if prompt.media[rows.media_idx].kind == "image" else _time_steps(prompt, rows),
            is_whole=is_whole,
        )
        for rows in prompt.spans
    )


def _time_steps(prompt: Prompt, rows: FeatureRows) -> bytes:
    """A digest of positions in a video: they change keys and values, and do not follow from the pixels."""
    positions: Any = prompt.positions_3T[:, rows.offset : rows.offset + rows.length]
    return sha256((positions - positions[:, :1]).tobytes()).digest()


def output_shift(prompt: Prompt) -> int:
    """How far ahead generated tokens are of the positions they will have in a later prompt: `rope_delta` counts a
    video's time steps, but text after a video ignores them."""
    positions = prompt.positions_3T
    return int(positions.max()) - int(positions[1:].max()) if positions.size else 0


def check_fits(request: Request, settings: SchedulerSettings, pool: BlockPool, encoder: EncoderIndex) -> None:
    """Raises unless the request could run alone."""
    num_prompt = len(request.prompt_ids)
    has_answer = request.params.max_tokens != 0
    if num_prompt == 0:
        raise RequestError("the prompt is empty; at least one token is needed", param="prompt")
    problem = f"prompt has {num_prompt} tokens"
    if num_prompt + has_answer > settings.max_model_len:
        raise too_long(problem, settings.max_model_len, has_answer=has_answer, param="prompt")
    if num_prompt > pool.num_tokens:
        limit = f"the KV cache has room for {pool.num_tokens} (--gpu-memory-utilization)"
        raise RequestError(f"{problem}; {limit}", param="prompt", code="context_length_exceeded")
    for span in request.spans:
        num_rows, step = request.media_rows[span.media_idx], settings.max_num_batched_tokens
        if num_rows > encoder.max_rows:
            limit = f"the encoder cache has room for {encoder.max_rows} (--encoder-cache-tokens)"
            raise _too_large(span, num_rows, limit)
        if span.is_whole and span.length > step:
            limit = f"they are computed in one piece, and one step takes {step} (--max-num-batched-tokens)"
            raise _too_large(span, span.length, limit)


def check_queue(
    family: Sequence[Request], waiting: RequestQueue, settings: SchedulerSettings, num_startable: int
) -> None:
    """Raises if the queue is full. An empty queue accepts any request that fits. The next step can start
    `num_startable` waiting requests, so these do not count."""
    if not len(waiting):
        return
    if len(waiting) + len(family) > settings.max_queued_requests + num_startable:
        full = f"{len(waiting)} requests wait; the limit is {settings.max_queued_requests} (--max-queued-requests)"
        raise CapacityError(full, retry_after_s=settings.retry_after_s)
    num_tokens = sum(len(request.prompt_ids) for request in family)
    if waiting.num_prompt_tokens + num_tokens > settings.max_queued_tokens:
        full = (
            f"{waiting.num_prompt_tokens} prompt tokens wait and {num_tokens} would join them; "
            f"the limit is {settings.max_queued_tokens} (--max-queued-tokens)"
        )
        raise CapacityError(full, retry_after_s=settings.retry_after_s)


def _too_large(span: Span, num_tokens: int, limit: str) -> RequestError:
    return RequestError(
        f"image or video {span.media_idx} has {num_tokens} tokens; {limit}", param="prompt", code="media_too_large"
    )
