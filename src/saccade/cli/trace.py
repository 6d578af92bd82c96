"""`saccade trace`: records a running server for some seconds, into a file for Perfetto."""

import json
import ssl
import sys
from argparse import Namespace
from dataclasses import dataclass
from http.client import InvalidURL
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from rich.console import Console

from saccade.cli.parser import Parser, settings_from
from saccade.config import check_sent_key, setting
from saccade.errors import ConfigError, SaccadeError
from saccade.terminal import write_file
from saccade.wire.trace_records import MAX_TRACE_S

ANSWER_S = 120.0  # time for the reply, beyond the seconds of the trace


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceSettings:
    """Which server to record, and for how long."""

    url: str = setting("http://127.0.0.1:8000", "address of the server")
    seconds: float = setting(5.0, f"seconds to record, at most {MAX_TRACE_S:g}")
    output: str = setting("trace.json", "file to write; - for standard output")
    admin_api_key: str = setting("", "the server's --admin-api-key")

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= MAX_TRACE_S:
            raise ConfigError(f"seconds is {self.seconds:g}; allowed are up to {MAX_TRACE_S:g} (--seconds)")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url is {self.url}; it must begin with http:// or https:// (--url)")
        check_sent_key(self.admin_api_key, "--admin-api-key")


def new_parser(name: str) -> Parser:
    about = (
        "Record what a running server does: a track for each request (queued, prepared, prefill, decode), a track for "
        "each kind of pass with its graph and padding, and the server's load. Open the file at https://ui.perfetto.dev."
    )
    parser = Parser(name, about=about)
    parser.add_settings(TraceSettings)
    return parser


def run(flags: Namespace) -> int:
    asked, console = settings_from(flags, TraceSettings), Console(stderr=True)
    if not asked.admin_api_key:
        raise ConfigError("a trace needs the admin key the server was started with (--admin-api-key)")
    with console.status(f"recording {asked.url} for {asked.seconds:g} s"):
        text = fetch(asked)
    try:
        events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    except (ValueError, KeyError, TypeError):
        raise SaccadeError(f"{asked.url} did not answer with a trace; is it a Saccade server? (--url)") from None
    if asked.output == "-":
        sys.stdout.write(text)
        return 0
    write_file(asked.output, text, "--output")
    tracks = {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}
    console.print(f"{asked.output}: {len(events)} events on {len(tracks)} tracks; open it at https://ui.perfetto.dev")
    if not tracks:
        console.print("nothing ran during the recording; send requests meanwhile")
    return 0


def fetch(asked: TraceSettings) -> str:
    """Returns the trace as text. Raises with the reason if the server refuses or cannot be reached."""
    headers = {"Authorization": f"Bearer {asked.admin_api_key}"}
    try:
        request = Request(f"{asked.url.rstrip('/')}/trace?seconds={asked.seconds:g}", headers=headers)
        with build_opener(ProxyHandler({})).open(request, timeout=asked.seconds + ANSWER_S) as reply:
            return str(reply.read().decode())
    except HTTPError as error:
        raise SaccadeError(f"{asked.url} refused: {_reason(error)}") from None
    except (URLError, OSError, ssl.SSLError) as error:
        reason = getattr(error, "reason", error)
        raise SaccadeError(f"{asked.url} cannot be reached: {reason} (--url)") from None
    except (ValueError, InvalidURL) as error:
        raise SaccadeError(f"{asked.url} is no address of a server: {error} (--url)") from None


def _reason(error: HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {error.code}"
