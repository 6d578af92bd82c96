"""Messages between the engine's process and its client. A message is a frame of msgpack; in an `Add`, a frame of pixels
follows for every image and video. Serial numbers are never reused, so a late update of an ended request cannot be
mistaken for another's."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field, msgpack

from saccade.inputs.placeholders import Media, Prompt
from saccade.inputs.plans import MediaPlan
from saccade.inputs.positions import FeatureRows, Ints
from saccade.inputs.text.chat_messages import MediaKind
from saccade.wire.engine_metrics import JobStats, SchedulerStats, new_step_tokens
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings
from saccade.wire.histogram import Histogram
from saccade.wire.passes import PassRecord
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.tensor_parallel import ONE_RANK, TensorParallel
from saccade.wire.trace_records import EngineTrace
from saccade.wire.turn import Turn
from saccade.wire.update import Update

Buffers = Sequence[memoryview]
PromptArrays = Sequence[npt.NDArray[Any]]


class MediaHead(Struct, frozen=True, array_like=True):
    """An image or video without its pixels."""

    kind: MediaKind
    shape: tuple[int, ...]
    digest: bytes
    plan: MediaPlan


class PromptHead(Struct, frozen=True, array_like=True):
    """A prompt without its pixels. Token ids, positions and limits are the bytes of int32 arrays."""

    token_ids: bytes
    positions: bytes
    limits: bytes | None
    rope_delta: int
    media: tuple[MediaHead, ...]
    spans: tuple[FeatureRows, ...]


class StartEngine(Struct, frozen=True, tag=True):
    folder: str
    settings: EngineSettings
    limits: SchedulerSettings
    compares_ranks: bool = True  # refuses to start if ranks get different results


class Numbered(Struct, frozen=True):
    """`serial` tells which request or question a message is about."""

    serial: int


class Add(Numbered, frozen=True, tag=True):
    """`deadline` is a monotonic time; all processes of a machine share that clock."""

    prompt: PromptHead
    params: SamplingParams
    turn: Turn
    deadline: float | None
    cache_salt: str | None


class Abort(Numbered, frozen=True, tag=True):
    """End a request with all of its outputs."""


class Stop(Numbered, frozen=True, tag=True):
    index: int
    stop: str


class AskStats(Numbered, frozen=True, tag=True):
    """With `passes_since`, also asks for the passes with a greater number."""

    passes_since: int | None = None


class Flush(Numbered, frozen=True, tag=True):
    """Empty the prompt and image caches, unless requests are running or waiting."""


class BeginTrace(Numbered, frozen=True, tag=True):
    """Record what the engine does until `EndTrace`, for at most `limit_s`."""

    limit_s: float


class EndTrace(Numbered, frozen=True, tag=True):
    """Answered with what was recorded."""


class StartProfile(Numbered, frozen=True, tag=True):
    """Profile the engine's process until `StopProfile`, for at most `limit_s`. The file goes into `folder`."""

    folder: str
    limit_s: float


class StopProfile(Numbered, frozen=True, tag=True):
    """Answered with the profile's file."""


class Close(Struct, frozen=True, tag=True):
    """End all requests, then exit."""


EngineQuestion = AskStats | Flush | BeginTrace | EndTrace | StartProfile | StopProfile
EngineCommand = StartEngine | Add | Abort | Stop | EngineQuestion | Close


class Stage(Struct, frozen=True, tag=True):
    """Progress of the start. A stage with `total` 0 is not counted."""

    name: str
    done: int = 0
    total: int = 0
    detail: str = ""


class Ready(Struct, frozen=True, tag=True):
    """Facts found at the start. `limits` are the requested ones, lowered to what the model allows."""

    limits: SchedulerSettings
    kv_cache_tokens: int
    block_size: int
    gpu_bytes: int = 0  # in use on the whole device, by all processes; 0 without a GPU
    ranks: TensorParallel = ONE_RANK
    has_head: bool = True  # without one it only makes embeddings


class News(Update, frozen=True, array_like=True, kw_only=True):
    serial: int
    index: int
    num_cached_tokens: int = 0


class Updates(Struct, frozen=True, tag=True):
    news: list[News]


class Refused(Numbered, frozen=True, tag=True):
    kind: Literal["request", "capacity", "internal"]
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float = 0.0


class StatsReply(Numbered, frozen=True, tag=True):
    scheduler: SchedulerStats
    phases: dict[str, dict[str, Any]]
    gpu_bytes: int = 0
    gpu_reserved_bytes: int = 0  # held by the allocator of this process
    compile_wait_s: float = 0.0  # how long the oldest request has waited for its grammar
    grammar_jobs: JobStats = JobStats()
    step_tokens: Histogram = field(default_factory=new_step_tokens)
    passes: list[PassRecord] = []


class Flushed(Numbered, frozen=True, tag=True):
    is_done: bool


class Traced(Numbered, frozen=True, tag=True):
    """Answers `BeginTrace` without a trace, and `EndTrace` with the one recorded, if any."""

    trace: EngineTrace | None = None


class Profiled(Numbered, frozen=True, tag=True):
    """A profile was started, or written to `file`. If that failed, `problem` says why."""

    file: str = ""
    problem: str = ""


class Degraded(Struct, frozen=True, tag=True):
    """Something is wrong, but the engine keeps running. Anybody may see `reason`; `note` is for the log."""

    reason: str
    note: str


class Failure(Struct, frozen=True, tag=True):
    """The last message of an engine that cannot continue."""

    message: str
    is_config: bool = False
    is_rank_gone: bool = False


class Closed(Struct, frozen=True, tag=True):
    """The last message of an engine that was told to close. Every request has already ended."""


OnStage = Callable[[Stage], None]
EngineAnswer = StatsReply | Flushed | Traced | Profiled
EngineReply = Stage | Ready | Updates | Refused | EngineAnswer | Degraded | Failure | Closed


def describe_array(value: Any) -> Any:
    array = np.asarray(value)
    return array.dtype.str, array.shape, array.tobytes()


def restore_array(kind: Any, described: Any) -> npt.NDArray[Any]:
    dtype, shape, data = described
    return np.frombuffer(data, dtype=dtype).reshape(shape)


encode = msgpack.Encoder(enc_hook=describe_array).encode
decode_command = msgpack.Decoder(EngineCommand).decode
decode_reply = msgpack.Decoder(EngineReply, dec_hook=restore_array).decode


def pack_prompt(prompt: Prompt) -> tuple[PromptHead, PromptArrays]:
    """The head, and the pixels. Contiguous pixels are not copied, so nobody may write to them."""
    head = PromptHead(
        _bytes(prompt.token_ids),
        _bytes(prompt.positions_3T),
        None if prompt.limits_T is None else _bytes(prompt.limits_T),
        prompt.rope_delta,
        tuple(map(_head, prompt.media)),
        prompt.spans,
    )
    return head, [np.ascontiguousarray(media.pixels, dtype=np.uint8) for media in prompt.media]


def unpack_prompt(head: PromptHead, frames: Buffers) -> Prompt:
    """Pixels stay in the received frames; they are not copied."""
    assert len(frames) == len(head.media), f"{len(frames)} frames for {len(head.media)} images and videos"
    token_ids = _ints(head.token_ids)
    return Prompt(
        token_ids=token_ids,
        positions_3T=_ints(head.positions).reshape(3, len(token_ids)),
        rope_delta=head.rope_delta,
        limits_T=None if head.limits is None else _ints(head.limits),
        media=tuple(map(_media, head.media, frames)),
        spans=head.spans,
    )


def _head(media: Media) -> MediaHead:
    return MediaHead(media.kind, media.pixels.shape, media.digest, media.plan)


def _media(head: MediaHead, frame: memoryview) -> Media:
    return Media(head.kind, np.frombuffer(frame, dtype=np.uint8).reshape(head.shape), head.plan, head.digest)


def _bytes(array: Ints) -> bytes:
    return array.astype(np.int32, copy=False).tobytes()


def _ints(data: bytes) -> Ints:
    return np.frombuffer(data, dtype=np.int32)
