"""Finds out how deep a JSON body is nested, how many values it has and where its long strings are, before it is parsed.
A small body can hold very many objects, and making them would hold the GIL and block the event loop."""

import numpy as np
import numpy.typing as npt

from saccade.errors import RequestError

CHUNK = 64 * 2**10  # the GIL can change hands between the operations on a chunk
FIRST_CHUNK = 2 * 2**10  # an image often begins after a few hundred bytes; the next chunk skips it
MAX_DEPTH = 256
MAX_REST_BYTES = 16 * 2**20
CONTAINER_VALUES, STRING_VALUES = 8, 2  # each takes as long to make as this many numbers
LOOKED_BACK = 4096
MIN_CHARS_PER_ESCAPE = 16  # base64 data has one slash in 64 characters

Body = bytes | bytearray
Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.intp]
_QUOTE, _BACKSLASH, _OPEN, _CLOSE, _NEXT = range(1, 6)
_KINDS: Bytes = np.zeros(256, np.uint8)
for _kind, _characters in ((_QUOTE, b'"'), (_BACKSLASH, b"\\"), (_OPEN, b"[{"), (_CLOSE, b"]}"), (_NEXT, b",:")):
    _KINDS[list(_characters)] = _kind
_STEPS = np.array([0, 0, 0, 1, -1, 0], np.int32)
_VALUES = np.array([0, 0, 0, CONTAINER_VALUES, 0, 1], np.int32)


def find_long_strings(body: Body, max_values: int) -> list[tuple[int, int]]:
    """The places of long ASCII strings that are values (mostly images) without escapes, except for a few of slashes.
    Refuses a body that is nested too deeply or has too many values. Takes linear time, and hardly any for the content
    of those strings."""
    scan = BodyScan(body)
    while scan.advance():
        if scan.depth > MAX_DEPTH:
            raise RequestError(f"the body is nested deeper than {MAX_DEPTH} levels", code="invalid_json")
        if scan.num_values > max_values:
            found = f"the body has more than {max_values} values"
            how = f"a string counts as {STRING_VALUES}, a list or an object as {CONTAINER_VALUES}"
            raise _too_large(f"{found} ({how}; --max-body-values)")
        if scan.num_read > MAX_REST_BYTES:
            raise _too_large(f"the body has more than {MAX_REST_BYTES} bytes outside long strings such as base64 data")
    return scan.long_strings


class BodyScan:
    """Reads a body from the left. If it is not JSON, the parser stops where the scan goes wrong, or before."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self._at = 0
        self._chunk = FIRST_CHUNK
        self._is_in_string = self._is_escaped = False  # the next character
        self._string_begin = 0
        self._level = 0
        self.depth, self.num_values = 0, 1
        self.num_read = 0  # bytes outside long strings
        self.long_strings: list[tuple[int, int]] = []

    def advance(self) -> bool:
        """Reads one chunk. Returns False at the end."""
        if self._is_escaped:  # whatever it is, it is part of a string
            self._at, self._is_escaped = self._at + 1, False
        if self._is_in_string:
            self._skip_string()
        if self._at >= len(self._body):
            return False
        size = min(self._chunk, CHUNK, len(self._body) - self._at)
        self._read(np.frombuffer(self._body, np.uint8, size, self._at))
        self._at += size
        self.num_read += size
        self._chunk = min(2 * self._chunk, CHUNK)
        return True

    def _skip_string(self) -> None:
        """Skips to the end of a long string."""
        end = self._body.find(b'"', self._at)
        if end < 0:
            end = len(self._body)
        if end - self._at <= CHUNK:
            return
        if is_plain_value(self._body, self._string_begin, end):
            self.long_strings.append((self._string_begin, end))
        else:
            self.num_read += end - self._at
        self._at = end + _trailing_backslashes(self._body, self._at, end) % 2
        self._chunk = FIRST_CHUNK

    def _read(self, chunk: Bytes) -> None:
        kinds = _KINDS[chunk]
        places = np.flatnonzero(kinds)
        kinds = kinds[places]
        is_backslash = kinds == _BACKSLASH
        if is_backslash.any():
            is_inert = np.zeros(len(chunk) + 1, np.bool_)
            is_inert[_escaped(places[is_backslash])] = True
            self._is_escaped = bool(is_inert[-1])
            is_kept = ~(is_backslash | is_inert[places])
            kinds, places = kinds[is_kept], places[is_kept]
        self._count(kinds, places)

    def _count(self, kinds: Bytes, places: Places) -> None:
        is_quote = kinds == _QUOTE
        num_quotes = np.cumsum(is_quote, dtype=np.int32)
        outside = kinds[((num_quotes + self._is_in_string) % 2 == 0) & ~is_quote]
        if len(num_quotes) and num_quotes[-1]:
            self._is_in_string ^= bool(num_quotes[-1] % 2)
            self._string_begin = self._at + int(places[np.flatnonzero(is_quote)[-1]]) + 1
            self.num_values += int(num_quotes[-1]) * STRING_VALUES // 2
        if len(outside):
            levels = np.cumsum(_STEPS[outside]) + self._level
            self.depth, self._level = max(self.depth, int(levels.max())), int(levels[-1])
            self.num_values += int(_VALUES[outside].sum())


def _escaped(backslashes: Places) -> Places:
    """The places after runs of an odd number of backslashes."""
    lasts = np.flatnonzero(np.append(np.diff(backslashes) != 1, True))
    lengths = np.diff(lasts, prepend=-1)
    odd: Places = backslashes[lasts[lengths % 2 == 1]]
    return odd + 1


def is_plain_value(body: Body, begin: int, end: int) -> bool:
    """Whether a string is printable ASCII without escapes, except a few of slashes, and not the name of a member."""
    if end == len(body) or body[end + 1 : end + LOOKED_BACK].lstrip()[:1] == b":":
        return False
    content = np.frombuffer(body, np.uint8, end - begin, begin)
    if content.min() < ord(" ") or content.max() > ord("~"):
        return False
    first = body.find(b"\\", begin, end)
    return first < 0 or (body[first + 1] == ord("/") and _has_few_slash_escapes(content))


def _has_few_slash_escapes(content: Bytes) -> bool:
    """Whether only slashes are escaped, and few of them; some clients do that in base64 data."""
    if content[-1] == ord("\\"):  # it escapes the quote, which does not end the string
        return False
    num = 0
    for start in range(0, len(content), CHUNK):
        part = content[start : start + CHUNK + 1]
        places = np.flatnonzero(part[:CHUNK] == ord("\\"))
        num += len(places)
        if num > len(content) // MIN_CHARS_PER_ESCAPE or (len(places) and not (part[places + 1] == ord("/")).all()):
            return False
    return True


def _trailing_backslashes(body: Body, begin: int, end: int) -> int:
    for start in (max(begin, end - LOOKED_BACK), begin):
        part = body[start:end]
        num = len(part) - len(part.rstrip(b"\\"))
        if num < len(part):
            return num
    return end - begin


def _too_large(text: str) -> RequestError:
    return RequestError(text, code="body_too_large", status=413)
