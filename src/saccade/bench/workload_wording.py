"""One request as bytes, in the words of the server that is asked."""

from dataclasses import dataclass
from typing import Any

import orjson

from saccade.bench.serving_settings import COMPLETIONS, GENERATE, TargetSettings, WorkloadSettings
from saccade.bench.workload_sizes import Size

Part = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: what it says, and what is known of it before an answer comes."""

    body: bytes
    max_tokens: int
    text_tokens: int | None = None
    sizes: tuple[Size, ...] = ()
    image_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Wording:
    """How a server wants to be asked: the kind of its endpoint, and fields that every request has."""

    kind: str
    model: str
    is_streamed: bool
    ignore_eos: bool
    extra: dict[str, Any]

    @classmethod
    def of(cls, target: TargetSettings, workload: WorkloadSettings, model: str) -> "Wording":
        return cls(target.kind, model, not target.disable_stream, workload.ignore_eos, target.extra_fields())

    def body(self, content: str | list[Part], max_tokens: int, messages: list[Part] | None = None) -> bytes:
        if self.kind == GENERATE:
            sampling = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": self.ignore_eos}
            return orjson.dumps(
                {"text": content, "sampling_params": sampling, "stream": self.is_streamed, **self.extra}
            )
        fields: dict[str, Any] = {"model": self.model, "temperature": 0, "stream": self.is_streamed}
        if self.is_streamed:
            fields["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.kind == COMPLETIONS:
            fields |= {"prompt": content, "max_tokens": max_tokens}
        else:
            turns = messages if messages is not None else [{"role": "user", "content": content}]
            fields |= {"messages": turns, "max_completion_tokens": max_tokens}
        return orjson.dumps(fields | self.extra)
