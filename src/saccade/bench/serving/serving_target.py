"""Reads what a server reports about itself: model, tokenizer, graphs, metrics. All but the model is optional."""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from saccade.bench.load.client import Client
from saccade.bench.load.metrics_text import parse_metrics
from saccade.bench.load.workload_text import LEAD, WORDS, WordList
from saccade.errors import ConfigError

COUNTED_AT_ONCE = 16
TARGET_FLAGS = "--base-url, --host, --port"


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """Facts that do not change while the server runs."""

    model: str
    max_model_len: int | None = None
    version: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    owner: str = ""

    @property
    def is_saccade(self) -> bool:
        return "saccade" in json.dumps([self.version, self.info]).lower()


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters of a server at one moment."""

    graphs: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)


async def describe(client: Client, model: str, *, prefer: str = "", flags: str = TARGET_FLAGS) -> TargetFacts:
    """Describes the server, which must name its model unless the user did. `prefer` is chosen if the server has it;
    `flags` are the ones that selected the server, for error messages."""
    url = client.target.url
    try:
        status, data = await client.ask("GET", "/v1/models")
    except TimeoutError:
        raise ConfigError(f"{url} does not answer; is it up? ({flags})") from None
    except OSError as error:
        raise ConfigError(f"{url} cannot be reached: {error.strerror or error}; is it up? ({flags})") from None
    cards = _object(data).get("data") if status == 200 else None
    found = [card for card in cards or () if isinstance(card, dict)]
    wanted = model or prefer
    card = next((card for card in found if card.get("id") == wanted), found[0] if found and not model else {})
    name = model or card.get("id") or prefer
    if not name:
        raise _nameless(client, status, flags)
    version = (await _json(client, "/version")).get("version", "")
    owner = str(card.get("owned_by", ""))
    info = await _json(client, "/server_info")
    return TargetFacts(name, card.get("max_model_len"), f"{owner} {version}".strip(), info, owner)


def _nameless(client: Client, status: int, flags: str) -> ConfigError:
    """The error for a server that does not say which model it serves."""
    url = client.target.url
    if status in (401, 403):
        problem = "refuses the given key" if client.target.api_key else "asks for a key"
        key_flag = "--api-key or OPENAI_API_KEY" if flags == TARGET_FLAGS else "--against-api-key"
        return ConfigError(f"{url} {problem} (HTTP {status}); give a valid one ({key_flag})")
    told = "" if status == 200 else f" (HTTP {status} from /v1/models)"
    return ConfigError(f"{url} does not say which model it serves{told}; name one (--model)")


async def read_counters(client: Client) -> Reading:
    phases = (await _json(client, "/graphs")).get("phases", ())
    items = phases.values() if isinstance(phases, dict) else phases
    metrics, gauges = parse_metrics((await _read(client, "/metrics")).decode("utf-8", "replace"))
    return Reading([phase for phase in items if isinstance(phase, dict)], metrics, gauges)


async def count_words(client: Client, model: str) -> WordList:
    """Counts the tokens that each word adds to a text with the server's tokenizer, if it has an endpoint for that."""
    base = await _count(client, model, LEAD)
    if base is None:
        return WordList()
    counts = await _count_all(client, model, [f"{LEAD} {word}" for word in WORDS])
    costs = [count - base for count in counts if count is not None and count > base]
    return WordList(WORDS, tuple(costs), base) if len(costs) == len(WORDS) else WordList()


async def count_template(client: Client, model: str) -> int | None:
    """Counts the tokens that the chat template adds to a text; None if the server has no endpoint for that."""
    text = await _count(client, model, LEAD)
    turns = [{"role": "user", "content": LEAD}]
    chat = await _json(client, "/tokenize", {"model": model, "messages": turns, "add_generation_prompt": True})
    count = chat.get("count")
    return max(count - text, 0) if isinstance(count, int) and text is not None else None


async def retokenize(client: Client, model: str, texts: Sequence[str]) -> int | None:
    """Counts the tokens of all texts with the server's tokenizer; None if it has no endpoint for that."""
    several = Counter(text for text in texts if text)
    counts = await _count_all(client, model, list(several))
    known = [count * times for count, times in zip(counts, several.values(), strict=True) if count is not None]
    return sum(known) if len(known) == len(counts) else None


def metrics_between(before: Reading, after: Reading) -> dict[str, float]:
    changes = {name: value - before.metrics.get(name, 0.0) for name, value in after.metrics.items()}
    return {name: change for name, change in changes.items() if change}


def graphs_between(before: Reading, after: Reading) -> list[dict[str, Any]]:
    """For each phase: replays, fallbacks by reason, rows and padding between the readings, and its graphs."""
    old = {phase.get("phase"): phase for phase in before.graphs}
    return [_phase_between(old.get(phase.get("phase"), {}), phase) for phase in after.graphs]


def _phase_between(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    real, padded = (int(new.get(name, 0)) - int(old.get(name, 0)) for name in ("real_rows", "padded_rows"))
    fallbacks = _count_between(old.get("fallbacks"), new.get("fallbacks"))
    graphs = new.get("graphs") or ()
    return {
        "phase": new.get("phase", ""),
        "replays": sum(_count_between(old.get("replays"), new.get("replays")).values()),
        "fallbacks": sum(fallbacks.values()),
        "fallbacks_by_reason": fallbacks,
        "real_rows": real,
        "padded_rows": padded,
        "padding": padded / real if real else 0.0,
        "graphs": len(graphs),
        "graph_bytes": sum(int(graph.get("bytes", 0)) for graph in graphs),
        "captures": int(new.get("captures", 0)) - int(old.get("captures", 0)),
    }


def _count_between(old: Any, new: Any) -> dict[str, int]:
    """The growth of counters by name; a plain number is a single counter."""
    before = old if isinstance(old, dict) else {"all": old or 0}
    after = new if isinstance(new, dict) else {"all": new or 0}
    changes = {name: int(value) - int(before.get(name, 0)) for name, value in after.items()}
    return {name: change for name, change in changes.items() if change}


async def _count_all(client: Client, model: str, texts: Sequence[str]) -> list[int | None]:
    places = asyncio.Semaphore(COUNTED_AT_ONCE)

    async def count(text: str) -> int | None:
        async with places:
            return await _count(client, model, text)

    return list(await asyncio.gather(*map(count, texts)))


async def _count(client: Client, model: str, text: str) -> int | None:
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    reply = await _json(client, "/tokenize", body)
    count = reply.get("count", len(reply.get("tokens", ()))) if reply else None
    return count if isinstance(count, int) else None


async def _json(client: Client, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    return _object(await _read(client, path, body))


async def _read(client: Client, path: str, body: dict[str, Any] | None = None) -> bytes:
    """The body of a reply with status 200, else nothing."""
    try:
        status, data = await client.ask("POST" if body is not None else "GET", path, body)
    except OSError:
        return b""
    return data if status == 200 else b""


def _object(data: bytes) -> dict[str, Any]:
    """Empty for what is no JSON object."""
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
