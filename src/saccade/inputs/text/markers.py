"""Finds markers in streamed text: stop strings, and the tags of reasoning and tool calls."""

from collections.abc import Sequence


def split_undecided(text: str, markers: Sequence[str], blanks: str | None = "") -> tuple[str, str]:
    """Splits text without a marker into what is certain and an end that may begin a marker. Characters of `blanks`
    before a marker belong to it, as in `str.rstrip`; None means all white space."""
    longest = min(max(map(len, markers), default=1) - 1, len(text))
    starts = (len(text) - count for count in range(longest, 0, -1))
    at = next((at for at in starts if any(marker.startswith(text[at:]) for marker in markers)), len(text))
    certain = text[:at].rstrip(blanks)
    return certain, text[len(certain) :]
