"""How a request's tokens are sampled and where its output ends."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.errors import RequestError
from saccade.wire.grammar import Grammar

MAX_LOGPROBS = 20
MAX_N = 128
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKENS = 2**20
MAX_STOP_TOKENS = 1024
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_POOLED_TOKENS = 64
POOLINGS = ("last", "mean", "logits")
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Shaped like vLLM's, checked once: numbers are finite and in range, sequences are tuples.

    `temperature=0` is greedy. `top_k` of 0 or -1 turns it off (stored as 0). `max_tokens=None` fills the context; 0
    only computes the prompt, for its log-probabilities or the prefix cache. `logprobs` and `prompt_logprobs` are
    numbers of alternatives in addition to the token itself; None asks for no log-probabilities. Prompt tokens before
    `prompt_logprobs_start` get none, so they may come from the prefix cache. A `stop` string ends the output before
    itself, or after itself with `include_stop_str_in_output`. One completed within the first `min_tokens` tokens ends
    the output right after them.

    A `grammar` allows only tokens that lead to a text of its language, and ends the output when nothing may follow. It
    has the last word: if it allows only end tokens, one is taken even if `min_tokens` or `ignore_eos` forbids it.
    Log-probabilities are the model's own, before the grammar and all other edits.

    `pooling` asks for one vector instead of tokens and needs `max_tokens=0`. "last" and "mean" pool the hidden states
    after the final norm; "logits" are those of `pooled_token_ids` after the last prompt token.
    With `reports_passes` the engine counts the passes that served the request, by graph.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    skip_special_tokens: bool = True
    grammar: Grammar | None = None
    pooling: str | None = None
    pooled_token_ids: Sequence[int] = ()
    reports_passes: bool = False

    def __post_init__(self) -> None:
        self._check_numbers()
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "reports_passes"):
            if not isinstance(getattr(self, name), bool):
                raise _refuse(name, getattr(self, name), "allowed are true and false")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refuse("min_tokens", self.min_tokens, f"the most is max_tokens, here {self.max_tokens}")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise _refuse("grammar", type(self.grammar).__name__, "allowed is a Grammar")
        self._set("top_k", max(self.top_k, 0))
        self._set("logit_bias", None if self.logit_bias is None else _biases(self.logit_bias))
        self._set("stop", _strings("stop", self.stop))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKENS)
            if not allowed:
                raise _refuse("allowed_token_ids", "empty", "at least one token must be allowed")
            self._set("allowed_token_ids", allowed)
        self._set("pooled_token_ids", _token_ids("pooled_token_ids", self.pooled_token_ids, MAX_POOLED_TOKENS))
        if self.pooling is not None or self.pooled_token_ids:
            self._check_pooling()

    def _check_numbers(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        _check_float("temperature", self.temperature, 0, 100)
        _check_float("top_p", self.top_p, 0, 1, is_open=True)
        _check_int("top_k", self.top_k, -1, _INT32_MAX)
        _check_float("min_p", self.min_p, 0, 1)
        _check_float("repetition_penalty", self.repetition_penalty, 0, 100, is_open=True)
        _check_float("presence_penalty", self.presence_penalty, -2, 2)
        _check_float("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_int("min_tokens", self.min_tokens, 0, _INT32_MAX)
        _check_int("max_tokens", self.max_tokens, 0, _INT32_MAX, is_optional=True)
        _check_int("seed", self.seed, -(2**63), 2**63 - 1, is_optional=True)
        _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS, is_optional=True)
        _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, is_optional=True)
        _check_int("prompt_logprobs_start", self.prompt_logprobs_start, 0, _INT32_MAX)

    def _check_pooling(self) -> None:
        if self.pooling not in POOLINGS:
            raise _refuse("pooling", self.pooling, f"allowed are {', '.join(POOLINGS)}")
        if self.max_tokens != 0:
            raise _refuse("max_tokens", self.max_tokens, "with pooling it must be 0: nothing is generated")
        if self.n != 1:
            raise _refuse("n", self.n, "with pooling it must be 1: a prompt has one vector")
        if (self.pooling == "logits") != bool(self.pooled_token_ids):
            allowed = "pooling logits needs at least one token id, and other poolings take none"
            raise _refuse("pooled_token_ids", list(self.pooled_token_ids), allowed)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _check_int(name: str, value: Any, low: int, high: int, *, is_optional: bool = False) -> None:
    if value is None and is_optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _refuse(name, value, f"allowed are whole numbers {low}..{high}" + (" or none" if is_optional else ""))


def _check_float(name: str, value: Any, low: float, high: float, *, is_open: bool = False) -> None:
    """`is_open` excludes `low` itself. NaN is in no range."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (is_open and value == low):
        raise _refuse(name, value, f"allowed are {f'above {low} up to' if is_open else f'{low} to'} {high}")


def _token_ids(name: str, values: Any, limit: int) -> tuple[int, ...]:
    ids = _sequence(name, values, limit, "token ids")
    for token in ids:
        _check_int(name, token, 0, _INT32_MAX)
    return ids


def _strings(name: str, values: Any) -> tuple[str, ...]:
    strings = (values,) if isinstance(values, str) else _sequence(name, values, MAX_STOP_STRINGS, "strings")
    for string in strings:
        if not isinstance(string, str) or not 1 <= len(string) <= MAX_STOP_LENGTH:
            raise _refuse(name, string, f"allowed are strings of 1 to {MAX_STOP_LENGTH} characters")
    return strings


def _biases(values: Any) -> dict[int, float]:
    if not isinstance(values, Mapping) or len(values) > MAX_LOGIT_BIAS:
        raise _refuse("logit_bias", values, f"allowed is a mapping of at most {MAX_LOGIT_BIAS} token ids to numbers")
    for token, bias in values.items():
        _check_int("logit_bias", token, 0, _INT32_MAX)
        _check_float("logit_bias", bias, -100, 100)
    return dict(values)


def _sequence(name: str, values: Any, limit: int, what: str) -> tuple[Any, ...]:
    """A tuple of at most `limit` values; a longer iterable is not read to its end."""
    if isinstance(values, tuple) and not values:  # the usual case, three times a request
        return ()
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise _refuse(name, values, f"allowed is a list of {what}")
    taken = tuple(value for value, _ in zip(values, range(limit + 1), strict=False))
    if len(taken) > limit:
        raise _refuse(name, f"more than {limit} {what}", f"the limit is {limit}")
    return taken


def _refuse(name: str, value: object, allowed: str) -> RequestError:
    return RequestError(f"{name} is {_shown(value)}; {allowed}", param=name)


def _shown(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 128:  # Python refuses to print huge numbers
        return f"a number of {value.bit_length()} bits"
    shown = value if isinstance(value, str) and value.isprintable() and value else repr(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}..."
