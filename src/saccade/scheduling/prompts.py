"""The prompts of live requests: what is checked before one is let in, and the pixels that they keep on the host."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from saccade.cache.prefix import Span
from saccade.errors import CapacityError, RequestError
from saccade.inputs.placeholders import Prompt
from saccade.scheduling.compose import Composer
from saccade.wire.engine_settings import SchedulerSettings
from saccade.wire.sampling_params import SamplingParams


class LivePrompts:
    """Several outputs may be made of one prompt; its pixels count once, and go with the last of them."""

    def __init__(self, composer: Composer, eos_token_ids: frozenset[int]) -> None:
        self._composer, self._eos_token_ids = composer, eos_token_ids
        self._by_request: dict[str, Prompt] = {}
        self._uses: Counter[int] = Counter()  # outputs of each prompt, by its identity
        self.media_bytes = 0

    def __len__(self) -> int:
        return len(self._by_request)

    def of(self, request_id: str) -> Prompt:
        return self._by_request[request_id]

    def check(self, prompt: Prompt, params: SamplingParams, limits: SchedulerSettings) -> None:
        """Refuses what this model cannot do, and what is too much for now."""
        self._check_tokens(prompt, params)
        self._check_media(prompt)
        self._check_room(prompt, limits)

    def add(self, request_ids: Iterable[str], prompt: Prompt) -> None:
        if not self._uses[id(prompt)]:
            self.media_bytes += media_bytes(prompt)
        for request_id in request_ids:
            self._uses[id(prompt)] += 1
            self._by_request[request_id] = prompt

    def remove(self, request_id: str) -> None:
        """Forget a prompt; its pixels are gone with the last output that was made of it."""
        prompt = self._by_request.pop(request_id, None)
        if prompt is None:
            return
        self._uses[id(prompt)] -= 1
        if not self._uses[id(prompt)]:
            del self._uses[id(prompt)]
            self.media_bytes -= media_bytes(prompt)

    def spans(self, prompt: Prompt) -> tuple[Span, ...]:
        """Where the rows of media stand, as the prefix cache tells them apart."""
        is_whole = self._composer.layout.has_limits
        return tuple(
            Span(
                offset=span.offset,
                length=span.length,
                digest=span.digest,
                media_idx=span.media_idx,
                first_row=span.feature_offset,
                layout=_layout(prompt, span.offset, span.length),
                is_whole=is_whole,
            )
            for span in prompt.spans
        )

    def _check_tokens(self, prompt: Prompt, params: SamplingParams) -> None:
        vocab_size = self._composer.vocab_size
        ids = prompt.token_ids
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
            raise RequestError(f"prompt has token ids outside 0..{vocab_size - 1}", param="prompt")
        for name, tokens in (("logit_bias", params.logit_bias), ("allowed_token_ids", params.allowed_token_ids)):
            _check_ids(name, tuple(tokens or ()), vocab_size)
        ends = {*self._eos_token_ids, *params.stop_token_ids}
        if params.min_tokens and params.allowed_token_ids and ends.issuperset(params.allowed_token_ids):
            message = f"allowed_token_ids are all end tokens, which min_tokens ({params.min_tokens}) forbids at first"
            raise RequestError(message, param="allowed_token_ids")

    def _check_media(self, prompt: Prompt) -> None:
        """With `--graphs-strict` a frame that no graph holds fails its request: better before it waits than after."""
        vision = self._composer.vision
        if vision is None or not vision.catalogue.settings.strict:
            return
        limit = vision.catalogue.shape.limits["units"]
        longest = max((media.plan.num_tokens // media.plan.grid_thw[0] for media in prompt.media), default=0)
        if longest > limit:
            message = f"an image or video has {longest} rows; the limit is {limit} (--encoder-budget-tokens)"
            raise RequestError(message, code="image_too_large")

    def _check_room(self, prompt: Prompt, limits: SchedulerSettings) -> None:
        """Pixels stay until a request ends, as it may be preempted and its images evicted. Alone any request fits."""
        needed = media_bytes(prompt)
        if needed and self.media_bytes and self.media_bytes + needed > limits.max_media_bytes:
            raise CapacityError(
                f"requests hold {self.media_bytes} bytes of pixels and {needed} would join them; "
                f"the limit is {limits.max_media_bytes} (--max-media-bytes)",
                retry_after_s=limits.retry_after_s,
            )


def media_bytes(prompt: Prompt) -> int:
    return sum(media.pixels.nbytes for media in prompt.media)


def _check_ids(name: str, tokens: Sequence[int], vocab_size: int) -> None:
    if tokens and max(tokens) >= vocab_size:
        raise RequestError(f"{name} names token {max(tokens)}; the vocabulary has {vocab_size}", param=name)


def _layout(prompt: Prompt, offset: int, length: int) -> bytes:
    """Positions of media rows relative to their first: other time steps give other keys and values."""
    positions: Any = prompt.positions_3T[:, offset : offset + length]
    return (positions - positions[:, :1]).tobytes() if length else b""
