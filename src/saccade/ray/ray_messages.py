"""Messages between a front end and an engine through Ray: msgpack bytes and arrays."""

from dataclasses import replace
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from saccade.client.stream import Delta
from saccade.errors import CapacityError, EngineDeadError, RequestError, SaccadeError
from saccade.inputs.placeholders import Prompt
from saccade.wire import messages
from saccade.wire.messages import PromptArrays
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.turn import Terms


class Route(NamedTuple):
    """What the router needs to know about a request, sent along with it as a plain tuple."""

    key: bytes
    tokens: int
    sender: str = ""  # the front end
    avoid: tuple[str, ...] = ()


class Question(Struct, frozen=True, array_like=True):
    """A request without its arrays. `seconds` is the time left until the deadline of its terms, as machines' clocks
    differ."""

    request_id: str
    prompt: messages.PromptHead
    params: SamplingParams
    terms: Terms
    seconds: float | None
    is_continued: bool


class Ended(Struct, frozen=True, array_like=True):
    """Why and by which replica a request was refused or lost."""

    kind: Literal["request", "capacity", "dead", "internal"]
    message: str
    replica: str
    param: str | None = None
    code: str | None = None
    status: int = 400
    retry_after_s: float = 0.0


class ReplicaReply(Struct, frozen=True, array_like=True):
    """Exactly one field is set."""

    delta: Delta | None = None
    ended: Ended | None = None


encode = msgspec.msgpack.Encoder(enc_hook=messages.describe_array).encode
decode_question = msgspec.msgpack.Decoder(Question).decode
decode_reply = msgspec.msgpack.Decoder(ReplicaReply, dec_hook=messages.restore_array).decode


def flat(arrays: PromptArrays) -> PromptArrays:
    """The arrays as bytes; Ray puts large ones into shared memory."""
    return [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]


def prompt_of(question: Question, arrays: PromptArrays) -> Prompt:
    prompt = messages.unpack_prompt(question.prompt, [array.data for array in arrays])
    return replace(prompt, is_continued=question.is_continued)


def ended(error: Exception, replica: str) -> Ended:
    match error:
        case RequestError():
            return Ended("request", str(error), replica, error.param, error.code, error.status)
        case CapacityError():
            return Ended("capacity", str(error), replica, retry_after_s=error.retry_after_s)
        case EngineDeadError():
            return Ended("dead", str(error), replica)
        case _:
            return Ended("internal", f"the engine could not accept the request: {type(error).__name__}", replica)


def error_of(said: Ended) -> SaccadeError:
    if said.kind == "request":
        return RequestError(said.message, param=said.param, code=said.code, status=said.status)
    if said.kind == "capacity":
        return CapacityError(said.message, retry_after_s=said.retry_after_s)
    return EngineDeadError(said.message) if said.kind == "dead" else SaccadeError(said.message)
