"""Decoding in processes that can be killed gives the same pixels and always ends."""

import io
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from saccade.errors import CapacityError, RequestError
from saccade.inputs.allowance import ANYTHING, Allowance, StopWorkError
from saccade.inputs.media import jpeg, media_pool
from saccade.inputs.media.headers import read_header
from saccade.inputs.media.images import ImageLimits, decode_image, load_image, measure_image
from saccade.inputs.media.jpeg import count_visits, is_cheap, is_plain
from saccade.inputs.media.media_pool import MediaPool, _read
from saccade.inputs.media.media_process import MediaResult
from saccade.inputs.media.sampling import Sample
from saccade.inputs.media.videos import Video, load_video
from saccade.inputs.media_settings import read_video_settings
from saccade.jobs.packets import resident_bytes
from saccade.jobs.pool import SMALL_S
from saccade.jobs.pool_process import JobOutput, ProcessLostError
from tests.child_processes import gone
from tests.inputs.hostile_files import growing_gif, many_scans, motion_jpeg, picture

LIMITS = ImageLimits()
BOUND_S = 60.0  # a longer wait is a hang, even on a busy machine


@pytest.fixture(scope="module")
def pool() -> Iterator[MediaPool]:
    made = MediaPool(2)
    yield made
    made.close()


def encode(image: Image.Image, format_: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format_, **options)
    return buffer.getvalue()


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    rng = np.random.default_rng(width)
    return Image.fromarray(rng.integers(0, 256, (height, width, 4), dtype=np.uint8)).convert(mode)


def refusal(call: Callable[[], object]) -> RequestError:
    with pytest.raises(RequestError) as error:
        call()
    return error.value


def wait_until_gone(pids: list[int]) -> None:
    end = time.monotonic() + BOUND_S
    while not all(map(gone, pids)):
        assert time.monotonic() < end, "processes outlive a signal"
        time.sleep(0.01)


def decode(pool: MediaPool, data: bytes) -> Any:
    return pool.image(measure_image(data, LIMITS), LIMITS, ANYTHING)


def ways(pool: MediaPool) -> tuple[Callable[..., Any], ...]:
    """Videos are refused alike in this process and in the pool."""
    return load_video, pool.video


def turned(orientation: int) -> dict[str, Any]:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return {"exif": exif}


FILES = {
    "png": encode(noise(70, 50), "PNG"),
    "alpha": encode(noise(70, 50, "RGBA"), "PNG"),
    "webp": encode(noise(70, 50), "WEBP"),
    "bmp": encode(noise(70, 50), "BMP"),
    "gif": encode(noise(70, 50, "P"), "GIF"),
    "cmyk": encode(noise(2100, 2100, "CMYK"), "JPEG"),
    "large progressive": encode(noise(1500, 1400), "JPEG", progressive=True, quality=95),
    "turned png": encode(noise(70, 50), "PNG", **turned(6)),
    "turned jpeg": encode(noise(2600, 1700), "JPEG", quality=97, progressive=True, **turned(8)),
}


class TestPixels:
    @pytest.mark.parametrize("name", FILES)
    def test_images_are_the_same_as_without_a_process(self, pool: MediaPool, name: str) -> None:
        data = FILES[name]
        assert not is_cheap(data) or not data.startswith(b"\xff\xd8")
        found = decode(pool, data)
        assert np.array_equal(found, load_image(data, LIMITS))
        assert not found.flags.writeable and not found.flags.owndata

    def test_videos_are_the_same_as_without_a_process(self, pool: MediaPool) -> None:
        frames = [noise(40 + 0 * i, 30) for i in range(4)]
        gif = encode(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=50)
        avi = motion_jpeg([picture(64, 48)] * 5, 64, 48)
        jpegs = [picture(32, 16)] * 3
        for source in (gif, avi, jpegs, Video(jpegs, 2.0), picture(32, 16, "PNG")):
            (found, fps, _), (expected, rate, _) = pool.video(source, LIMITS, ANYTHING), load_video(source, LIMITS)
            assert np.array_equal(found, expected) and fps == rate

    def test_a_file_is_sampled_as_without_a_process(self, pool: MediaPool, folders: dict[str, Path]) -> None:
        pytest.importorskip("av")
        settings = read_video_settings(folders["qwen3_vl"])
        avi = motion_jpeg([picture(32, 16)] * 40, 32, 16)
        frames, fps, sample = pool.video(avi, LIMITS, ANYTHING, settings)
        expected, rate, ours = load_video(avi, LIMITS, settings=settings)
        assert np.array_equal(frames, expected) and fps == rate
        assert sample == ours and sample is not None and sample.num_frames == 40 > len(frames)

    @pytest.mark.parametrize(
        "indices, num_frames",
        [((0, 3), 9), ((0, 3, 2), 9), ((0, 0, 3), 9), ((-1, 0, 1), 9), ((0, 1, 9), 9), ((0, 1, 2), 10**6)],
    )
    def test_a_sample_that_does_not_match_its_frames_is_not_believed(
        self, indices: tuple[int, ...], num_frames: int
    ) -> None:
        pixels = np.zeros(3 * 2 * 2 * 3, np.uint8)
        for sample in (Sample((0, 1, 8), 9), Sample(indices, num_frames)):
            words = msgspec.msgpack.encode(MediaResult((3, 2, 2, 3), 2.0, sample))
            if sample.frames == (0, 1, 8):
                assert _read(JobOutput(words, pixels), is_video=True)[2] == sample
                continue
            with pytest.raises(ProcessLostError, match="does not match"):
                _read(JobOutput(words, pixels), is_video=True)

    def test_frames_are_held_as_without_a_process(self, pool: MediaPool) -> None:
        gif = growing_gif([(32, 32)] * 5)
        theirs: list[int] = []
        ours: list[int] = []
        pool.video(gif, LIMITS, Allowance(hold=theirs.append))
        load_video(gif, LIMITS, Allowance(hold=ours.append))
        assert theirs == ours and sum(ours) == (8 + 5 * 6) * 32 * 32

    def test_errors_are_the_same_as_without_a_process(self, pool: MediaPool) -> None:
        for data in (FILES["png"][:-60], FILES["webp"][:100], b"GIF89a" + bytes(50)):
            ours, theirs = (
                refusal(partial(load_image, data, LIMITS)),
                refusal(partial(decode, pool, data)),
            )
            assert (str(ours), ours.code, ours.status) == (str(theirs), theirs.code, theirs.status)

    def test_a_cheap_file_needs_no_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        started: list[str] = []
        monkeypatch.setattr(media_pool, "Pool", lambda *args: started.append("pool"))
        pool = MediaPool(2)
        for data in (picture(560, 560), picture(560, 560, progressive=True), picture(300, 200, subsampling=0)):
            pixels = decode(pool, data)
            assert np.array_equal(pixels, decode_image(measure_image(data, LIMITS)))


class TestCosts:
    def test_headers_decide_what_is_plain_and_cheap(self) -> None:
        assert is_plain(picture(560, 560)) and is_plain(encode(noise(50, 40, "L"), "JPEG"))
        assert not is_plain(picture(560, 560, progressive=True)) and is_cheap(picture(560, 560, progressive=True))
        assert not is_plain(many_scans(64, 64, 5, progressive=False))
        assert is_plain(many_scans(4000, 4000, 0, progressive=True)) is False
        assert not is_cheap(encode(noise(2100, 2100), "JPEG"))
        assert not is_cheap(many_scans(2000, 2000, 20))
        for data in (b"", b"\xff\xd8", b"\xff\xd8\xff\xd9", picture(9, 9)[:40], bytes(100), b"\xff" * 1000):
            assert not is_plain(data) and not is_cheap(data)

    def test_a_file_with_much_metadata_is_not_cheap(self) -> None:
        """Pillow reads it entry by entry: a second for 19 MB."""
        data, note = picture(64, 64), b"\xff\xed" + struct.pack(">H", 60_002) + bytes(60_000)
        for num, expected in ((0, True), (2, True), (3, False), (300, False)):
            assert is_cheap(data[:2] + note * num + data[2:]) is expected, num

    @pytest.mark.parametrize("between", [b"\xff", b"\xff\xd0", b"\xff\xe0\x00\x02", b"x"])
    @pytest.mark.parametrize("before", [b"\xff\xc0", b"\xff\xda"])
    def test_a_long_head_is_not_searched(self, between: bytes, before: bytes) -> None:
        """Millions of fill bytes, empty markers, empty segments or garbage bytes take only a few lines of Python."""
        whole = picture(64, 64)
        place = whole.index(before)
        data = whole[:place] + between * (2**20 // len(between)) + whole[place:]
        num_lines = 0

        def trace(frame: Any, event: str, argument: Any) -> Any:
            nonlocal num_lines
            num_lines += event == "line"
            return trace

        outer = sys.gettrace()
        sys.settrace(trace)
        try:
            header, is_quick = read_header(data), is_cheap(data)
        finally:
            sys.settrace(outer)
        assert not is_quick and num_lines < 100_000
        assert (header is None) is (before == b"\xff\xc0")
        some = whole[:place] + between * (3 if between != b"x" else 0) + whole[place:]
        assert read_header(some) == read_header(whole) and is_cheap(some)

    def test_visits_are_counted_per_scan_and_component(self) -> None:
        assert count_visits(picture(64, 64, subsampling=0)) == 3 * 64
        assert count_visits(picture(64, 64, subsampling=2)) == 64 + 2 * 16
        usual = count_visits(picture(640, 480, progressive=True))
        blocks = 80 * 60 + 2 * 40 * 30
        assert 3 * blocks < usual < 10 * blocks
        assert count_visits(many_scans(64, 64, 7)) == count_visits(many_scans(64, 64, 0)) + 7 * 64

    @pytest.mark.parametrize("progressive", [True, False])
    def test_thousands_of_empty_scans_are_refused_before_a_decoder_runs(
        self, progressive: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data = many_scans(8000, 8000, 2893, progressive=progressive)
        monkeypatch.setattr("simplejpeg.decode_jpeg", None)
        error = refusal(lambda: load_image(data, LIMITS))
        assert (error.code, error.status) == ("image_too_complex", 413) and "scans over 8000x8000" in str(error)

    def test_an_image_with_few_blocks_may_have_many_scans(self) -> None:
        with pytest.raises(RequestError, match="500 scans"):
            load_image(many_scans(16, 16, jpeg.MAX_SCANS + 1), LIMITS)
        count_visits(many_scans(16, 16, 300))

    def test_many_segments_are_refused(self) -> None:
        data = picture(2100, 2100)
        data = data[:2] + b"\xff\xfe\x00\x02" * 5000 + data[2:]
        assert not is_cheap(data) and refusal(lambda: load_image(data, LIMITS)).code == "image_too_complex"


def test_small_media_are_distinguished_from_large_ones(pool: MediaPool, monkeypatch: pytest.MonkeyPatch) -> None:
    costs: list[float] = []
    real = pool.pool.run

    def run(*args: Any, cost_s: float, **more: Any) -> Any:
        costs.append(cost_s)
        return real(*args, cost_s=cost_s, **more)

    monkeypatch.setattr(pool.pool, "run", run)
    decode(pool, FILES["png"])
    for source in ([picture(640, 360)] * 8, growing_gif([(320, 200)] * 20), picture(64, 64, "PNG")):
        pool.video(source, LIMITS, ANYTHING)
    assert max(costs) <= SMALL_S
    decode(pool, FILES["turned jpeg"])
    assert costs.pop() > SMALL_S
    for source in (motion_jpeg([picture(64, 48)] * 5, 64, 48), [picture(640, 360)] * 60, growing_gif([(900, 900)] * 9)):
        pool.video(source, LIMITS, ANYTHING)
        assert costs.pop() > SMALL_S


class TestLimits:
    def test_a_gif_whose_later_frames_are_huge_is_refused(self, pool: MediaPool) -> None:
        gif = growing_gif([(64, 64), (13000, 13000)])
        for load in ways(pool):
            before = resident_bytes()
            error = refusal(partial(load, gif, LIMITS, ANYTHING))
            assert (error.code, error.status) == ("image_too_large", 413) and "13000x13000" in str(error)
            assert resident_bytes() - before < 64 * 2**20

    def test_a_video_whose_later_frames_are_huge_is_refused(self, pool: MediaPool) -> None:
        huge = many_scans(13000, 13000, 0)
        for load in ways(pool):
            before = resident_bytes()
            avi = motion_jpeg([picture(64, 64), huge, picture(64, 64)], 64, 64)
            assert "same size" in str(refusal(partial(load, avi, LIMITS, ANYTHING)))
            frames = [picture(64, 64), huge]
            assert refusal(partial(load, frames, LIMITS, ANYTHING)).code == "image_too_large"
            frames = [picture(64, 64), many_scans(6000, 6000, 0)]
            assert "same size" in str(refusal(partial(load, frames, LIMITS, ANYTHING)))
            assert resident_bytes() - before < 64 * 2**20

    def test_a_video_of_frames_with_thousands_of_scans_is_refused(self, pool: MediaPool) -> None:
        frames = [picture(3000, 3000), many_scans(3000, 3000, 3000)]
        for load in ways(pool):
            for source in (motion_jpeg(frames, 3000, 3000), frames):
                error = refusal(partial(load, source, LIMITS, ANYTHING))
                assert (error.code, error.status) == ("image_too_complex", 413)

    def test_an_animation_with_too_many_pixels_is_refused_before_it_is_decoded(self, pool: MediaPool) -> None:
        frame = growing_gif([(4000, 4000)])
        head, body = frame[:19], frame[19:-1]
        gif = head + body * 140 + b"\x3b"
        error = refusal(lambda: pool.video(gif, LIMITS, ANYTHING))
        assert (error.code, error.status) == ("video_too_large", 413) and "140 frames of 4000x4000" in str(error)

    def test_a_process_may_use_only_memory_that_was_held(self, pool: MediaPool) -> None:
        def hold(num_bytes: int) -> None:
            if num_bytes > 100 * 2**20:
                raise CapacityError("full")

        with pytest.raises(CapacityError, match="full"):
            pool.video(growing_gif([(64, 64), (4000, 4000)]), LIMITS, Allowance(hold=hold))
        assert pool.video(growing_gif([(64, 64)]), LIMITS, Allowance(hold=hold))[0].shape == (1, 64, 64, 3)

    def test_too_much_cpu_time_is_the_clients_error(self, pool: MediaPool, monkeypatch: pytest.MonkeyPatch) -> None:
        data = encode(noise(3000, 3000), "PNG", compress_level=1)
        for name, value in {"IMAGE_CPU_S": 0.0, "PIXELS_PER_S": 1e15, "BYTES_PER_S": 1e15}.items():
            monkeypatch.setattr(media_pool, name, value)
        decode(pool, FILES["png"])  # imports are not counted
        error = refusal(lambda: decode(pool, data))
        assert (error.code, error.status) == ("image_too_complex", 413) and "CPU time" in str(error)

    def test_too_much_memory_is_the_clients_error(self, pool: MediaPool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(media_pool, "BASE_BYTES", -(2**26))
        error = refusal(lambda: decode(pool, FILES["png"]))
        assert (error.code, error.status) == ("image_too_complex", 413) and "memory" in str(error)

    def test_a_process_that_dies_is_not_blamed_on_the_client_and_is_replaced(self, pool: MediaPool) -> None:
        """The client may try again. A crash, however, is blamed on the file."""
        data = encode(noise(3000, 3000), "PNG", compress_level=1)

        ended: list[int] = []

        def end(number: signal.Signals, is_over: threading.Event) -> None:
            """Repeats the signal, because one that arrives between two jobs has no effect."""
            while not is_over.wait(0.1):
                for pid in pool.pool.pids() if pool.pool.num_busy else ():
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
                        ended.append(pid)

        for number, expected in ((signal.SIGKILL, CapacityError), (signal.SIGSEGV, RequestError)):
            decode(pool, FILES["png"])
            is_over = threading.Event()
            thread = threading.Thread(target=end, args=(number, is_over))
            thread.start()
            try:
                with pytest.raises(expected, match=r"again|crashed"):
                    for _ in range(100):
                        decode(pool, data)
            finally:
                is_over.set()
                thread.join()
            wait_until_gone(ended)  # an idle one may take longer to end than the one whose job was lost
        assert decode(pool, data).shape == (3000, 3000, 3)

    def test_a_client_that_leaves_frees_its_process(self, pool: MediaPool) -> None:
        calls: list[int] = []

        def check_cancelled() -> None:
            calls.append(1)
            raise StopWorkError

        with pytest.raises(StopWorkError):
            for _ in range(100):
                pool.video(growing_gif([(2000, 2000)] * 40), LIMITS, Allowance(check_cancelled=check_cancelled))
        assert calls and pool.pool.num_busy == 0

    @pytest.mark.parametrize("result", [b"", b"\xc1", b"\x93\x01\x02\x03"])
    def test_a_nonsensical_result_is_refused(
        self, pool: MediaPool, result: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = pool.pool.run

        def lie(*args: Any, **more: Any) -> Any:
            output = real(*args, **more)
            return type(output)(result, output.data)

        monkeypatch.setattr(pool.pool, "run", lie)
        with pytest.raises(CapacityError):
            decode(pool, FILES["png"])
