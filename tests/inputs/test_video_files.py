"""From a video file to the frames, times and tokens of a prompt. The colour of a frame tells its place."""

import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from saccade.inputs.allowance import Allowance
from saccade.inputs.media import containers
from saccade.inputs.media.containers import FRAME_BYTES, decode_video
from saccade.inputs.media.images import SCRATCH_BYTES, ImageLimits
from saccade.inputs.media.sampling import Sample
from saccade.inputs.media.video_timing import Shown, read_times
from saccade.inputs.media.videos import Video
from saccade.inputs.media_settings import read_video_settings
from saccade.inputs.processor import Processor

av: Any = pytest.importorskip("av")
CHAT = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "What is it?"}]}]
LIMITS = ImageLimits()


def shade(index: int, count: int) -> npt.NDArray[np.uint8]:
    return np.full((16, 32, 3), 20 + 200 * index // count, np.uint8)


def video_file(
    times: Sequence[int],
    rate: int = 10,
    *,
    form: str = "matroska",
    codec: str = "mpeg4",
    still: int = 0,
    corner: bool = False,
) -> bytes:
    """A frame at each of the times, in units of 1 / rate. With `still`, the first stream is a picture of that size, and
    players show the second. With `corner`, the left upper corner is darker, above more than on the left."""
    file = BytesIO()
    with av.open(file, mode="w", format=form) as container:
        if still:
            picture = container.add_stream("mjpeg", rate=25)
            picture.width = picture.height = still
            picture.pix_fmt = "yuvj420p"
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        if still:
            picture.disposition, stream.disposition = av.stream.Disposition(0), av.stream.Disposition.default
            frame = av.VideoFrame.from_ndarray(np.full((still, still, 3), 255, np.uint8), format="rgb24")
            container.mux([*picture.encode(frame), *picture.encode()])
        for index, time in enumerate(times):
            pixels = shade(index, len(times)) + np.uint8(40 if corner else 0)
            pixels[: 4 * corner, : 16 * corner] = 0
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


@pytest.mark.parametrize("form", ["matroska", "mp4"])
def test_a_picture_before_the_video_is_not_the_video(form: str) -> None:
    frames, fps, _ = decode_video(video_file(range(12), form=form, still=64), LIMITS)
    assert frames.shape == (12, 16, 32, 3) and fps == 10


@pytest.mark.parametrize("count", [11, 21, 30, 33])
def test_rates_are_exact(count: int) -> None:
    """A rounding error would change times in a prompt: 0.75 s is written as 0.8, but 0.7499999 s as 0.7."""
    assert decode_video(video_file(range(count), 30, form="mp4"), LIMITS)[1] == 30
    animation = BytesIO()
    first, *rest = (Image.fromarray(shade(index, count)) for index in range(count))
    first.save(animation, "GIF", save_all=True, append_images=rest, duration=100)
    assert decode_video(animation.getvalue(), LIMITS)[1] == 10


@pytest.mark.parametrize("form", ["matroska", "mp4"])
def test_timestamps_decide_if_the_stated_rate_is_wrong(form: str) -> None:
    """20 frames in 2 s, then one a second: 25 frames until 6.1 s, or 7 s if the last takes as long as those before."""
    frames, fps, _ = decode_video(video_file([*range(20), 20, 30, 40, 50, 60], form=form), LIMITS)
    assert len(frames) == 25 and fps is not None and 25 / 7 <= fps <= 25 / 6.1


def test_a_file_that_claims_to_last_for_years_has_no_rate() -> None:
    """Its times would not fit into positions of 32 bits."""
    assert decode_video(video_file([0, 1, 2, 2**30]), LIMITS)[1] is None


def test_a_long_file_is_sampled_like_all_of_its_frames(folders: dict[str, Path]) -> None:
    """Far more frames are in the file than fit into memory; only the sampled ones count."""
    data = video_file(range(99))
    every, fps, _ = decode_video(data, LIMITS)
    expected = Processor.from_folder(folders["qwen3_vl"]).chat(CHAT, media=[Video(every, fps)])
    assert len(expected.media[0].pixels) == 20
    for limits in (ImageLimits(max_frames=20), ImageLimits(max_video_pixels=20 * 32 * 16)):
        prompt = Processor.from_folder(folders["qwen3_vl"], limits=limits).chat(CHAT, media=[data])
        assert prompt.token_ids.tolist() == expected.token_ids.tolist()
        assert np.array_equal(prompt.media[0].pixels, expected.media[0].pixels)
        assert prompt.media[0].plan == expected.media[0].plan and prompt.media[0].digest == expected.media[0].digest


def test_limits_reduce_the_frames_that_are_sampled(folders: dict[str, Path]) -> None:
    limited = Processor.from_folder(folders["qwen3_vl"], limits=ImageLimits(max_frames=7))
    plan = limited.chat(CHAT, media=[video_file(range(99))]).media[0].plan
    assert plan.frames == (0, 16, 33, 49, 65, 82, 98, 98) and plan.timestamps[-1] == pytest.approx(9.8)


@pytest.mark.parametrize("name", ["fewer", "hidden", "many"])
def test_files_with_more_or_fewer_frames_than_packets_are_sampled_to_their_end(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """VP8 has packets that only help to decode others."""
    data, settings = video_file(range(60)), read_video_settings(folders["qwen3_vl"])
    expected = decode_video(data, LIMITS, settings=settings)
    every = decode_video(data, LIMITS)

    def miscount(*args: Any) -> list[Shown]:
        times = read_times(*args)
        return {"fewer": times[:-20], "hidden": [*times, *times[::6]], "many": times * 7}[name]

    monkeypatch.setattr(containers, "read_times", miscount)
    frames, fps, sample = decode_video(data, LIMITS, settings=settings)
    assert sample == expected[2] and sample is not None and (sample.frames[-1], sample.num_frames) == (59, 60)
    assert np.array_equal(frames, expected[0]) and fps == 10
    assert decode_video(data, LIMITS)[1:] == every[1:] == (10, None)


def test_two_passes_hold_the_memory_of_one(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    data, settings = video_file(range(60)), read_video_settings(folders["qwen3_vl"])
    allowance = Allowance(hold=held.append)
    monkeypatch.setattr(containers, "read_times", lambda *_: [(100 * i, 100) for i in range(61)])
    frames, _, sample = decode_video(data, LIMITS, allowance, settings=settings)
    assert isinstance(sample, Sample) and len(frames) == 12
    assert sum(held) == (SCRATCH_BYTES + FRAME_BYTES * 12) * 32 * 16


def test_frames_before_a_broken_packet_are_not_lost_in_the_decoder() -> None:
    if "libx264" not in av.codecs_available:
        pytest.skip("needs an encoder whose decoder works ahead")
    data = bytearray(video_file(range(30), codec="libx264"))
    with av.open(BytesIO(bytes(data)), format="matroska") as container:
        packets = [(bytes(packet), packet.pts) for packet in container.demux(video=0) if packet.size]
    assert len(packets) == 30
    at = data.index(packets[15][0])
    data[at : at + len(packets[15][0])] = b"\xff" * len(packets[15][0])
    frames, _, _ = decode_video(bytes(data), LIMITS)
    before = sum(pts < packets[15][1] for _, pts in packets[:15])
    assert len(frames) >= before


UPRIGHT: dict[tuple[int, int, int, int], Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]]] = {
    (1, 0, 0, 1): lambda pixels: pixels,
    (0, 1, -1, 0): lambda pixels: np.rot90(pixels, -1),  # a phone held upright
    (-1, 0, 0, -1): lambda pixels: np.rot90(pixels, 2),
    (0, -1, 1, 0): np.rot90,
    (-1, 0, 0, 1): np.fliplr,  # a mirror
    (1, 0, 0, -1): np.flipud,
    (0, 1, 1, 0): lambda pixels: pixels.swapaxes(0, 1),
    (0, -1, -1, 0): lambda pixels: np.rot90(pixels, 2).swapaxes(0, 1),
}


@pytest.mark.parametrize("turn", UPRIGHT)
def test_frames_are_turned_and_mirrored_as_the_file_says(turn: tuple[int, int, int, int]) -> None:
    data = bytearray(video_file(range(2), form="mp4", corner=True))
    plain, _, _ = decode_video(bytes(data), LIMITS)
    struct.pack_into(
        ">9i", data, data.index(b"tkhd") + 44, *[n << 16 for n in (*turn[:2], 0, *turn[2:], 0, 0, 0)], 1 << 30
    )
    turned, _, _ = decode_video(bytes(data), LIMITS)
    assert all(np.array_equal(found, UPRIGHT[turn](frame)) for found, frame in zip(turned, plain, strict=True))
    assert len({UPRIGHT[other](plain[0]).tobytes() for other in UPRIGHT}) == 8, "no two are alike"
