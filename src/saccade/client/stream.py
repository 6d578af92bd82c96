"""One request as its consumer sees it: engine updates in, pieces of text out."""

import asyncio
from collections.abc import Iterator
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from saccade.client.output import Logprobs, RequestOutputs
from saccade.errors import SaccadeError
from saccade.inputs.placeholders import Prompt
from saccade.inputs.text.tokenizer import Tokenizer
from saccade.wire.messages import News
from saccade.wire.passes import PassCount
from saccade.wire.sampling_params import SamplingParams


class Delta(Struct, frozen=True, kw_only=True):
    """What output `index` of a request gained. A delta with a `finish_reason` is the output's last. `stop_reason` is
    the stop token or string, or an error message. `num_output_tokens` counts the whole output so far. `prompt_logprobs`
    come with the last delta of output 0. `timings` come with the last delta of every output: the engine's seconds by
    stage. The stages are queue, prefill (first step to first token), decode, and vision (the passes that encoded the
    request's media: a part of prefill, missing if all media were cached). `passes` come with them if the request asked.
    `pooled` is the vector of a request that asked for one, with its last delta."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[Logprobs, ...] | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    timings: dict[str, float] | None = None
    passes: tuple[PassCount, ...] | None = None
    pooled: NDArray[Any] | None = None


class RequestStream:
    """Turns the engine's updates about one request into deltas. Done when all `n` outputs have ended. Tokens waiting
    for a slow consumer are merged, so that it catches up with less work."""

    def __init__(
        self, serial: int, request_id: str, prompt: Prompt, params: SamplingParams, tokenizer: Tokenizer
    ) -> None:
        self.serial, self.request_id = serial, request_id
        self._outputs = RequestOutputs(prompt, params, tokenizer)
        self._inbox: list[News] = []
        self.error: SaccadeError | None = None
        self._waiter: asyncio.Future[None] | None = None  # of the pending `receive`

    @property
    def is_done(self) -> bool:
        return self._outputs.is_done

    def put(self, news: News) -> None:
        if self._inbox and _is_plain(news) and _is_plain(self._inbox[-1]) and news.index == self._inbox[-1].index:
            news = replace(news, token_ids=self._inbox.pop().token_ids + news.token_ids)
        self._inbox.append(news)
        self._wake()

    def fail(self, error: SaccadeError) -> None:
        """Ends the request with an error, after the updates that came before it."""
        self.error = self.error or error
        self._wake()

    async def receive(self) -> list[News]:
        """The updates since the last call, at least one. Raises the request's error once there are no more."""
        while not self._inbox:
            if self.error is not None:
                raise self.error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        news, self._inbox = self._inbox, []
        return news

    def read(self, news: list[News]) -> Iterator[tuple[Delta, str | None]]:
        """Deltas, each with the stop string found in it if the engine does not know yet."""
        for item in news:
            start = len(self._outputs.streams[item.index].output.token_ids)
            taken = self._outputs.take(item.index, item)
            if taken is not None:
                yield self._delta(item, taken[0], start), taken[1]

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _delta(self, news: News, text: str, start: int) -> Delta:
        """A delta with the tokens from `start` on. Tokens after a stop string are dropped, even if the engine sent
        some."""
        output, prompt_logprobs = self._outputs.streams[news.index].output, self._outputs.prompt_logprobs
        has_scores = prompt_logprobs is not None and output.finish_reason is not None and news.index == 0
        return Delta(
            request_id=self.request_id,
            index=news.index,
            token_ids=tuple(output.token_ids[start:]),
            text=text,
            logprobs=None if output.logprobs is None else tuple(output.logprobs[start : len(output.token_ids)]),
            num_prompt_tokens=len(self._outputs.prompt_ids),
            num_cached_tokens=news.num_cached_tokens,
            num_output_tokens=len(output.token_ids),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            prompt_logprobs=tuple(prompt_logprobs or ()) if has_scores else None,
            timings=news.timings,
            passes=news.passes,
            pooled=self._outputs.pooled,
        )


def _is_plain(news: News) -> bool:
    """Tokens only. An output's last token stays separate: its text may not belong to the output."""
    return news.finish is None and news.scores is None and news.prompt_scores is None
