"""The reply to one request and its times, from which every figure of the benchmark is computed."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import orjson

SPOKEN = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal", "text")
BAD_ENDS = ("abort", "error")
MAX_MESSAGE_CHARS = 200


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one request. `sent_s` counts from the start of the clock, all other times from `sent_s`. One entry
    of `token_times_s` may cover several tokens. A failed request has an `error` (its kind); its times are not used."""

    index: int
    sent_s: float
    ttft_s: float = 0.0
    e2el_s: float = 0.0
    token_times_s: tuple[float, ...] = ()
    output_tokens: int = 0
    prompt_tokens: int | None = None
    image_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    text: str = ""
    timings: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    message: str = ""

    @property
    def is_ok(self) -> bool:
        return self.error is None

    @property
    def itls_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.token_times_s)]

    @property
    def tpot_s(self) -> float | None:
        """Time per token after the first; None if there is only one."""
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


class ReplyReader:
    """Reads one reply: server-sent events as they arrive, or a JSON body once it is complete."""

    def __init__(self) -> None:
        self.sent_at = 0.0
        self.status = 0
        self.arrived_at = 0.0
        self.data = b""  # received but not yet parsed
        self._is_events = False
        self._is_done = False
        self._times: list[float] = []
        self._ended_at = 0.0
        self._texts: list[str] = []
        self._finish: str | None = None
        self._usage: dict[str, Any] = {}
        self._timings: dict[str, float] = {}
        self._error: tuple[str, str] | None = None

    def sent(self, now: float) -> None:
        self.sent_at = self.sent_at or now  # keeps the time of the first attempt

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        self._is_events = headers.get("content-type", "").startswith("text/event-stream")

    def body(self, data: bytes, now: float) -> None:
        self.arrived_at = now
        self.data += data
        if not self._is_events:
            return
        *lines, self.data = self.data.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def outcome(self, index: int, clock_at: float, failure: tuple[str, str] | None = None) -> Outcome:
        """`failure` is a kind and a message, for an exchange that was cut short, for example by a timeout."""
        if failure is None and not self._is_events:
            self._whole()
        failed = failure or self._failure()
        kind, message = failed or (None, "")
        details = self._usage.get("prompt_tokens_details") or {}
        images = details.get("image_tokens")
        times = tuple(time - self.sent_at for time in self._times)
        return Outcome(
            index=index,
            sent_s=self.sent_at - clock_at if self.sent_at else 0.0,
            ttft_s=times[0] if times else 0.0,
            e2el_s=self._ended_at - self.sent_at if self._times else 0.0,
            token_times_s=times,
            output_tokens=int(self._usage.get("completion_tokens", len(times))),
            prompt_tokens=self._usage.get("prompt_tokens"),
            image_tokens=images if images is not None else details.get("multimodal_tokens"),
            cached_tokens=details.get("cached_tokens", self._usage.get("cached_tokens")),
            finish_reason=self._finish,
            text="".join(self._texts),
            timings=self._timings,
            error=kind,
            message=message[:MAX_MESSAGE_CHARS],
        )

    def lost(self) -> str:
        if not self.sent_at:
            return "cannot connect"
        return "disconnected in the reply" if self.status else "disconnected before a reply"

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._is_done = True
            return
        try:
            self._read(orjson.loads(data), now)
        except (ValueError, TypeError, AttributeError, LookupError):
            self._error = self._error or ("unreadable reply", data.decode("utf-8", "replace"))

    def _whole(self) -> None:
        """A reply that is one JSON body: all its tokens arrive with the last byte."""
        if self.status != 200:
            return
        self._event(self.data, self.arrived_at)
        self._is_done = self._error is None

    def _read(self, reply: dict[str, Any], now: float) -> None:
        if reply.get("error"):
            self._error = _told(reply, "error in the stream")
            return
        if isinstance(reply.get("timings"), dict):
            self._timings = _seconds(reply["timings"])
        if reply.get("usage"):
            self._usage = reply["usage"]
        if "meta_info" in reply:
            self._native(reply, now)
        elif reply.get("choices"):
            self._choice(reply["choices"][0], now)

    def _choice(self, choice: dict[str, Any], now: float) -> None:
        said = choice.get("delta") or choice.get("message") or {"text": choice.get("text")}
        finish = choice.get("finish_reason")
        spoken = any(said.get(name) for name in SPOKEN)
        # an empty piece is a token without text of its own; the first delta only carries the role
        is_silent_token = "role" not in said and not finish and said.get("content", said.get("text")) is not None
        if spoken or is_silent_token or (finish and not self._times):
            self._times.append(now)
        self._texts.append(said.get("content") or said.get("text") or "")
        self._finish = finish or self._finish
        self._ended_at = now

    def _native(self, reply: dict[str, Any], now: float) -> None:
        """SGLang's native endpoint: the text so far, and counts."""
        told = reply["meta_info"]
        if told.get("completion_tokens", 0) > self._usage.get("completion_tokens", 0) or not self._times:
            self._times.append(now)
        self._usage = told
        self._texts = [reply.get("text") or ""]
        finish = told.get("finish_reason")
        self._finish = (finish.get("type") if isinstance(finish, dict) else finish) or self._finish
        self._ended_at = now

    def _failure(self) -> tuple[str, str] | None:
        if self.status != 200:
            return self._refusal()
        if self._error is not None:
            return self._error
        if not self._is_done and self._finish is None:
            return "incomplete reply", "the stream ended without its final event"
        if self._finish in BAD_ENDS:
            return f"finish reason {self._finish}", ""
        if not self._times:
            return "empty reply", "the reply has no tokens and no finish reason"
        return None

    def _refusal(self) -> tuple[str, str]:
        try:
            return _told(orjson.loads(self.data), f"HTTP {self.status}")
        except (ValueError, AttributeError):
            return f"HTTP {self.status}", self.data.decode("utf-8", "replace")


def _told(reply: dict[str, Any], kind: str) -> tuple[str, str]:
    """Kind (with the error's code) and message of an error: nested as in OpenAI's API, or flat."""
    error = reply.get("error") or reply
    if not isinstance(error, dict):
        return kind, str(error)
    code = error.get("code") or error.get("type")
    named = f"{kind} {code}" if isinstance(code, str) and code else kind
    return named, str(error.get("message", ""))


def _seconds(timings: dict[str, Any]) -> dict[str, float]:
    """Converts times by stage to seconds; names that end in _ms are in milliseconds."""
    numbers = {name: value for name, value in timings.items() if isinstance(value, int | float)}
    return {
        name.removesuffix("_ms"): value / 1e3 if name.endswith("_ms") else float(value)
        for name, value in numbers.items()
    }
