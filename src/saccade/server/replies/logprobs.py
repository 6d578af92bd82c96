"""Log-probabilities in the formats of chat and of text completions."""

from collections.abc import Iterable, Sequence
from typing import Any

from saccade.client.output import Logprob, Logprobs
from saccade.inputs.text.detokenizer import Detokenizer
from saccade.inputs.text.tokenizer import Tokenizer

FLOOR = -9999.0  # JSON has no infinity


def chat_entries(
    tokenizer: Tokenizer, token_ids: Sequence[int], scores: Sequence[Logprobs], num_top: int
) -> list[dict[str, Any]]:
    """choices[].logprobs.content: each token with its bytes, which may be part of a character."""
    return [
        {
            **_entry(tokenizer, token, found[token]),
            "top_logprobs": [_entry(tokenizer, other, score) for other, score in likeliest(found, num_top)],
        }
        for token, found in zip(token_ids, scores, strict=False)
    ]


def likeliest(found: Logprobs, count: int) -> list[tuple[int, Logprob]]:
    """The `count` likeliest tokens. The chosen token is always among the scores, but is left out if its rank is
    higher."""
    ranked = sorted(found.items(), key=_rank)
    return [(token, score) for token, score in ranked if score.rank <= count][:count]


def token_text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.shown(token)[0]


def number(score: Logprob) -> float:
    return max(score.logprob, FLOOR)


def prompt_entries(
    tokenizer: Tokenizer, token_ids: Iterable[int], scores: Iterable[Logprobs | None], num_top: int
) -> list[dict[str, Any] | None]:
    """vLLM's prompt_logprobs, by token id: each token and the likeliest; the first token has none. The scores may have
    more, for an echo."""
    return [
        None
        if found is None
        else {
            str(other): {
                "logprob": number(score),
                "rank": score.rank,
                "decoded_token": token_text(tokenizer, other),
            }
            for other, score in ({token: found[token]} | dict(likeliest(found, num_top))).items()
        }
        for token, found in zip(token_ids, scores, strict=False)
    ]


class CompletionScores:
    """The logprobs of a text completion: parallel lists over its tokens, with offsets into its text. A token with part
    of a character starts where the character does; a token that is not in the text, where it would be."""

    def __init__(
        self, tokenizer: Tokenizer, num_top: int, *, skip_special_tokens: bool = True, is_continued: bool = False
    ) -> None:
        self._tokenizer, self._num_top, self._offset = tokenizer, num_top, 0
        self._text = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens, is_continued=is_continued)
        self.clear()

    def clear(self) -> None:
        """Drops what was already sent; offsets continue."""
        self._tokens: list[str] = []
        self._values: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add_prompt(self, token_ids: Sequence[int], scores: Sequence[Logprobs | None], text: str) -> None:
        """Adds the tokens of an echoed text. Tokens that the tokenizer put before it, such as <bos>, start at offset
        0."""
        self._add(token_ids, scores, self._tokenizer.detokenizer(skip_special_tokens=False))
        extra, self._offset = self._offset - len(text), len(text)
        self._offsets = [min(max(offset - extra, 0), len(text)) for offset in self._offsets]

    def add(self, token_ids: Sequence[int], scores: Sequence[Logprobs | None]) -> None:
        self._add(token_ids, scores, self._text)

    def _add(self, token_ids: Sequence[int], scores: Sequence[Logprobs | None], text: Detokenizer) -> None:
        for token, found in zip(token_ids, scores, strict=False):
            self._tokens.append(token_text(self._tokenizer, token))
            self._offsets.append(self._offset)
            self._offset += len(text.push(token))
            self._values.append(None if found is None else number(found[token]))
            self._tops.append(None if found is None else self._top(token, found))

    def to_json(self) -> dict[str, Any]:
        tops = self._tops if self._num_top else None
        return {
            "tokens": self._tokens,
            "token_logprobs": self._values,
            "top_logprobs": tops,
            "text_offset": self._offsets,
        }

    def _top(self, token: int, found: Logprobs) -> dict[str, float]:
        """The likeliest tokens and the chosen one, as in OpenAI's API."""
        chosen = [*likeliest(found, self._num_top), (token, found[token])]
        return {token_text(self._tokenizer, other): number(score) for other, score in reversed(chosen)}


def _rank(item: tuple[int, Logprob]) -> int:
    return item[1].rank


def _entry(tokenizer: Tokenizer, token: int, score: Logprob) -> dict[str, Any]:
    text, data = tokenizer.shown(token)
    return {"token": text, "logprob": number(score), "bytes": data}
