"""A fuzzer for our text parsers: media URLs, origins, tool calls, reasoning, limits files.

Case i of a seed is always the same text: `python -m tests.server.fuzz_texts --parser tools --seed 7 --only 1234` runs
one again, and `--minutes 30` runs new ones for that long. A parser returns a valid result or refuses with the right
error; one that reads a stream returns the same however the text is cut.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from random import Random

from saccade.errors import ConfigError, RequestError
from saccade.inputs.media.fetch import is_public, parse_url
from saccade.server.http.origins import is_foreign_page
from saccade.server.sharing.caller_limits import LimitsFile, read_limits
from saccade.server.text.reasoning import ReasoningParser
from saccade.server.text.tool_parser import CallArguments, CallBegin, Content, HermesParser, LlamaParser, ToolEvent
from tests.fuzzing import fuzz, fuzz_reader

MAX_CPU_S = 5.0  # for a text of a few kilobytes, which should take microseconds
URL_PIECES = (
    *(
        "http://",
        "https://",
        "HTTP://",
        "file://",
        "data:image/png;base64,",
        "//",
        "a.org",
        "127.0.0.1",
        "[::1]",
        "[",
        "]",
    ),
    *(
        "localhost",
        "0x7f.1",
        "2130706433",
        "[::ffff:10.0.0.1]",
        "[fe80::1%25eth0]",
        "169.254.169.254",
        "xn--a",
        "é",
        "%00",
    ),
    *(
        "@",
        "user:pw@",
        ":",
        ":80",
        ":65536",
        ":0",
        "/",
        "/a/b",
        "?",
        "#",
        "\\",
        " ",
        "\n",
        "\0",
        "..",
        ".",
        "%2f",
        "%",
        "\u0661",
    ),
)
TOOL_PIECES = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<tool",
        "_call>",
        "</",
        "<",
        ">",
        "\n",
        " ",
        "\t",
        "word",
        "é",
        "😀",
        "\\",
        '"',
        '\\"',
    ),
    *(
        '{"name": "f", "arguments": {}}',
        '{"name": "g", "parameters": {"x": [1, "</tool_call>"]}}',
        '{"name": ""}',
        "{",
        "}",
    ),
    *(
        '{"name": "f", "arguments": {"a": ',
        '"arguments": "{}"',
        ";",
        "; ",
        "null",
        "NaN",
        "[" * 2000,
        "1e999",
        "1" * 5000,
    ),
)
THINK_PIECES = (
    "<think>",
    "</think>",
    "<th",
    "ink>",
    "</",
    "<",
    "\n",
    "\n\n",
    " ",
    "a",
    "word ",
    "é",
    "<b>",
    "</think",
    ">",
)
LIMIT_PIECES = (
    *(
        "default:",
        "callers:",
        "\n",
        "\n  ",
        "\n    ",
        "  a:",
        "key: 'k'",
        "key: k2",
        "max_requests: 5",
        "weight: 2.5",
        ": ",
    ),
    *(
        "priority: true",
        "queue_share: 0.5",
        "tokens_per_minute: 1e3",
        "{",
        "}",
        "[",
        "]",
        ", ",
        "&x ",
        "*x",
        "<<: *x",
        "!!set",
    ),
    *(
        "max_requests: " + "9" * 400,
        "weight: 0x" + "f" * 5000,
        "weight: .inf",
        "weight: .nan",
        "2024-13-45",
        "? ",
        "- ",
        "~",
    ),
    *(
        "!!python/object:os.system",
        "--- ",
        "...",
        "\t",
        "\0",
        "é",
        "'",
        '"',
        "# c",
        "| ",
        "> ",
        "%YAML 9.9",
        "1:2:3",
        "null",
    ),
)
# A few bytes that expand to 10**9 values.
BOMB = "\n".join(
    [
        "default:\n  weight:\n    - &a [1,1,1,1,1,1,1,1,1]",
        *(f"    - &{b} [{','.join([f'*{a}'] * 9)}]" for a, b in pairwise("abcdefghi")),
    ]
)
LIMIT_TEXTS = (
    'default: {max_requests: 64}\ncallers:\n  alice: {key: "sk-1", weight: 2, priority: true}\n',
    "callers:\n  b: {key: sk-2, tokens_per_minute: 100000, queue_share: 0.5}\n",
    BOMB,
    BOMB.replace("default", "callers"),
    "default: {max_requests: " + "9" * 400 + "}\n",
    "default: {weight: 0x" + "f" * 5000 + "}\n",
)


class FoundError(AssertionError):
    """A case without a valid result or a proper refusal."""


@dataclass(frozen=True, slots=True)
class TextCase:
    parser: str
    seed: int
    index: int
    text: str


def make_case(parser: str, seed: int, index: int) -> TextCase:
    random = Random(f"{parser}:{seed}:{index}")
    pieces = PIECES[parser]
    text = "".join(random.choices(pieces, k=random.randint(0, 12)))
    if parser == "urls" and random.random() < 0.7:
        text = random.choice(("http://", "https://")) + random.choice(("a.org", "1.2.3.4", "[2606::1]")) + text
    if parser == "limits" and random.random() < 0.6:
        base = random.choice(LIMIT_TEXTS)
        at = random.randrange(len(base) + 1)
        text = base[:at] + random.choice((text, text[:10], "")) + base[at + random.choice((0, 0, 1, 9)) :]
    return TextCase(parser, seed, index, text)


def check(case: TextCase) -> None:
    begun = time.thread_time()
    try:
        CHECKS[case.parser](case.text, Random(f"{case.seed}:{case.index}:cuts"))
    except FoundError:
        raise
    except Exception as error:
        raise FoundError(f"{type(error).__name__}: {str(error)[:200]}") from error
    if (used := time.thread_time() - begun) > MAX_CPU_S:
        raise FoundError(f"{used:.1f} seconds of CPU time")


def _check_url(text: str, random: Random) -> None:
    is_public(text)
    is_foreign_page(text, "localhost:8000")
    is_foreign_page("http://localhost:8000", text)
    try:
        found = parse_url(text)
    except RequestError as error:
        if not str(error).isprintable() or error.status != 400:
            raise FoundError(f"refused with {error.status}: {error!r}") from error
        return
    is_plain = found.host.isascii() and found.host and not set(found.host) & set("/\\@[]#?% \n\0")
    if not is_plain or not 1 <= found.port <= 65535 or not found.target.startswith("/") or not found.target.isascii():
        raise FoundError(f"{found} passed")
    if parse_url(found.url) != found:
        raise FoundError(f"{found} is parsed differently the second time")


def _check_tools(text: str, random: Random) -> None:
    for new in (HermesParser, LlamaParser):
        for case in product((True, False), repeat=3):
            is_parallel, is_streamed, is_cut = case
            seen = []
            for pieces in ([text], _cut(text, random), list(text[:300]) + [text[300:]]):
                parser = new(is_parallel=is_parallel, is_streamed=is_streamed, new_id=lambda: "id")
                events = [event for piece in pieces for event in parser.push(piece)]
                seen.append(_joined(events + parser.finish(is_cut=is_cut)))
            if seen[0] != seen[1] or seen[0] != seen[2]:
                raise FoundError(f"{new.__name__}, parallel, streamed, cut {case}: {seen}"[:500])
            if not seen[0][1] and seen[0][0] != text:
                raise FoundError(f"{new.__name__}: text was lost: {seen[0][0][:200]!r}")
            if is_streamed and _is_whole(seen[0][1]):
                parser = new(is_parallel=is_parallel, new_id=lambda: "id")
                whole = _joined(parser.push(text) + parser.finish(is_cut=is_cut))
                if seen[0] != whole and "<" not in whole[0] and "{" not in whole[0]:
                    raise FoundError(f"{new.__name__}: {seen[0]} in a stream, {whole} otherwise"[:500])


def _joined(events: list[ToolEvent]) -> tuple[str, list[tuple[str, str]]]:
    """The text, and the calls with their arguments joined."""
    content, calls = "", list[tuple[str, str]]()
    for event in events:
        match event:
            case Content(text):
                content += text
            case CallBegin(_, _, name):
                calls.append((name, ""))
            case CallArguments(index, text):
                calls[index] = (calls[index][0], calls[index][1] + text)
    return content, calls


def _is_whole(calls: list[tuple[str, str]]) -> bool:
    try:
        return all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
    except (ValueError, RecursionError):
        return False


def _check_reasoning(text: str, random: Random) -> None:
    for is_open in (True, False):
        seen = []
        for pieces in ([text], _cut(text, random), list(text)):
            parser = ReasoningParser(is_open=is_open)
            said = [*(parser.push(piece) for piece in pieces), parser.finish()]
            seen.append(("".join(thought for thought, _ in said), "".join(answer for _, answer in said)))
        if seen[0] != seen[1] or seen[0] != seen[2]:
            raise FoundError(f"open {is_open}: {seen}")
        if len(seen[0][0]) + len(seen[0][1]) > len(text):
            raise FoundError(f"open {is_open}: text was added: {seen[0]}")


def _check_limits(text: str, random: Random) -> None:
    with tempfile.NamedTemporaryFile("wb", suffix=".yaml") as file:
        file.write(text.encode("utf-8", "surrogatepass"))
        file.flush()
        try:
            found = read_limits(file.name)
        except ConfigError as error:
            if "--limits" not in str(error) or len(str(error)) > 20_000:
                raise FoundError(f"refused with {str(error)[:200]}") from error
            return
    _check_figures(found)


def _check_figures(found: LimitsFile) -> None:
    if set(found.keys.values()) != found.callers.keys():
        raise FoundError(f"callers and their keys do not match: {found}")
    for limits in (found.default, *found.callers.values()):
        if not (0 < limits.weight <= 1000 and 0 < limits.queue_share <= 1 and limits.max_requests >= 0):
            raise FoundError(f"{limits} passed")


def _cut(text: str, random: Random) -> list[str]:
    places = sorted({0, len(text), *(random.randrange(len(text) + 1) for _ in range(random.randint(0, 9)))})
    return [text[begin:end] for begin, end in pairwise(places)]


PIECES = {"urls": URL_PIECES, "tools": TOOL_PIECES, "reasoning": THINK_PIECES, "limits": LIMIT_PIECES}
CHECKS: dict[str, Callable[[str, Random], None]] = {
    "urls": _check_url,
    "tools": _check_tools,
    "reasoning": _check_reasoning,
    "limits": _check_limits,
}


def run_cases(parser: str, seed: int, indices: Iterator[int]) -> Iterator[tuple[TextCase, FoundError | None]]:
    for index in indices:
        case = make_case(parser, seed, index)
        try:
            check(case)
        except FoundError as error:
            yield case, error
        else:
            yield case, None


def main() -> int:
    reader = fuzz_reader(__doc__)
    reader.add_argument("--parser", choices=sorted(CHECKS), required=True)
    given = reader.parse_args()
    return fuzz(given, partial(run_cases, given.parser), flags=f"--parser {given.parser} ")


if __name__ == "__main__":
    sys.exit(main())
