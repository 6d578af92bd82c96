"""Animations and video files that are refused before or during decoding."""

import struct
from fractions import Fraction
from io import BytesIO
from typing import Any

import numpy as np
import pytest

from saccade.errors import RequestError
from saccade.inputs.allowance import Allowance
from saccade.inputs.media import animations, containers
from saccade.inputs.media.animations import Animation, measure_animation
from saccade.inputs.media.containers import decode_video
from saccade.inputs.media.images import SCRATCH_BYTES, ImageLimits
from tests.inputs.hostile_files import growing_gif, motion_jpeg, picture

LIMITS = ImageLimits()


def refusal(data: bytes, limits: ImageLimits = LIMITS) -> RequestError:
    with pytest.raises(RequestError) as refused:
        decode_video(data, limits)
    return refused.value


def moving_webp(width: int, height: int, chunks: list[tuple[bytes, bytes]]) -> bytes:
    """A canvas followed by the given chunks."""
    canvas = b"\x02\0\0\0" + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    parts = [name + struct.pack("<I", len(body)) + body + bytes(len(body) % 2) for name, body in chunks]
    body = b"WEBPVP8X" + struct.pack("<I", 10) + canvas + b"".join(parts)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def test_webp_frames_are_counted_among_other_chunks() -> None:
    chunks = [(b"ANIM", bytes(6)), (b"ANMF", bytes(25)), (b"EXIF", b"ANMF" * 3), (b"ANMF", bytes(16)), (b"ANMF", b"")]
    data = moving_webp(30, 20, chunks)
    assert measure_animation(data, 20, 30) == Animation(20, 30, 3)
    assert measure_animation(data[:-9], 20, 30).num_frames == 2, "a file that ends too early has those before the end"


def test_a_webp_with_too_many_pixels_is_refused_before_it_is_decoded() -> None:
    frames = [(b"ANMF", bytes(16))] * 140
    error = refusal(moving_webp(4000, 4000, frames))
    assert (error.code, error.status) == ("video_too_large", 413) and "140 frames of 4000x4000" in str(error)
    assert measure_animation(moving_webp(4000, 4000, frames[:134]), 4000, 4000).num_frames == 134


@pytest.mark.parametrize(
    "data",
    [
        growing_gif([(16, 16)]).replace(b"\x21\xf9", b"\x21\xfe" + b"\1x" * 120 + b"\0\x21\xf9"),
        growing_gif([(1, 1)] * 60),
        growing_gif([(1, 1)])[:-1] + b"x" * 120 + b"\x3b",
        moving_webp(16, 16, [(b"XXXX", b"")] * 120),
    ],
    ids=["blocks of one extension", "frames", "bytes that begin nothing", "chunks"],
)
def test_an_animation_with_too_many_pieces_is_refused(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_animation(data, 16, 16)
    monkeypatch.setattr(animations, "MAX_BLOCKS", 100)
    with pytest.raises(RequestError, match="more than 100") as refused:
        measure_animation(data, 16, 16)
    assert (refused.value.code, refused.value.status) == ("video_too_large", 413)


@pytest.mark.parametrize("kind", ["animation", "container"])
class TestBothKinds:
    @pytest.fixture
    def data(self, kind: str) -> bytes:
        """12 frames."""
        if kind == "animation":
            return growing_gif([(32, 16)] * 12)
        pytest.importorskip("av")
        return motion_jpeg([picture(32, 16)] * 12, 32, 16)

    def test_too_many_frames_are_refused(self, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(containers, "MAX_DECODED_FRAMES", 12)
        assert len(decode_video(data, LIMITS)[0]) == 12
        monkeypatch.setattr(containers, "MAX_DECODED_FRAMES", 11)
        error = refusal(data)
        assert (error.code, error.status) == ("video_too_long", 413)

    def test_decoding_ends_at_a_deadline(self, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(containers, "MAX_DECODE_S", -1.0)
        assert refusal(data).code == "video_too_long"

    def test_a_frame_larger_than_the_limit_for_videos_is_refused(self, data: bytes) -> None:
        assert len(decode_video(data, ImageLimits(max_video_pixels=32 * 16))[0]) == 1
        error = refusal(data, ImageLimits(max_video_pixels=32 * 16 - 1))
        assert (error.code, error.status) == ("video_too_large", 413) and "frames of 32x16" in str(error)

    def test_running_out_of_memory_is_not_blamed_on_the_file(self, data: bytes) -> None:
        def fail(error: Exception) -> Allowance:
            def hold(num_bytes: int) -> None:
                raise error

            return Allowance(hold=hold)

        with pytest.raises(MemoryError):
            decode_video(data, LIMITS, fail(MemoryError()))
        with pytest.raises(RequestError, match="damaged"):
            decode_video(data, LIMITS, fail(ValueError("a text of a decoder")))


def test_frames_larger_than_a_video_claims_are_not_decoded() -> None:
    """FFmpeg itself refuses the larger frames, so no memory is held or allocated for them."""
    held: list[int] = []
    frames, _, _ = decode_video(video_file([(64, 64), (1280, 1280)]), LIMITS, Allowance(hold=held.append))
    assert frames.shape[1:] == (64, 64, 3) and max(held) == SCRATCH_BYTES * 64 * 64


def video_file(sizes: list[tuple[int, int]]) -> bytes:
    """An AVI file that claims the first size, with two frames of each size."""
    av: Any = pytest.importorskip("av")
    file, packets = BytesIO(), []
    for width, height in sizes:
        encoder = av.CodecContext.create("mpeg4", "w")
        encoder.width, encoder.height, encoder.pix_fmt, encoder.time_base = width, height, "yuv420p", Fraction(1, 10)
        grey = av.VideoFrame.from_ndarray(np.full((height, width, 3), 90, np.uint8), format="rgb24")
        packets += [*encoder.encode(grey), *encoder.encode(grey), *encoder.encode()]
    with av.open(file, mode="w", format="avi") as container:
        stream = container.add_stream("mpeg4", rate=10)
        (stream.width, stream.height), stream.pix_fmt = sizes[0], "yuv420p"
        for number, packet in enumerate(packets):
            packet.stream, packet.pts, packet.dts, packet.time_base = stream, number, number, Fraction(1, 10)
            container.mux(packet)
    return file.getvalue()
