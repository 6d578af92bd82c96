"""Finds markers in streamed text: stop strings, and the tags of reasoning and tool calls."""

from collections.abc import Sequence


def split_undecided(text: str, markers: Sequence[str], blanks: str | None = "") -> tuple[str, str]:
    """Splits text that contains no whole marker into text that is safe to emit and a tail that may start a marker.
    Characters of `blanks` before a marker belong to it, as in `str.rstrip`; None means all whitespace."""
    longest = min(max(map(len, markers), default=1) - 1, len(text))
    starts = (len(text) - count for count in range(longest, 0, -1))
    at = next((at for at in starts if any(marker.startswith(text[at:]) for marker in markers)), len(text))
    certain = text[:at].rstrip(blanks)
    return certain, text[len(certain) :]
