"""Who is let in: refuses what could never run, and what is too much for now."""

from collections.abc import Sequence

from saccade.cache.blocks import BlockPool
from saccade.cache.encoder import EncoderIndex
from saccade.cache.prefix import Span
from saccade.errors import CapacityError, RequestError
from saccade.scheduling.queue import RequestQueue
from saccade.scheduling.request import Request
from saccade.wire.engine_settings import SchedulerSettings


def check_fits(request: Request, settings: SchedulerSettings, pool: BlockPool, encoder: EncoderIndex) -> None:
    """Raises unless the request could run alone."""
    request.check_spans()
    num_prompt = len(request.prompt_ids)
    longest = settings.max_model_len - (request.params.max_tokens != 0)
    if num_prompt == 0:
        raise RequestError("the prompt is empty; at least one token is needed", param="prompt")
    if num_prompt > longest:
        raise _too_long(num_prompt, f"with room for an answer the limit is {longest} (--max-model-len)")
    if num_prompt > pool.num_tokens:
        raise _too_long(num_prompt, f"the KV cache has room for {pool.num_tokens} (--gpu-memory-utilization)")
    for span in request.spans:
        _check_media(request, span, settings, encoder)


def check_queue(
    family: Sequence[Request], waiting: RequestQueue, settings: SchedulerSettings, num_startable: int
) -> None:
    """Raises if the queue is full. When nobody waits, whatever fits is let in. The next step takes `num_startable` of
    those who wait: they do not count."""
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


def _check_media(request: Request, span: Span, settings: SchedulerSettings, encoder: EncoderIndex) -> None:
    num_rows = request.media_rows(span.media_idx)
    if num_rows > encoder.max_rows:
        raise _too_large(span, num_rows, f"the encoder cache has room for {encoder.max_rows} (--encoder-cache-tokens)")
    if span.is_whole and span.length > settings.max_num_batched_tokens:
        limit = f"one step takes {settings.max_num_batched_tokens} (--max-num-batched-tokens)"
        raise _too_large(span, span.length, f"they are computed in one piece, and {limit}")


def _too_long(num_tokens: int, limit: str) -> RequestError:
    return RequestError(f"prompt has {num_tokens} tokens; {limit}", param="prompt", code="context_length_exceeded")


def _too_large(span: Span, num_tokens: int, limit: str) -> RequestError:
    return RequestError(
        f"image or video {span.media_idx} has {num_tokens} tokens; {limit}", param="prompt", code="media_too_large"
    )
