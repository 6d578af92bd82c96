"""Pages of the site that are generated from the code at build time, as a hook of mkdocs (mkdocs.yml)."""

import inspect
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import fields
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from saccade import LLM, SamplingParams
from saccade.cli import main
from saccade.cli.aliases import BUDGETS, GRAPH_WORDS, IGNORED_SWITCHES, IGNORED_VALUES, INSTEAD, REFUSED, SAME, SWITCHES
from saccade.cli.aliases import TRANSLATED as WORDS
from saccade.client.served import EngineReport
from saccade.server.figures.metrics import Facts, Metrics
from saccade.server.operators.openapi import build_document
from saccade.wire.engine_metrics import JobStats, SchedulerStats
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings
from saccade.wire.messages import Ready, StatsReply
from saccade.wire.tensor_parallel import TensorParallel

MAX_ROUTE_DEPTH = 2  # of nested objects whose fields are listed


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for path, make in PAGES.items():
        files.append(File.generated(config, path, content=make()))
    return files


def cli_page() -> str:
    text = io.StringIO()
    with redirect_stdout(text):
        main(["help", "--markdown"])
    return text.getvalue()


def api_page() -> str:
    document = build_document()
    schemas: Mapping[str, Any] = document["components"]["schemas"]
    parts = [
        "# HTTP API\n\nGenerated from the models that validate requests; a server has the same at `GET /openapi.json`, "
        "and at `/docs` to try. "
        "Fields that are not listed are ignored, and named in the header `x-ignored-fields` with `--strict`.\n"
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            key = "Needs no key." if not operation["security"] else "Needs a key, if the server has one."
            parts.append(f"## {method.upper()} {path}\n\n{operation['summary']} {key}\n")
            body = operation.get("requestBody")
            if body is not None:
                content = body["content"]["application/json"]
                name = content["schema"]["$ref"].rsplit("/", 1)[1]
                parts.append(f"```json\n{json.dumps(content['example'], indent=2)}\n```\n")
                parts.append(_fields_table(schemas[name], schemas))
    return "\n".join(parts)


def _fields_table(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    needed = schema.get("required", ())
    rows = []
    for name, field in schema.get("properties", {}).items():
        default = "needed" if name in needed else _code(field.get("default"))
        rows.append((f"`{name}`", _type(field, schemas), default))
    return _table(("field", "type", "default"), rows)


def _type(field: Mapping[str, Any], schemas: Mapping[str, Any], depth: int = 0) -> str:
    if "$ref" in field:
        name = field["$ref"].rsplit("/", 1)[1]
        inner = schemas[name].get("properties", {})
        listed = ", ".join(inner) if depth < MAX_ROUTE_DEPTH else ""
        return f"object of {listed}" if listed else "object"
    for key in ("anyOf", "oneOf"):
        if key in field:
            found = dict.fromkeys(_type(option, schemas, depth) for option in field[key])
            return " or ".join(found)
    if "enum" in field or "const" in field:
        return " or ".join(_code(value) for value in field.get("enum", [field.get("const")]))
    kind = field.get("type", "anything")
    if kind == "array":
        return f"list of {_type(field.get('items', {}), schemas, depth + 1)}"
    bounds = [f"{word} {field[key]}" for key, word in BOUNDS.items() if key in field]
    return " ".join([" or ".join(kind) if isinstance(kind, list) else str(kind), *bounds])


def python_page() -> str:
    parts = [
        "# Python\n\n`from saccade import LLM, SamplingParams`. `saccade.graphs` is described in "
        "[Graphs](../graphs.md).\n\n## LLM\n",
        f"{inspect.getdoc(LLM)}\n",
        _table(("keyword", "default", "meaning"), [*_settings(EngineSettings), *_settings(SchedulerSettings)]),
    ]
    for name, member in vars(LLM).items():
        if not name.startswith("_") and inspect.isfunction(member):
            signature = _short(str(inspect.signature(member)).replace("(self, ", "(").replace("(self)", "()"))
            parts.append(f"### LLM.{name}\n\n```python\n{name}{signature}\n```\n\n{inspect.getdoc(member)}\n")
    rows = [
        (f"`{field.name}`", f"`{_short(inspect.formatannotation(field.type))}`", _default(field))
        for field in fields(SamplingParams)
    ]
    parts.append(f"## SamplingParams\n\n{inspect.getdoc(SamplingParams)}\n\n")
    parts.append(_table(("field", "type", "default"), rows))
    return "\n".join(parts)


def _settings(kind: type[Any]) -> Iterator[tuple[str, ...]]:
    for field in fields(kind):
        yield f"`{field.name}`", _code(field.default), field.metadata["help"]


def _short(annotation: str) -> str:
    """Drops module names."""
    return re.sub(r"[a-z_]+\.[a-z_.]*(?=[A-Z])", "", annotation)


def _default(field: Any) -> str:
    made = field.default_factory() if callable(field.default_factory) else field.default
    return _code(made)


def metrics_page() -> str:
    scraped = Metrics("MODEL", "own").scrape(sample_facts())[0].decode()
    types = dict(line.split()[2:4] for line in scraped.splitlines() if line.startswith("# TYPE"))
    rows = []
    for line in scraped.splitlines():
        if line.startswith("# HELP saccade:"):
            _, _, name, text = line.split(" ", 3)
            own = name.removeprefix("saccade:")
            twin = f"`vllm:{own}`" if f"vllm:{own}" in types else ""
            rows.append((f"`{name}`", types[name], text, twin))
    head = (
        "# Metrics\n\n`GET /metrics`, as Prometheus reads it. `--metrics-style vllm` leaves only vLLM's names, and "
        "`--metrics-style sglang` SGLang's, beside what only Saccade has. `LLM.get_metrics()` has the same in Python.\n"
    )
    return "\n".join([head, _table(("name", "kind", "meaning", "vLLM's name"), rows)])


def sample_facts() -> Facts:
    """Facts of a server that has every metric: two ranks, a GPU, a fallback, a shadow check."""
    counts = {field.name: 1 for field in fields(SchedulerStats)}
    graph = {"key": "decode/full requests=1", "bytes": 1, "replays": 1, "capture_seconds": 1.0}
    rows = {"real_rows": 1, "padded_rows": 0}
    phase = {"phase": "decode", **rows, "selfcheck": 0.0, "graphs": [graph], "fallbacks": {"graphs are off": 1}}
    phase["shadow"] = {"equal": 1}
    stats = StatsReply(1, SchedulerStats(**counts), {"decode": phase}, gpu_bytes=1)
    ranks = TensorParallel(size=2, backend="NCCL")
    ready = Ready(SchedulerSettings(), kv_cache_tokens=1, block_size=1, gpu_bytes=1, ranks=ranks)
    return Facts(
        engines={"0": EngineReport(ready, stats)},
        num_pending=0,
        num_refused=0,
        time_to_ready_s=1.0,
        is_ready=True,
        media_jobs=JobStats(),
    )


def foreign_flags_page() -> str:
    mapped = [(f"`{flag}`", f"`--{field.replace('_', '-')}`") for flag, field in {**SAME, **BUDGETS}.items()]
    mapped += [(f"`{flag}`", f"`--{field.replace('_', '-')}`, {_code(to)}") for flag, (field, to) in SWITCHES.items()]
    mapped += [(f"`{flag}`", f"`--{field.replace('_', '-')}`, by {_code(of)}") for flag, (field, of) in WORDS.items()]
    mapped += [(f"`{flag}`", f"`--graphs {word}`") for flag, word in GRAPH_WORDS.items()]
    taken = [(f"`{flag}`", note) for flag, note in {**IGNORED_SWITCHES, **IGNORED_VALUES}.items()]
    refused = [
        (f"`{flag}`", reason, " ".join(_code(value) for value in sorted(neutral)))
        for flag, (reason, neutral) in REFUSED.items()
    ]
    return "\n".join(
        [
            "# Flags of vLLM and SGLang\n\nEvery flag of these engines that `saccade serve` knows and that has another "
            "name there. Flags with the same name and meaning are in [Command line](cli.md).\n",
            "## Mapped to a setting\n",
            _table(("flag", "here"), sorted(mapped)),
            "## Taken without effect\n\nThe server says in a line what happens instead.\n",
            _table(("flag", "what happens instead"), sorted(taken)),
            "## Refused\n\nThe server does not start, unless the flag has a value that changes nothing.\n",
            _table(("flag", "why, and what to do", "accepted values"), sorted(refused)),
            "## Environment variables\n\nNone of them is read; the server logs a line for each that is set.\n",
            _table(("variable", "instead"), sorted((f"`{name}`", note) for name, note in INSTEAD.items())),
        ]
    )


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join(_lines(head, rows)) + "\n"


def _lines(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(map(_cell, row))} |"


def _cell(text: str) -> str:
    """Joins lines, and escapes bars outside of code, which would end the cell."""
    parts = text.replace("\n", " ").split("`")
    return "`".join(part if at % 2 else part.replace("|", "\\|") for at, part in enumerate(parts))


def _code(value: Any) -> str:
    if value is None:
        return ""
    return f"`{value!r}`" if isinstance(value, str) else f"`{value}`"


BOUNDS = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}
PAGES: dict[str, Callable[[], str]] = {
    "reference/cli.md": cli_page,
    "reference/api.md": api_page,
    "reference/python.md": python_page,
    "reference/metrics.md": metrics_page,
    "reference/foreign_flags.md": foreign_flags_page,
}
