"""Media in messages: where they may come from, how large they may be, and what the processor receives."""

import asyncio
import base64
import os
import threading
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from saccade.errors import ConfigError, RequestError
from saccade.inputs.media import media_loader
from saccade.inputs.media.images import ImageLimits, read_data_url
from saccade.inputs.media.media_loader import INLINE_CHARS, MediaLoader, MediaSettings
from saccade.inputs.media.videos import load_video
from saccade.inputs.text.chat_messages import find_sources, read_messages
from tests.inputs.web import LIMIT_S, answer, drip, live, serve


def picture(size: tuple[int, int] = (12, 8), format_: str = "PNG", seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3)).astype(np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, format_)
    return file.getvalue()


def data_url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def message(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "hi"}, {"role": "user", "content": [{"type": "text", "text": "x"}, *parts]}]


def image_part(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def sources(messages: Any) -> list[Any]:
    return [ref.source for ref in read_messages(messages).media]


def resolve(messages: Any, **settings: Any) -> Any:
    found = []

    async def test() -> None:
        found.append(await MediaLoader(MediaSettings(**settings)).resolve(messages))

    live(test())
    return found[0]


def refusal(messages: Any, **settings: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        resolve(messages, **settings)
    return caught.value


class TestDataUrls:
    def test_parts_of_every_form_receive_the_bytes(self) -> None:
        data = picture()
        parts = [
            image_part(data_url(data)),
            {"type": "image_url", "image_url": data_url(data, "IMAGE/PNG;name=a b;charset=utf-8")},
            {"image_url": {"url": data_url(data).replace("data:", "DaTa:")}},
            {"type": "input_image", "image_url": data_url(data)},
            {"type": "image", "image": data_url(data)},
            {"type": "image", "url": None, "image": data_url(data).replace("==", "")},
        ]
        before = message(*parts)
        after = resolve(before)
        assert sources(after) == [data] * len(parts)
        assert after[1]["content"][1]["image_url"]["detail"] == "low" and before == message(*parts)
        assert find_sources(after)[0][:2] == (1, 1)

    def test_large_data_urls_do_not_block_the_event_loop(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The decoder waits for the event loop, which could not go on if it had to wait for the decoder."""
        data = bytes(INLINE_CHARS)
        loop_goes_on = threading.Event()

        def decode(url: str, limits: ImageLimits) -> bytes:
            assert loop_goes_on.wait(LIMIT_S / 2), "the event loop waits"
            return read_data_url(url, limits)

        monkeypatch.setattr(media_loader, "read_data_url", decode)

        async def test() -> None:
            loading = asyncio.create_task(MediaLoader(MediaSettings()).resolve(message(image_part(data_url(data)))))
            asyncio.get_running_loop().call_later(0.01, loop_goes_on.set)
            assert sources(await loading) == [data]

        live(test())

    @pytest.mark.parametrize(
        "url",
        [
            "data:image/png;base64,@@@@",
            "data:image/png;base64,QUJ",
            "data:image/png;base64,QU=D",
            "data:image/png;base64,QUJD-_==",
            "data:image/png,hello",
            "data:image/png;base64",
            "data:",
            "data:image/png;base64,éééé",
        ],
    )
    def test_invalid_base64_is_refused(self, url: str) -> None:
        if url.endswith("QUJ"):
            assert sources(resolve(message(image_part(url)))) == [b"AB"]  # only the padding is missing
            return
        error = refusal(message(image_part(url)))
        assert error.status == 400 and error.param == "messages[1].content[1].image_url"

    def test_too_many_bytes_are_refused(self) -> None:
        for size in (2000, 20_000):
            error = refusal(message(image_part(data_url(bytes(size)))), max_image_bytes=1000)
            assert (error.status, error.code) == (413, "image_too_large")
        assert sources(resolve(message(image_part(data_url(bytes(1000)))), max_image_bytes=1000)) == [bytes(1000)]


class TestCounts:
    def test_too_many_media_are_refused_before_any_is_read(self) -> None:
        parts = [image_part("http://media.test/")] * 4
        assert refusal(message(*parts[:3]), limit_mm_per_prompt='{"image": 3}').code == "media_not_allowed"
        error = refusal(message(*parts), limit_mm_per_prompt='{"image": 3}')
        assert (error.status, error.code, error.param) == (400, "too_many_images", "messages[1].content[4].image_url")

    def test_the_default_allows_a_few_of_each_kind(self) -> None:
        assert refusal(message(*[image_part("data:,")] * 33)).code == "too_many_images"
        videos = [{"type": "video_url", "video_url": {"url": "data:,"}}] * 5
        assert refusal(message(*videos)).code == "too_many_videos"
        assert refusal(message(videos[0]), limit_mm_per_prompt='{"video": 0}').code == "too_many_videos"

    @pytest.mark.parametrize("text", ["{", "[]", '{"image": -1}', '{"image": true}', '{"audio": 1}', '{"image": "3"}'])
    def test_invalid_limits_are_refused(self, text: str) -> None:
        with pytest.raises(ConfigError, match="limit-mm-per-prompt"):
            MediaSettings(limit_mm_per_prompt=text)


BAD = (
    {"max_image_bytes": 0},
    {"image_fetch_timeout_s": 0},
    {"max_redirects": -1},
    {"allowed_local_media_path": "/x/y"},
)


@pytest.mark.parametrize("bad", BAD)
def test_settings_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        MediaSettings(**bad)


@pytest.mark.parametrize("messages", [None, "hi", [], [1, None], [{"content": 5}], [{"content": [1, {"type": 3}]}]])
def test_invalid_messages_are_left_for_the_processor(messages: Any) -> None:
    assert resolve(messages) == messages


@pytest.mark.parametrize("source", [5, {"url": 5}, ["a"], {"url": {"url": "x"}}, True])
def test_a_source_that_is_not_a_url_is_refused(source: Any) -> None:
    assert refusal(message({"type": "image_url", "image_url": source})).status == 400


@pytest.mark.parametrize(
    "url", ["/etc/passwd", "etc/passwd", "C:\\x.png", "javascript:alert(1)", "s3://a/b", "~/x", "\0"]
)
def test_other_schemes_are_refused(url: str, tmp_path: Path) -> None:
    assert refusal(message(image_part(url)), allowed_local_media_path=str(tmp_path)).code == "media_invalid_url"


class TestFiles:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        root = tmp_path / "media root"
        (root / "deep").mkdir(parents=True)
        (root / "a.png").write_bytes(picture())
        (root / "deep" / "ü b.png").write_bytes(picture())
        (tmp_path / "secret.png").write_bytes(b"secret")
        (tmp_path / "media root 2").mkdir()
        (tmp_path / "media root 2" / "x.png").write_bytes(b"secret")
        (root / "link.png").symlink_to(tmp_path / "secret.png")
        (root / "up").symlink_to(tmp_path)
        (root / "inside.png").symlink_to(root / "a.png")
        os.mkfifo(root / "pipe")
        return root

    def url(self, path: Path | str) -> str:
        return "file://" + str(path).replace(" ", "%20")

    def test_files_below_the_folder_are_read(self, root: Path) -> None:
        for name in ("a.png", "deep/ü b.png", "inside.png", "deep/../a.png"):
            for form in ("file://{}", "file://localhost{}", "FILE:{}"):
                url = form.format(str(root / name).replace(" ", "%20"))
                assert sources(resolve(message(image_part(url)), allowed_local_media_path=str(root))) == [picture()]

    def test_nothing_is_read_without_a_folder(self, root: Path) -> None:
        assert refusal(message(image_part(self.url(root / "a.png")))).code == "media_not_allowed"

    def test_all_other_files_get_the_same_refusal_without_a_path(self, root: Path, tmp_path: Path) -> None:
        escapes: list[Path | str] = [
            root / "../secret.png",
            root / "link.png",
            root / "up/secret.png",
            root / "missing.png",
            root / "deep",
            root / "pipe",
            root,
            tmp_path / "secret.png",
            str(root) + " 2/x.png",
            "/etc/passwd",
            "/proc/self/environ",
            "/dev/zero",
        ]
        urls = [self.url(path) for path in escapes]
        urls += [f"file://{root}/%2e%2e/secret.png", f"file://{root}/..%2fsecret.png", f"file://{root}/a.png%00.txt"]
        urls += [f"file://evil.test{root}/a.png", "file:a.png", "file:../a.png", "file://", f"file://{root}/a.png?x"]
        texts = set()
        for url in urls:
            error = refusal(message(image_part(url)), allowed_local_media_path=str(root))
            assert error.status == 400 and error.code == "media_not_allowed", url
            texts.add(str(error))
        assert len(texts) == 1 and not any(str(part) in texts.copy().pop() for part in (root, "secret", "passwd"))

    def test_large_files_are_refused(self, root: Path) -> None:
        (root / "large.png").write_bytes(bytes(2000))
        error = refusal(
            message(image_part(self.url(root / "large.png"))), allowed_local_media_path=str(root), max_image_bytes=1000
        )
        assert error.status == 413 and str(root) not in str(error)


class TestRemote:
    def test_remote_media_are_off_by_default(self) -> None:
        for url in ("http://media.test/a.png", "HTTPS://media.test/a.png", "http://127.0.0.1/"):
            assert refusal(message(image_part(url))).code == "media_not_allowed"

    def test_a_source_in_several_parts_is_fetched_once(self) -> None:
        async def test() -> None:
            async with serve(answer(b"a picture")) as web:
                loader = MediaLoader(MediaSettings(allow_remote_media=True), fetcher=web.fetcher())
                parts = [image_part(f"http://media.test/{name}") for name in "abaab"]
                assert sources(await loader.resolve(message(*parts))) == [b"a picture"] * 5
                assert sorted(web.requests) == ["/a", "/b"]
                await loader.aclose()

        live(test())

    def test_a_failed_fetch_ends_the_others(self) -> None:
        async def reply(path: str, writer: asyncio.StreamWriter) -> None:
            if path == "/bad":
                await answer(b"", "404 Not Found")(path, writer)
                return
            await drip(path, writer)

        async def test() -> None:
            async with serve(reply) as web:
                loader = MediaLoader(MediaSettings(allow_remote_media=True), fetcher=web.fetcher())
                parts = [image_part(f"http://media.test/{name}") for name in ("slow", "slower", "bad")]
                with pytest.raises(RequestError, match="404") as caught:
                    await loader.resolve(message(*parts))
                assert caught.value.param == "messages[1].content[3].image_url"

        live(test())

    def test_a_cancelled_request_leaves_nothing_behind(self) -> None:
        async def test() -> None:
            async with serve(drip) as web:
                loader = MediaLoader(MediaSettings(allow_remote_media=True), fetcher=web.fetcher())
                parts = [image_part(f"http://media.test/{i}") for i in range(8)]
                task = asyncio.create_task(loader.resolve(message(*parts)))
                while web.connections < 8:
                    await asyncio.sleep(0.01)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                for _ in range(5000):
                    if web.open == 0:
                        break
                    await asyncio.sleep(0.02)
                assert web.open == 0

        live(test())

    def test_images_and_videos_have_separate_limits(self) -> None:
        async def test() -> None:
            async with serve(answer(bytes(3000))) as web:
                settings = MediaSettings(allow_remote_media=True, max_image_bytes=2000, max_fetch_bytes=4000)
                loader = MediaLoader(settings, fetcher=web.fetcher())
                video = {"type": "video_url", "video_url": {"url": "http://media.test/"}}
                assert sources(await loader.resolve(message(video))) == [bytes(3000)]
                with pytest.raises(RequestError) as caught:
                    await loader.resolve(message(image_part("http://media.test/")))
                assert caught.value.status == 413
                settings = MediaSettings(allow_remote_media=True, max_image_bytes=4000, max_fetch_bytes=2000)
                with pytest.raises(RequestError) as caught:
                    await MediaLoader(settings, fetcher=web.fetcher()).resolve(
                        message(image_part("http://media.test/"))
                    )
                assert caught.value.status == 413, "what is fetched has a limit for all kinds"

        live(test())


def frames_of(count: int, size: tuple[int, int] = (32, 16)) -> list[np.ndarray[Any, Any]]:
    """Frames whose grey value gives their index."""
    return [np.full((size[1], size[0], 3), 10 + i * 200 // count, dtype=np.uint8) for i in range(count)]


def animation(count: int, format_: str, duration: int = 50) -> bytes:
    file = BytesIO()
    first, *rest = map(Image.fromarray, frames_of(count))
    first.save(file, format_, save_all=True, append_images=rest, duration=duration, loop=0, lossless=True)
    return file.getvalue()


def video_file(count: int, rate: int = 10, format_: str = "mp4", codec: str = "mpeg4") -> bytes:
    av = pytest.importorskip("av")
    file = BytesIO()
    with av.open(file, mode="w", format=format_) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        for frame in frames_of(count):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


class TestVideos:
    def load(self, data: Any, **limits: Any) -> tuple[Any, float | None]:
        return load_video(data, ImageLimits(**limits))[:2]

    def test_a_list_of_frames_comes_as_bytes(self) -> None:
        jpegs = [picture(format_="JPEG", seed=i) for i in range(3)]
        url = "Data:video/jpeg;base64," + ",".join(base64.b64encode(data).decode() for data in jpegs)
        part = {"type": "video_url", "video_url": {"url": url, "fps": 2}}
        after = resolve(message(part))
        assert sources(after) == [jpegs] and read_messages(after).media[0].fps == 2
        assert self.load(sources(after)[0])[0].shape == (3, 8, 12, 3)
        assert refusal(message(part), max_video_frames=2).status == 413
        num_bytes = sum(map(len, jpegs))
        assert sources(resolve(message(part), max_fetch_bytes=num_bytes)) == [jpegs]
        assert refusal(message(part), max_fetch_bytes=num_bytes - 1).status == 413

    def test_files_come_as_bytes(self) -> None:
        data = animation(3, "GIF")
        part = {"type": "video_url", "video_url": data_url(data, "video/mp4")}
        assert sources(resolve(message(part))) == [data]

    def test_a_path_names_a_video_file(self, tmp_path: Path) -> None:
        (tmp_path / "a.gif").write_bytes(animation(3, "GIF"))
        assert self.load(tmp_path / "a.gif")[0].shape == (3, 16, 32, 3)
        with pytest.raises(RequestError, match="the video file cannot be read"):
            self.load(tmp_path / "b.gif")

    def test_a_video_file_with_too_many_bytes_is_refused(self, tmp_path: Path) -> None:
        data = animation(3, "GIF")
        (tmp_path / "a.gif").write_bytes(data)
        assert self.load(tmp_path / "a.gif", max_video_bytes=len(data), max_bytes=1)[0].shape == (3, 16, 32, 3)
        with pytest.raises(RequestError, match=f"more than {len(data) - 1} bytes") as caught:
            self.load(tmp_path / "a.gif", max_video_bytes=len(data) - 1)
        assert (caught.value.status, caught.value.code) == (413, "video_too_large")
        assert MediaSettings(max_fetch_bytes=77).limits().max_video_bytes == 77

    @pytest.mark.parametrize("format_", ["GIF", "WEBP"])
    def test_animations_are_videos(self, format_: str) -> None:
        frames, fps = self.load(animation(6, format_))
        assert frames.shape == (6, 16, 32, 3) and fps == pytest.approx(20, rel=0.05)
        assert np.abs(frames[:, 0, 0, 0].astype(int) - [f[0, 0, 0] for f in frames_of(6)]).max() <= 4

    @pytest.mark.parametrize("format_, codec", [("mp4", "mpeg4"), ("matroska", "mpeg4"), ("avi", "mpeg4")])
    def test_containers_are_videos(self, format_: str, codec: str) -> None:
        frames, fps = self.load(video_file(12, format_=format_, codec=codec))
        assert frames.shape == (12, 16, 32, 3) and fps == pytest.approx(10, rel=0.01)
        assert np.abs(frames.mean(axis=(1, 2, 3)) - [f.mean() for f in frames_of(12)]).max() < 12

    @pytest.mark.parametrize("limits", [{"max_frames": 10}, {"max_video_pixels": 32 * 16 * 10}])
    @pytest.mark.parametrize("kind", ["container", "animation"])
    def test_long_videos_are_thinned_evenly(self, kind: str, limits: dict[str, int]) -> None:
        data = video_file(40, rate=20) if kind == "container" else animation(40, "GIF")
        frames, fps = self.load(data, **limits)
        assert 5 <= len(frames) <= 10 and fps == pytest.approx(20 * len(frames) / 40, rel=0.1)
        steps = np.diff(frames.mean(axis=(1, 2, 3)))
        assert (steps > 10).all() and steps.max() < 2 * steps.min() + 8

    def test_a_still_image_is_a_video_of_one_frame(self) -> None:
        assert self.load(picture())[0].shape == (1, 8, 12, 3)

    def test_a_truncated_video_gives_the_frames_it_has_or_is_refused(self) -> None:
        data = video_file(30, format_="matroska")
        for end in (0, 4, 40, 300, len(data) // 2, len(data) - 10):
            try:
                frames, _ = self.load(data[:end])
            except RequestError as error:
                assert error.code in ("video_invalid", "video_unsupported") and str(error).isprintable()
            else:
                assert 1 <= len(frames) <= 30

    def test_noise_after_a_valid_start_is_refused(self) -> None:
        rng = np.random.default_rng(3)
        for begin in (b"\0\0\0\x18ftypmp42", b"\x1a\x45\xdf\xa3", b"RIFF\0\0\0\0AVI ", b"GIF89a\x10\0\x10\0"):
            with pytest.raises(RequestError) as caught:
                self.load(begin + rng.bytes(3000))
            assert caught.value.status in (400, 413) and str(caught.value).isprintable()

    @pytest.mark.parametrize(
        "data", [b"", b"#EXTM3U\n/etc/passwd\n", b"ffconcat version 1.0\nfile /etc/passwd\n", b"\0" * 99]
    )
    def test_playlists_and_other_formats_are_refused(self, data: bytes) -> None:
        with pytest.raises(RequestError) as caught:
            self.load(data)
        assert caught.value.code == "video_unsupported"

    def test_large_frames_are_refused_before_they_are_decoded(self) -> None:
        with pytest.raises(RequestError) as caught:
            self.load(video_file(3), max_pixels=100)
        assert caught.value.status == 413

    def test_without_the_package_the_error_says_what_to_do(self, monkeypatch: pytest.MonkeyPatch) -> None:
        data = video_file(3)
        monkeypatch.setitem(__import__("sys").modules, "av", None)
        with pytest.raises(RequestError, match=r"saccade-vlm\[video\]"):
            self.load(data)
