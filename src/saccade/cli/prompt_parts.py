"""Splits a prompt of the command line into text and images: paths and URLs in it become images."""

import asyncio
import re
from pathlib import Path
from typing import Any

from saccade.cli.model import found_path
from saccade.errors import ConfigError

# A URL is always an image. A path with an image suffix is one if the file exists; a path with spaces must be quoted or
# escaped.
_ENDING = r"\.(?:jpe?g|png|webp|gif|bmp)"
_IMAGE = re.compile(
    rf"""(?:(?P<url>https?://[^\s'"<>]+?{_ENDING}(?:\?[^\s'"<>]+)?)"""
    rf"""|(?<!\w)(['"])(?P<quoted>[^'"\n]+?{_ENDING})\2|(?P<bare>(?:[^\s'"]|\\ )+?{_ENDING}))"""
    r"(?=[\s,;:?!)]|\.?$|\.\s)",
    re.IGNORECASE,
)

Part = dict[str, Any]


def parts_of(prompt: str) -> list[Part]:
    """Splits the prompt into text and image parts, in order."""
    parts: list[Part] = []
    at = 0
    for match in _IMAGE.finditer(prompt):
        source = match["url"] or _file_in_prompt(match["quoted"] or match["bare"].replace("\\ ", " "))
        if source is not None:
            parts += [*_text(prompt[at : match.start()]), {"type": "image", "image": source}]
            at = match.end()
    return [*parts, *_text(prompt[at:])]


def image_part(word: str) -> Part:
    """An image that the user named explicitly, by path or URL."""
    if word.lower().startswith(("http://", "https://")):
        return {"type": "image", "image": word}
    return file_part("image", word)


def file_part(kind: str, path: str, flags: str = "") -> Part:
    found = found_path(path)
    if found is None or not found.is_file():
        raise ConfigError(f"{path} is not a file{flags}")
    return {"type": kind, kind: found}


def fetched(parts: list[Part]) -> list[Part]:
    """Replaces URLs by the images they lead to. URLs of private networks are refused, as in a server."""
    if not any(_is_address(part) for part in parts):
        return parts
    return asyncio.run(_fetch(parts))


async def _fetch(parts: list[Part]) -> list[Part]:
    from saccade.inputs.media.media_loader import MediaLoader, MediaSettings

    loader = MediaLoader(MediaSettings(allow_remote_media=True))
    try:
        return [
            {**part, "image": await loader.load("image", part["image"])} if _is_address(part) else part
            for part in parts
        ]
    finally:
        await loader.aclose()


def _is_address(part: Part) -> bool:
    source = part.get("image")
    return isinstance(source, str) and source.lower().startswith(("http://", "https://"))


def _file_in_prompt(name: str) -> Path | None:
    path = found_path(name)
    if path is not None and path.is_file():
        return path
    if name.startswith(("/", "./", "../", "~")):
        raise ConfigError(f"the prompt names {name}, which does not exist")
    return None


def _text(text: str) -> list[Part]:
    return [{"type": "text", "text": text.strip()}] if text.strip() else []
