"""Counts the frames of a video file and finds their rate, without decoding any."""

from fractions import Fraction
from typing import Any

MAX_LACKING = 3
MIN_FPS = 0.001  # as for frames; positions of later time steps might not fit into 32 bits


def read_timing(container: Any, stream: Any, most: int) -> tuple[int, float | None]:
    """The number of frames, counted up to `most` + 1, and the frames per second, None if unknown. A file may state a
    rate that its timestamps contradict, as recordings with a variable rate do. The timestamps count if the lengths of
    the video differ by more frames than the end of a cut file may lack."""
    import av

    num_frames, shown = 0, list[tuple[int, int]]()  # when each frame is shown, and how long
    try:
        for packet in container.demux(stream):
            if not packet.size or packet.is_discard:
                continue
            num_frames += 1
            if packet.pts is not None:
                shown.append((packet.pts, packet.duration or 0))
            if num_frames > most:
                break
    except av.error.FFmpegError:  # the file is cut off
        pass
    stated: Fraction | None = stream.average_rate
    length = _length(shown) * stream.time_base if len(shown) == num_frames else Fraction(0)
    if length > 0 and (not stated or abs(length - num_frames / stated) > MAX_LACKING / stated):
        stated = num_frames / length
    return num_frames, float(stated) if stated and stated >= MIN_FPS else None


def _length(shown: list[tuple[int, int]]) -> Fraction:
    """In units of the time base; a last frame that does not say how long it is shown takes as long as the others."""
    if len(shown) < 2:
        return Fraction(0)
    (first, _), (last, duration) = min(shown), max(shown)
    return Fraction(last - first + duration) if duration else Fraction((last - first) * len(shown), len(shown) - 1)
