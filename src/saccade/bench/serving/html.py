"""`--report`: a serving benchmark as one self-contained HTML file."""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from rich import markup
from rich.table import Table
from rich.text import Text

from saccade.bench.serving.html_charts import bar, distribution, timeline
from saccade.bench.serving.serving_report import TITLES, block, failure_lines, graph_table, stage_table
from saccade.bench.serving.serving_results import COLOURS, Named
from saccade.bench.serving.serving_run import ServingRun

CLASSES = {colour: verdict for verdict, colour in COLOURS.items()}

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #667080; --line: #dde1e6; --ground: #ffffff; --card: #f6f7f9;
  --series-0: #2f6fde; --series-1: #e08a1e; --series-2: #199d88; --series-3: #b4479d; --series-4: #7a6ff0;
  --series-5: #8a9a2b; --failed: #d13438; --good: #14804a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7eaee; --soft: #98a2b0; --line: #333a44; --ground: #14171b;
  --card: #1d2127; --series-0: #6ea0ff; --series-1: #f3ac4d; --series-2: #4fc7b2; --series-3: #db7fc8;
  --series-4: #a79fff; --series-5: #bccb5c; --failed: #ff6b6e; --good: #5fce93; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 32px 24px 64px; max-width: 1200px; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 36px 0 10px; }
p.sub { color: var(--soft); margin: 0 0 20px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
.card { background: var(--card); border-radius: 8px; padding: 12px 14px; }
.card b { display: block; font-size: 23px; font-variant-numeric: tabular-nums; }
.card span { color: var(--soft); font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 18px; }
figure { margin: 0; } figcaption { font-weight: 600; margin-bottom: 4px; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--soft); font-size: 11px; }
svg .grid { stroke: var(--line); stroke-width: 1; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; color: var(--soft); font-size: 13px; margin-top: 6px; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { padding: 4px 14px 4px 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 600; }
td.better { color: var(--good); } td.worse, .failed { color: var(--failed); }
pre { background: var(--card); border-radius: 8px; padding: 14px; overflow-x: auto; font-size: 13px; }
"""
CARDS = (
    ("requests/s", "request_throughput", ".1f"),
    ("mean TTFT, ms", "mean_ttft_ms", ".1f"),
    ("median TTFT, ms", "median_ttft_ms", ".1f"),
    ("p99 TTFT, ms", "p99_ttft_ms", ".1f"),
    ("vision tokens/s", "vision_token_throughput", ".0f"),
    ("output tokens/s", "output_throughput", ".1f"),
    ("failed", "failed", "d"),
)


def page(
    runs: Sequence[ServingRun],
    named: Named,
    comparison: Table | None = None,
    verdicts: Sequence[str] = (),
    warnings: Sequence[str] = (),
) -> str:
    """Writes the report of one or more runs. `named` has the data of all compared results, these runs last. `warnings`
    say what is missing, and why they should not be compared."""
    model = str(runs[0].environment["model"])
    parts = [_head(model, runs[0])]
    if len(runs) == 1:
        parts.append(_cards(runs[0].figures))
    if comparison is not None:
        title = Text.from_markup(str(comparison.title)).plain
        said = "".join(f"<p>{escape(line)}</p>" for line in verdicts)
        parts.append(f"<h2>{escape(title[0].upper() + title[1:])}</h2>{_table(comparison)}{said}")
    parts += [_red(warnings), _charts(named)]
    for run, (name, _) in zip(runs, named[-len(runs) :], strict=True):
        if len(runs) > 1:
            parts.append(f"<h2>{escape(name)}</h2>{_cards(run.figures)}")
        parts += _run(run)
    for run in runs:
        parts.append(_pairs(f"Environment of {run.name}" if len(runs) > 1 else "Environment", run.environment))
    for group, values in runs[0].settings.items():
        parts.append(_pairs(f"Settings: {group}", values))
    title = escape(f"{model}: serving benchmark")
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    return (
        f'<!doctype html><html lang="en"><head>{meta}<title>{title}</title><style>{STYLE}</style></head>'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _head(model: str, run: ServingRun) -> str:
    workload, load = run.settings["workload"], run.settings["load"]
    images = f"{workload['image_count']} x {workload['image_resolution']}, " if run.figures["total_images"] else ""
    limit = f"concurrency {load['max_concurrency']}" if load["max_concurrency"] else "no limit of concurrency"
    said = f"{len(run.outcomes)} requests, {images}rate {load['request_rate']}, {limit}, {run.environment['date']}"
    return f'<h1>{escape(model)}</h1><p class="sub">{escape(said)}</p>'


def _run(run: ServingRun) -> Iterable[str]:
    if run.failed:
        yield f'<h2 class="failed">Failures</h2>{_red(failure_lines(run))}'
    yield _red(run.warnings)
    yield f"<h2>Requests</h2>{timeline('to the first token, then to the end', run.outcomes)}"
    if (stages := stage_table(run.stages)) is not None:
        yield f"<h2>Where the time goes</h2>{bar([(name, told['share']) for name, told in run.stages.items()])}"
        yield _table(stages)
    if (graphs := graph_table(run.graphs)) is not None:
        yield f"<h2>Graphs</h2>{_table(graphs)}"
    yield f"<h2>Figures</h2><pre>{escape(chr(10).join(block(run)))}</pre>"


def _red(lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="failed">{items}</ul>' if items else ""


def _cards(figures: Mapping[str, Any]) -> str:
    shown = [(label, format(figures[key], form)) for label, key, form in CARDS if figures.get(key) is not None]
    cards = "".join(f'<div class="card"><b>{value}</b><span>{label}</span></div>' for label, value in shown)
    return f'<div class="cards">{cards}</div>'


def _charts(named: Named) -> str:
    """Draws one chart per metric, with the distributions of all runs."""
    drawn = []
    for metric in ("ttft", "itl", "e2el", "tpot"):
        series = [(name, run.get(f"{metric}_quantiles_ms") or ()) for name, run in named]
        drawn.append(distribution(TITLES[metric], series))
    return f'<h2>Distributions</h2><div class="charts">{"".join(drawn)}</div>'


def _pairs(title: str, values: Mapping[str, Any]) -> str:
    table = Table("", "")
    for name, value in values.items():
        if value not in ("", None, {}):
            shown = json.dumps(value) if isinstance(value, dict | list) else str(value)
            table.add_row(markup.escape(name), markup.escape(shown))
    return f"<h2>{escape(title)}</h2>{_table(table)}" if table.rows else ""


def _table(table: Table) -> str:
    """Converts a terminal table to HTML, with its colors as classes."""
    head = "".join(f"<th>{escape(Text.from_markup(str(column.header)).plain)}</th>" for column in table.columns)
    rows = zip(*(column.cells for column in table.columns), strict=True)
    body = "".join(f"<tr>{''.join(_cell(str(cell)) for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _cell(cell: str) -> str:
    text = Text.from_markup(cell)
    kind = CLASSES.get(str(text.spans[0].style), "") if text.spans else ""
    return f'<td class="{kind}">{escape(text.plain)}</td>'
