"""Decodes video files and animated images: MP4, MOV, WebM, MKV and AVI with PyAV, GIF and WebP with Pillow.

The first bytes decide the format, and the demuxer is told: if it guessed, a playlist could open other files. Only
common codecs are decoded. The sizes of all frames, and the cost of the scans in a JPEG frame, are checked before a
decoder runs. Memory never holds more frames than the limits allow: of a file whose frames are sampled, the packets are
counted first and only the sampled frames kept; other long videos are thinned evenly while decoding."""

import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
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
from saccade.inputs.media.sampling import Sample, sample_frames
from saccade.inputs.media.video_timing import Shown, find_rate, read_times
from saccade.models.media import VideoSettings

MAX_DECODED_FRAMES = 100_000
FRAME_BYTES = 6  # per pixel: the frames, and the array that they are stacked into
MAX_DECODE_S = 30.0
ROUNDING = 512  # pixels by which a decoder may enlarge each side of its buffers
CODECS = frozenset({"h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mjpeg"})
_ANIMATED: dict[str, Any] = {"GIF": GifImagePlugin.GifImageFile, "WEBP": WebPImagePlugin.WebPImageFile}
_BROKEN = "the video is damaged or incomplete"


def decode_video(
    data: bytes,
    limits: ImageLimits,
    allowance: Allowance = ANYTHING,
    new: NewPixels = new_pixels,
    settings: VideoSettings | None = None,
) -> tuple[Any, float | None, Sample | None]:
    """The frames (an array made by `new`, or a list with the file of a still image) and their rate, None if unknown.
    With a sample, only those frames, and the rate of all of them."""
    header = read_header(data)
    demuxer = _demuxer(data)
    if header is None and demuxer is None:
        message = "the video format is not known; MP4, MOV, WebM, MKV, AVI, GIF and WebP are accepted"
        raise RequestError(message, code="video_unsupported")
    if header is not None and header.format not in _ANIMATED:
        return [data], None, None
    kept = _Kept(limits, monotonic() + MAX_DECODE_S, allowance)
    try:
        if header is not None:
            _read_animation(data, header, kept)
        elif demuxer is not None:
            _read_container(data, demuxer, kept, settings)
        return kept.result(new)
    except (SaccadeError, StopWorkError):
        raise
    except Exception as error:  # decoders raise many types; their messages must not reach a client
        if type(error) is MemoryError:  # says nothing about the file; FFmpeg's subclass does
            raise
        raise invalid_video(_BROKEN) from None


@dataclass(slots=True)
class _Kept:
    """Keeps the wanted frames. If none are named, every frame at first, then every second, fourth and so on as soon as
    there are too many. Holds memory for the largest number of frames kept at the same time."""

    limits: ImageLimits
    deadline: float
    allowance: Allowance
    frames: list[Pixels] = field(default_factory=list)
    wanted: frozenset[int] | None = None
    fps: float | None = None
    num_seen: int = 0
    num_held: int = 0
    step: int = 1

    def wants_next(self, height: int, width: int) -> bool:
        """Called before a frame is converted. If True, the caller must append the frame to `frames`."""
        if self.num_seen >= MAX_DECODED_FRAMES or monotonic() > self.deadline:
            raise _too_long()
        index = self.num_seen
        self.num_seen += 1
        self.allowance.check_cancelled()
        if index % self.step or (self.wanted is not None and index not in self.wanted):
            return False
        if len(self.frames) >= self.most(height, width):
            if self.wanted is not None:  # they were counted for the size that the file states
                raise invalid_video("all frames of a video must have the same size")
            self.frames = self.frames[::2]
            self.step *= 2
        is_wanted = index % self.step == 0
        if is_wanted and len(self.frames) == self.num_held:
            self.allowance.hold(FRAME_BYTES * height * width)
            self.num_held += 1
        return is_wanted

    def most(self, height: int, width: int) -> int:
        """The largest number of frames of a size."""
        found = min(self.limits.max_frames, self.limits.max_video_pixels // (height * width))
        if found < 1:
            problem, limit = f"the video has frames of {width}x{height} pixels", self.limits.max_video_pixels
            raise RequestError(f"{problem}; the limit is {limit} pixels in all", code="video_too_large", status=413)
        return found

    def choose(self, num_frames: int, most: int, settings: VideoSettings | None) -> None:
        """Begins again, with the frames that `settings` sample from this many."""
        self.num_seen, self.frames = 0, []
        if settings is not None and settings.is_sampled and self.fps is not None and num_frames:
            capped = replace(settings, max_frames=min(settings.max_frames, most))
            self.wanted = frozenset(sample_frames(num_frames, self.fps, capped))

    def begin(self, height: int, width: int) -> None:
        """Called before a decoder runs, with a size that no frame may exceed."""
        check_size(height, width, self.limits)
        self.allowance.hold(SCRATCH_BYTES * height * width)

    def result(self, new: NewPixels) -> tuple[Any, float | None, Sample | None]:
        if not self.frames or any(frame.shape != self.frames[0].shape for frame in self.frames):
            raise invalid_video(_BROKEN)
        pixels = np.stack(self.frames, out=new((len(self.frames), *self.frames[0].shape)))
        if self.wanted is None:
            return pixels, None if self.fps is None else self.fps / self.step, None
        indices = sorted(index for index in self.wanted if index < self.num_seen)
        return pixels, self.fps, Sample(tuple(indices), self.num_seen)


def _read_animation(data: bytes, header: Header, kept: _Kept) -> None:
    found = measure_animation(data, header.height, header.width)
    kept.begin(found.height, found.width)
    image = _ANIMATED[header.format](BytesIO(data))
    milliseconds = 0.0
    for index in range(MAX_DECODED_FRAMES + 1):
        try:
            image.seek(index)
            if image.height > found.height or image.width > found.width:
                raise invalid_video(_BROKEN)
            wants = kept.wants_next(image.height, image.width)
            image.load()  # Pillow knows the duration of a WebP frame only after this
        except EOFError:
            break
        milliseconds += max(float(image.info.get("duration") or 100), 10)
        if wants:
            kept.frames.append(load_image(image.copy(), kept.limits))
    kept.fps = 1000 * kept.num_seen / milliseconds if kept.num_seen else None


def _read_container(data: bytes, demuxer: str, kept: _Kept, settings: VideoSettings | None) -> None:
    """A file that has fewer or more frames than packets, such as a damaged one, is decoded again to sample those."""
    try:
        import av
    except ImportError:
        fix = "pip install 'saccade-vlm[video]'"
        message = f"this server cannot read video files ({fix}); send frames as data:video/jpeg"
        raise RequestError(message, code="video_unsupported") from None
    with av.open(BytesIO(data), mode="r", format=demuxer) as container:
        stream = _video_stream(container)
        height, width = stream.codec_context.height, stream.codec_context.width
        kept.begin(height, width)
        most = kept.most(height, width)
        stated, time_base = stream.average_rate, stream.time_base
        times = read_times(container, stream, MAX_DECODED_FRAMES)
    if len(times) > MAX_DECODED_FRAMES:
        raise _too_long()
    for _ in range(2):
        kept.fps = find_rate(times, stated, time_base)
        kept.choose(len(times), most, settings)
        with av.open(BytesIO(data), mode="r", format=demuxer) as container:
            decoded = _decode(container, _video_stream(container), kept)
        if len(decoded) == len(times):
            return
        times = decoded
        if kept.wanted is None:
            kept.fps = find_rate(times, stated, time_base)
            return


def _video_stream(container: Any) -> Any:
    """The stream that players show: not a cover picture, and the largest if nothing else decides."""
    stream = container.streams.best("video")
    if stream is None:
        raise invalid_video("the file has no video in it")
    if stream.codec_context.codec.canonical_name not in CODECS:
        message = f"the video's codec is not accepted; allowed: {', '.join(sorted(CODECS))}"
        raise RequestError(message, code="video_unsupported")
    return stream


def _decode(container: Any, stream: Any, kept: _Kept) -> list[Shown]:
    """When the frames are shown; the wanted ones are kept."""
    context = stream.codec_context
    context.thread_count = 2
    times: list[Shown] = []
    # With this limit FFmpeg allocates nothing for a larger frame anywhere in the stream.
    context.options = {"max_pixels": str((context.height + ROUNDING) * (context.width + ROUNDING))}
    for frame in _frames(container, stream):
        check_size(frame.height, frame.width, kept.limits)
        times.append((frame.pts, frame.duration or 0))
        if kept.wants_next(frame.height, frame.width):
            kept.frames.append(_upright(frame.to_ndarray(format="rgb24"), frame))
    return times


def _upright(pixels: Pixels, frame: Any) -> Pixels:
    """A view turned by quarters and mirrored as the file says: its matrix takes (x, y) to (ax + cy, bx + dy)."""
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return pixels
    a, b, _, c, d = struct.unpack_from("=5i", bytes(matrix))
    if abs(b) > abs(a):
        pixels, a, d = pixels.swapaxes(0, 1), c, b
    return pixels[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]


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
        with suppress(av.error.FFmpegError):
            yield from stream.decode(None)  # what the decoder still holds


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


def _too_long() -> RequestError:
    message = "the video takes too long to decode; send a shorter one, or frames"
    return RequestError(message, code="video_too_long", status=413)


def invalid_video(message: str) -> RequestError:
    return RequestError(message, code="video_invalid")
