"""Decodes video files and animated images: MP4, MOV, WebM, MKV and AVI with PyAV, GIF and WebP with Pillow.

The first bytes decide the format, and the demuxer is told: if it guessed, a playlist could open other files. Only
common codecs are decoded. The sizes of all frames, and the cost of the scans in a JPEG frame, are checked before a
decoder runs. Long videos are thinned evenly while decoding, so that memory never holds more frames than the limits
allow."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO
from time import monotonic
from typing import Any

import numpy as np
from PIL import GifImagePlugin, WebPImagePlugin

from saccade.errors import RequestError, SaccadeError
from saccade.inputs.allowance import ANYTHING, Allowance, StopWorkError
from saccade.inputs.media.animations import measure_animation
from saccade.inputs.media.headers import Header, read_header
from saccade.inputs.media.images import (
    SCRATCH_BYTES,
    ImageLimits,
    NewPixels,
    Pixels,
    check_size,
    load_image,
    new_pixels,
)
from saccade.inputs.media.jpeg import count_visits, read_frame

MAX_DECODED_FRAMES = 100_000
FRAME_BYTES = 6  # per pixel: the frames, and the array that they are stacked into
MAX_DECODE_S = 30.0
ROUNDING = 512  # pixels by which a decoder may enlarge each side of its buffers
CODECS = frozenset({"h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mjpeg"})
_ANIMATED: dict[str, Any] = {"GIF": GifImagePlugin.GifImageFile, "WEBP": WebPImagePlugin.WebPImageFile}
_BROKEN = "the video is damaged or incomplete"


def decode_video(
    data: bytes, limits: ImageLimits, allowance: Allowance = ANYTHING, new: NewPixels = new_pixels
) -> tuple[Any, float | None]:
    """The frames (an array made by `new`, or a list with the file of a still image) and their rate, None if unknown."""
    header = read_header(data)
    demuxer = _demuxer(data)
    if header is None and demuxer is None:
        message = "the video format is not known; MP4, MOV, WebM, MKV, AVI, GIF and WebP are accepted"
        raise RequestError(message, code="video_unsupported")
    if header is not None and header.format not in _ANIMATED:
        return [data], None
    thinned = _Thinned(limits, monotonic() + MAX_DECODE_S, allowance)
    try:
        if header is not None:
            _read_animation(data, header, thinned)
        elif demuxer is not None:
            _read_container(data, demuxer, thinned)
        return thinned.result(new)
    except (SaccadeError, StopWorkError):
        raise
    except Exception as error:  # decoders raise many types; their messages must not reach a client
        if type(error) is MemoryError:  # says nothing about the file; FFmpeg's subclass does
            raise
        raise invalid_video(_BROKEN) from None


@dataclass(slots=True)
class _Thinned:
    """Keeps every frame at first, then every second, fourth and so on as soon as there are too many. Holds memory for
    the largest number of frames kept at the same time."""

    limits: ImageLimits
    deadline: float
    allowance: Allowance
    frames: list[Pixels] = field(default_factory=list)
    seconds: float = 0.0
    num_seen: int = 0
    num_held: int = 0
    step: int = 1

    def wants_next(self, height: int, width: int) -> bool:
        """Called before a frame is converted. If True, the caller must append the frame to `frames`."""
        if self.num_seen >= MAX_DECODED_FRAMES or monotonic() > self.deadline:
            message = "the video takes too long to decode; send a shorter one, or frames"
            raise RequestError(message, code="video_too_long", status=413)
        self.num_seen += 1
        self.allowance.check_cancelled()
        if (self.num_seen - 1) % self.step:
            return False
        most = min(self.limits.max_frames, self.limits.max_video_pixels // (height * width))
        if most < 1:
            problem, limit = f"the video has frames of {width}x{height} pixels", self.limits.max_video_pixels
            raise RequestError(f"{problem}; the limit is {limit} pixels in all", code="video_too_large", status=413)
        if len(self.frames) >= most:
            self.frames = self.frames[::2]
            self.step *= 2
        is_wanted = (self.num_seen - 1) % self.step == 0
        if is_wanted and len(self.frames) == self.num_held:
            self.allowance.hold(FRAME_BYTES * height * width)
            self.num_held += 1
        return is_wanted

    def begin(self, height: int, width: int) -> None:
        """Called before a decoder runs, with a size that no frame may exceed."""
        check_size(height, width, self.limits)
        self.allowance.hold(SCRATCH_BYTES * height * width)

    def result(self, new: NewPixels) -> tuple[Any, float | None]:
        if not self.frames or any(frame.shape != self.frames[0].shape for frame in self.frames):
            raise invalid_video(_BROKEN)
        rate = self.num_seen / self.seconds / self.step if self.seconds > 0 else math.nan
        pixels = new((len(self.frames), *self.frames[0].shape))
        return np.stack(self.frames, out=pixels), rate if math.isfinite(rate) else None


def _read_animation(data: bytes, header: Header, thinned: _Thinned) -> None:
    found = measure_animation(data, header.height, header.width)
    thinned.begin(found.height, found.width)
    image = _ANIMATED[header.format](BytesIO(data))
    for index in range(MAX_DECODED_FRAMES + 1):
        try:
            image.seek(index)
            if image.height > found.height or image.width > found.width:
                raise invalid_video(_BROKEN)
            wants = thinned.wants_next(image.height, image.width)
            image.load()  # Pillow knows the duration of a WebP frame only after this
        except EOFError:
            return
        thinned.seconds += max(float(image.info.get("duration") or 100), 10) / 1000
        if wants:
            thinned.frames.append(load_image(image.copy(), thinned.limits))


def _read_container(data: bytes, demuxer: str, thinned: _Thinned) -> None:
    try:
        import av
    except ImportError:
        fix = "pip install 'saccade-vlm[video]'"
        message = f"this server cannot read video files ({fix}); send frames as data:video/jpeg"
        raise RequestError(message, code="video_unsupported") from None
    with av.open(BytesIO(data), mode="r", format=demuxer) as container:
        if not container.streams.video:
            raise invalid_video("the file has no video in it")
        stream = container.streams.video[0]
        if stream.codec_context.codec.canonical_name not in CODECS:
            message = f"the video's codec is not accepted; allowed: {', '.join(sorted(CODECS))}"
            raise RequestError(message, code="video_unsupported")
        height, width = stream.codec_context.height, stream.codec_context.width
        thinned.begin(height, width)
        stream.codec_context.thread_count = 2
        # With this limit FFmpeg allocates nothing for a larger frame anywhere in the stream.
        stream.codec_context.options = {"max_pixels": str((height + ROUNDING) * (width + ROUNDING))}
        rate = float(stream.average_rate or 0)
        for frame in _frames(container, stream):
            check_size(frame.height, frame.width, thinned.limits)
            if thinned.wants_next(frame.height, frame.width):
                pixels = frame.to_ndarray(format="rgb24")
                thinned.frames.append(np.rot90(pixels, round(frame.rotation / 90)) if frame.rotation else pixels)
        thinned.seconds = thinned.num_seen / rate if rate > 0 else 0.0


def _frames(container: Any, stream: Any) -> Iterator[Any]:
    """A truncated video yields the frames before the cut."""
    import av

    seen, is_jpeg = False, stream.codec_context.codec.canonical_name == "mjpeg"
    size = (stream.codec_context.height, stream.codec_context.width)
    try:
        for packet in container.demux(stream):
            if is_jpeg and packet.size:
                _check_jpeg(bytes(packet), size)
            for frame in packet.decode():
                yield frame
                seen = True
    except av.error.FFmpegError:
        if not seen:
            raise


def _check_jpeg(data: bytes, size: tuple[int, int]) -> None:
    """A Motion JPEG frame may be no larger than the video; interlaced frames have half its height."""
    found = read_frame(data)
    if found is not None and (found.height > size[0] or found.width > size[1]):
        raise invalid_video("all frames of a video must have the same size")
    count_visits(data)


def _demuxer(data: bytes) -> str | None:
    if data[4:8] == b"ftyp":
        return "mp4"
    if data.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    if data.startswith(b"RIFF") and data[8:12] == b"AVI ":
        return "avi"
    return None


def invalid_video(message: str) -> RequestError:
    return RequestError(message, code="video_invalid")
