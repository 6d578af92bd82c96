"""Replaces the URLs of media in messages with the media's bytes.

A source is a data URL, an http(s) URL (only if the settings allow it) or a file:// URL (only below one folder). No
other file is opened and no other host contacted, whatever the messages contain. Counts are checked before anything is
read, sizes while reading. The processor decodes the bytes later, in a worker thread.
"""

import asyncio
import json
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from saccade.config import check_at_least, refused, setting
from saccade.errors import ConfigError, RequestError
from saccade.inputs.media.fetch import Fetcher, FetchPolicy, read_domains
from saccade.inputs.media.images import ImageLimits, check_counts, read_data_url, too_large
from saccade.inputs.media.videos import read_video_url
from saccade.inputs.text.chat_messages import MediaKind, MediaRef, find_sources, with_sources

Hold = Callable[[int], None]

INLINE_CHARS = 64 * 1024  # decoding shorter base64 is faster than handing it to a thread
MAX_FETCHES = 64  # at the same time, over all requests
DEFAULT_LIMITS = {"image": 32, "video": 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaSettings:
    """Where images and videos may come from and how large they may be."""

    allow_remote_media: bool = setting(False, "fetch images and videos from any public https or http address")
    allowed_media_domains: str = setting("", "fetch media from these hosts only, such as a.org,*.b.org")
    allowed_local_media_path: str = setting("", "folder whose files requests may name by file:// URLs")
    max_image_bytes: int = setting(20 * 2**20, "largest encoded image in bytes")
    max_request_pixels: int = setting(256 * 2**20, "most pixels of all images of a request together")
    max_fetch_bytes: int = setting(64 * 2**20, "largest encoded video in bytes, and most bytes of one fetch")
    image_fetch_timeout_s: float = setting(5.0, "seconds to fetch an image")
    video_fetch_timeout_s: float = setting(30.0, "seconds to fetch a video")
    max_redirects: int = setting(3, "redirects to follow; each is checked like the first address")
    limit_mm_per_prompt: str = setting("", 'most images and videos of a request; unset: {"image": 32, "video": 4}')
    max_video_frames: int = setting(768, "most frames of a video; longer video files are thinned")

    def __post_init__(self) -> None:
        check_at_least(self, _LOWEST)
        for name in ("image_fetch_timeout_s", "video_fetch_timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise refused(name, getattr(self, name), "it must be above 0")
        if self.allowed_local_media_path and not Path(self.allowed_local_media_path).is_dir():
            raise ConfigError(f"{self.allowed_local_media_path!r} is not a folder (--allowed-local-media-path)")
        self.counts()

    def counts(self) -> dict[MediaKind, int]:
        try:
            given = json.loads(self.limit_mm_per_prompt or "{}")
        except ValueError:
            given = None
        if not isinstance(given, dict) or not all(_is_count(k, v) for k, v in given.items()):
            allowed = 'it must be a JSON object such as {"image": 16, "video": 0}'
            raise refused("limit_mm_per_prompt", repr(self.limit_mm_per_prompt), allowed)
        merged = DEFAULT_LIMITS | given
        return {"image": merged["image"], "video": merged["video"]}

    def limits(self) -> ImageLimits:
        """For the processor; see `Processor.from_folder`."""
        counts = self.counts()
        return ImageLimits(
            max_bytes=self.max_image_bytes,
            max_video_bytes=self.max_fetch_bytes,
            max_frames=self.max_video_frames,
            max_images=counts["image"],
            max_videos=counts["video"],
            max_request_pixels=self.max_request_pixels,
        )


_COUNTS = ("max_image_bytes", "max_request_pixels", "max_fetch_bytes", "max_video_frames")
_LOWEST = {**dict.fromkeys(_COUNTS, 1), "max_redirects": 0}


class MediaLoader:
    """Reads the media of requests. One per server, shared by any number of tasks. Cancelling a task ends all of its
    downloads at once and leaves no connection behind."""

    def __init__(self, settings: MediaSettings, *, fetcher: Fetcher | None = None) -> None:
        self.settings = settings
        self._limits = settings.limits()
        self._root = os.path.realpath(settings.allowed_local_media_path) if settings.allowed_local_media_path else None
        policy = FetchPolicy(
            allows_all=settings.allow_remote_media,
            domains=read_domains(settings.allowed_media_domains),
            max_redirects=settings.max_redirects,
        )
        self._fetcher = fetcher or Fetcher(policy)
        self._fetch_slots = asyncio.Semaphore(MAX_FETCHES)

    async def resolve(self, messages: Any, hold: Hold = lambda num_bytes: None) -> Any:
        """A copy of the messages in which every image and video is bytes, or a list of frames as bytes. A source in
        several parts is read once. After each read, `hold` gets the number of bytes and raises if it is too much."""
        found = find_sources(messages)
        refs = [ref for _, _, ref in found]
        check_counts(refs, self._limits)
        return with_sources(messages, found, await self._load_all(refs, hold))

    async def load(self, kind: MediaKind, source: Any) -> bytes | list[bytes]:
        """The bytes of one image or video, or a list of a video's frames as bytes."""
        if isinstance(source, bytes | bytearray | memoryview):
            return bytes(source)
        if not isinstance(source, str):
            raise RequestError("an image or video must be a URL", code="invalid_messages")
        scheme = source[:8].lower()
        if scheme.startswith("data:"):
            return await self._decode(kind, source)
        if scheme.startswith("file:"):
            return await asyncio.to_thread(self._read_file, source, self._max_bytes(kind))
        if scheme.startswith(("http:", "https:")):
            return await self._fetch(kind, source)
        message = "a URL must begin with data:, https:, http: or file:"
        raise RequestError(message, code="media_invalid_url")

    async def aclose(self) -> None:
        """Ends the threads that look up names. There are no open connections between requests."""
        self._fetcher.close()

    async def _load_all(self, refs: Sequence[MediaRef], hold: Hold) -> list[Any]:
        if not refs:
            return []
        if len(refs) == 1:  # comparing sources takes a millisecond per megabyte
            return [await self._load_held(refs[0], hold)]
        tasks: dict[tuple[MediaKind, Any], asyncio.Task[Any]] = {}
        try:
            async with asyncio.TaskGroup() as group:
                for ref in refs:
                    key = _key(ref)
                    if key not in tasks:
                        tasks[key] = group.create_task(self._load_held(ref, hold))
        except BaseExceptionGroup as errors:
            raise next((e for e in errors.exceptions if isinstance(e, RequestError)), errors.exceptions[0]) from None
        return [tasks[_key(ref)].result() for ref in refs]

    async def _load_held(self, ref: MediaRef, hold: Hold) -> bytes | list[bytes]:
        with ref.named_in_errors():
            data = await self.load(ref.kind, ref.source)
        hold(len(data) if isinstance(data, bytes) else sum(map(len, data)))
        return data

    async def _decode(self, kind: MediaKind, url: str) -> bytes | list[bytes]:
        read = read_video_url if kind == "video" else read_data_url
        limits = replace(self._limits, max_bytes=self._max_bytes(kind))
        if len(url) // 4 * 3 > 2 * limits.max_bytes:
            raise too_large(f"the {kind}", limits.max_bytes, code=f"{kind}_too_large")
        if len(url) <= INLINE_CHARS:
            return read(url, limits)
        return await asyncio.to_thread(read, url, limits)

    async def _fetch(self, kind: MediaKind, url: str) -> bytes:
        settings = self.settings
        timeout_s = settings.image_fetch_timeout_s if kind == "image" else settings.video_fetch_timeout_s
        max_bytes = min(self._max_bytes(kind), settings.max_fetch_bytes)
        async with self._fetch_slots:
            return await self._fetcher.fetch(url, max_bytes=max_bytes, timeout_s=timeout_s)

    def _max_bytes(self, kind: MediaKind) -> int:
        return self.settings.max_image_bytes if kind == "image" else self.settings.max_fetch_bytes

    def _read_file(self, url: str, max_bytes: int) -> bytes:
        """Reads a regular file whose real path is below the folder. Errors must not reveal which files exist."""
        message = "requests may not read this file (--allowed-local-media-path)"
        refusal = RequestError(message, code="media_not_allowed")
        try:
            if self._root is None:
                raise refusal
            path = os.path.realpath(_file_path(url))
            if not _is_below(path, self._root):
                raise refusal
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(file, "rb") as opened:  # noqa: PTH123
                if not stat.S_ISREG(os.fstat(file).st_mode) or not _is_below(_opened_path(file, path), self._root):
                    raise refusal
                data = opened.read(max_bytes + 1)
        except (OSError, ValueError):
            raise refusal from None
        if len(data) > max_bytes:
            raise too_large("the file", max_bytes)
        return data


def _key(ref: MediaRef) -> tuple[MediaKind, Any]:
    return ref.kind, ref.source if isinstance(ref.source, str | bytes) else id(ref.source)


def _file_path(url: str) -> bytes:
    rest = url[len("file:") :]
    if rest.startswith("//"):
        host, slash, rest = rest[2:].partition("/")
        if host.lower() not in ("", "localhost"):
            raise ValueError("a file of another machine")
        rest = slash + rest
    path = unquote_to_bytes(rest)
    if not path.startswith(b"/") or b"\0" in path or "?" in rest or "#" in rest:
        raise ValueError("not an absolute path")
    return path


def _is_below(path: str | bytes, root: str) -> bool:
    return os.fsencode(path).startswith(os.fsencode(root).rstrip(b"/") + b"/")


def _opened_path(file: int, path: str | bytes) -> str | bytes:
    """The real path of the opened file: links can change between checking a path and opening it."""
    link = f"/proc/self/fd/{file}"
    return os.readlink(link) if os.path.lexists(link) else path  # noqa: PTH115


def _is_count(kind: object, value: object) -> bool:
    return kind in DEFAULT_LIMITS and isinstance(value, int) and not isinstance(value, bool) and value >= 0
