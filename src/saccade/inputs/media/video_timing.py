"""When the frames of a video file are shown, without decoding any, and their rate."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

Shown = tuple[int | None, int]  # when a frame is shown, and how long (0: unknown), in units of a time base

MAX_LACKING = 3
MIN_FPS = 0.001  # as for frames; positions of later time steps might not fit into 32 bits


def read_times(container: Any, stream: Any, most: int) -> list[Shown]:
    """One for each packet, at most `most` + 1. A packet is usually a frame."""
    import av

    times: list[Shown] = []
    try:
        for packet in container.demux(stream):
            if packet.size and not packet.is_discard:
                times.append((packet.pts, packet.duration or 0))
            if len(times) > most:
                break
    except av.error.FFmpegError:  # the file is cut off
        pass
    return times


def find_rate(times: Sequence[Shown], stated: Fraction | None, time_base: Fraction) -> float | None:
    """Frames per second, None if unknown. A file may state a rate that its timestamps contradict, as recordings with a
    variable rate do. The timestamps count if the lengths of the video differ by more frames than the end of a cut file
    may lack."""
    length = _length(times) * time_base
    if length > 0 and (not stated or abs(length - len(times) / stated) > MAX_LACKING / stated):
        stated = len(times) / length
    return float(stated) if stated and stated >= MIN_FPS else None


def _length(times: Sequence[Shown]) -> Fraction:
    """0 if unknown. A last frame that does not say how long it is shown takes as long as the others."""
    known = [(start, duration) for start, duration in times if start is not None]
    if len(known) < max(len(times), 2):
        return Fraction(0)
    (first, _), (last, duration) = min(known), max(known)
    return Fraction(last - first + duration) if duration else Fraction((last - first) * len(known), len(known) - 1)
