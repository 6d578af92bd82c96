"""Outputs as callers see them: text, stop strings, log-probabilities. Shaped like vLLM's."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct
from numpy.typing import NDArray

from saccade.inputs.placeholders import Prompt
from saccade.inputs.positions import Ints
from saccade.inputs.text.detokenizer import Detokenizer
from saccade.inputs.text.markers import split_undecided
from saccade.inputs.text.tokenizer import Tokenizer
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.update import Finish, FinishReason, PromptScores, Scores, Update


class Logprob(Struct, frozen=True):
    logprob: float
    rank: int


Logprobs = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request and its outputs. The first prompt token has no log-probability."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[Logprobs | None] | None = None

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


class RequestOutputs:
    def __init__(self, prompt: Prompt, params: SamplingParams, tokenizer: Tokenizer) -> None:
        how = {"skip_special_tokens": params.skip_special_tokens, "is_continued": prompt.is_continued}
        self.prompt_ids = prompt.token_ids
        self.streams = [OutputStream(i, tokenizer.detokenizer(**how), params) for i in range(params.n)]
        has_scores = params.prompt_logprobs is not None
        self.prompt_logprobs: list[Logprobs | None] | None = [None] * len(prompt) if has_scores else None
        self.pooled: NDArray[Any] | None = None

    @property
    def is_done(self) -> bool:
        return all(stream.output.finish_reason is not None for stream in self.streams)

    def take(self, index: int, update: Update) -> tuple[str, str | None] | None:
        """The text that an update adds to an output, and the stop string found in it if the engine does not know yet.
        None if it adds nothing: it has only prompt scores, or the output had already ended."""
        if update.prompt_scores is not None and self.prompt_logprobs is not None:
            place_prompt_scores(self.prompt_logprobs, self.prompt_ids, update.prompt_scores)
        if update.pooled is not None:
            self.pooled = update.pooled
        stream = self.streams[index]
        is_news = bool(update.token_ids) or update.finish is not None
        if not is_news or stream.output.finish_reason is not None:
            return None
        text, stop = stream.take(update)
        return text, stop if update.finish is None else None


class OutputStream:
    """Builds one output from its updates. Text that may begin a stop string is held back."""

    def __init__(self, index: int, detokenizer: Detokenizer, params: SamplingParams) -> None:
        self.output = CompletionOutput(index, logprobs=[] if params.logprobs is not None else None)
        self._detokenizer = detokenizer
        self._params = params
        self._held = ""
        self._early_stop: str | None = None  # found before `min_tokens`

    def take(self, update: Update) -> tuple[str, str | None]:
        """The text that an update adds, and the stop string found in it; later tokens are dropped."""
        output, finish = self.output, update.finish
        text, stop = "", None
        for i, token in enumerate(update.token_ids):
            output.token_ids.append(token)
            is_end = finish is not None and finish.reason is FinishReason.STOP and i == len(update.token_ids) - 1
            if not is_end or self._params.include_stop_str_in_output:
                self._held += self._detokenizer.push(token)
            part, stop = self._release(is_last=False)
            text += part
            if stop is not None:
                break
        if output.logprobs is not None and update.scores is not None:
            output.logprobs.extend(to_logprobs(update.token_ids, update.scores))
        if stop is None and finish is not None:
            self._held += self._detokenizer.flush()
            part, stop = self._release(is_last=True)
            text += part
        output.text += text
        if stop is not None:
            self.end(Finish(FinishReason.STOP, stop))
        elif finish is not None:
            self.end(finish)
        return text, stop

    def end(self, finish: Finish) -> None:
        self.output.finish_reason = finish.reason.value
        self.output.stop_reason = finish.detail

    def _release(self, *, is_last: bool) -> tuple[str, str | None]:
        """Held-back text that can be released now, and the stop string that ends it."""
        if not self._params.stop:
            text, self._held = self._held, ""
            return text, None
        num_tokens, least = len(self.output.token_ids), self._params.min_tokens
        at, stop = min(
            ((at, stop) for stop in self._params.stop if (at := self._held.find(stop)) >= 0), default=(0, None)
        )
        if 0 < num_tokens <= least:
            self._early_stop = self._early_stop or stop
            if self._early_stop is not None and num_tokens == least:
                text, self._held = self._held + self._detokenizer.flush(), ""
                return text, self._early_stop
        elif stop is not None:
            text, self._held = self._held[: at + len(stop) * self._params.include_stop_str_in_output], ""
            return text, stop
        text, self._held = (self._held, "") if is_last else split_undecided(self._held, self._params.stop)
        return text, None


def to_logprobs(token_ids: Sequence[int], scores: Scores) -> list[Logprobs]:
    """One mapping per token: the likeliest tokens, best first, and the token itself."""
    found = []
    for row, token in enumerate(token_ids):
        top = zip(scores.top_ids[row].tolist(), scores.top_logprobs[row].tolist(), strict=True)
        entry = {other: Logprob(value, rank) for rank, (other, value) in enumerate(top, start=1)}
        entry[token] = Logprob(float(scores.chosen[row]), int(scores.ranks[row]))
        found.append(entry)
    return found


def place_prompt_scores(into: list[Logprobs | None], token_ids: Ints, part: PromptScores) -> None:
    scored = slice(part.start, part.start + len(part.scores.chosen))
    into[scored] = to_logprobs(token_ids[scored].tolist(), part.scores)
