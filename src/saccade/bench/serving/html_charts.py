"""Self-contained SVG charts: no scripts, nothing to load. Colors are CSS variables of the page."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from saccade.bench.load.client_reply import Outcome

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 14, 38
NUM_TICKS = 6
NUM_COLOURS = 6  # --series-0 and so on
TIMELINE_WIDTH, TIMELINE_HEIGHT = 1140, 420
THICKEST_ROW = 6.0


@dataclass(frozen=True, slots=True)
class Axis:
    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = (self.high - self.low) or 1.0
        return round(self.start + (value - self.low) / span * (self.end - self.start), 2)


def distribution(title: str, series: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Draws cumulative distributions from evenly spaced quantiles in ms; empty if no series has any."""
    drawn = [(index, name, values) for index, (name, values) in enumerate(series) if values]
    if not drawn:
        return ""
    most = max(values[-1] for _, _, values in drawn)
    x = Axis(0.0, most * 1.02 or 1.0, LEFT, WIDTH - RIGHT)
    y = Axis(0.0, 100.0, HEIGHT - BOTTOM, TOP)
    parts = [_frame(x, y, "ms", "% of them at most")]
    for index, name, values in drawn:
        share = 100 / (len(values) - 1) if len(values) > 1 else 100.0
        points = " ".join(f"{x(value)},{y(place * share)}" for place, value in enumerate(values))
        middle, tail = values[len(values) // 2], values[min(len(values) - 1, round(0.99 * (len(values) - 1)))]
        tip = escape(f"{name}: median {middle:.1f} ms, p99 {tail:.1f} ms, longest {values[-1]:.1f} ms")
        colour = f"var(--series-{index % NUM_COLOURS})"
        line = f'points="{points}" fill="none" stroke="{colour}" stroke-width="2"'
        parts.append(f"<polyline {line}><title>{tip}</title></polyline>")
        ends = f'x1="{x(middle)}" x2="{x(middle)}" y1="{y(0)}" y2="{y(50)}"'
        parts.append(f'<line {ends} stroke="{colour}" stroke-dasharray="3 3"/>')
    return _figure(title, "".join(parts), WIDTH, HEIGHT, [(index, name) for index, name, _ in drawn])


def timeline(title: str, outcomes: Sequence[Outcome]) -> str:
    """Draws one row per request, in order of sending: time to first token, then time to the end. Failures stand out."""
    if not outcomes:
        return ""
    rows = sorted(outcomes, key=lambda outcome: outcome.sent_s)
    step = min(THICKEST_ROW, TIMELINE_HEIGHT / len(rows))
    height = step * len(rows)
    last = max(outcome.sent_s + max(outcome.e2el_s, outcome.ttft_s) for outcome in rows)
    x = Axis(0.0, last * 1.01 or 1.0, LEFT, TIMELINE_WIDTH - RIGHT)
    y = Axis(0.0, float(len(rows)), TOP, TOP + height)
    parts = [_frame(x, y, "s since the first was sent", "requests")]
    parts += [_row(outcome, x, y(place), step) for place, outcome in enumerate(rows)]
    return _figure(title, "".join(parts), TIMELINE_WIDTH, round(TOP + height + BOTTOM, 1), [])


def bar(shares: Sequence[tuple[str, float]]) -> str:
    """Draws shares of a whole side by side; negative shares have no width."""
    whole = sum(max(share, 0.0) for _, share in shares) or 1.0
    x, parts = 0.0, []
    for index, (name, share) in enumerate(shares):
        width = max(share, 0.0) / whole * TIMELINE_WIDTH
        tip = f"<title>{escape(name)}: {share:.1%}</title>"
        colour = f"var(--series-{index % NUM_COLOURS})"
        parts.append(f'<rect x="{x:.2f}" y="0" width="{width:.2f}" height="22" fill="{colour}">{tip}</rect>')
        x += width
    named = [(index, f"{name} {share:.0%}") for index, (name, share) in enumerate(shares)]
    return _figure("", "".join(parts), TIMELINE_WIDTH, 22, named)


def ticks(low: float, high: float) -> list[float]:
    """Picks about six round numbers within the range."""
    span = high - low
    if span <= 0:
        return [low]
    rough = span / NUM_TICKS
    size = 10 ** floor(log10(rough))
    step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= rough)
    return [round(index * step, 10) for index in range(ceil(low / step), floor(high / step) + 1)]


def _row(outcome: Outcome, x: Axis, top: float, step: float) -> str:
    begin, first = outcome.sent_s, outcome.sent_s + outcome.ttft_s
    end = max(outcome.sent_s + outcome.e2el_s, first)
    thickness = round(max(step * 0.8, 0.4), 2)
    if not outcome.is_ok:
        tip = escape(f"request {outcome.index} failed: {outcome.error}")
        return _rect(x(begin), max(x(end) - x(begin), 4.0), top, thickness, "var(--failed)", tip)
    tip = f"request {outcome.index}: first token {outcome.ttft_s * 1e3:.1f} ms, end {outcome.e2el_s * 1e3:.1f} ms"
    drawn = _rect(x(begin), max(x(first) - x(begin), 0.5), top, thickness, "var(--series-0)", tip)
    if end > first:
        drawn += _rect(x(first), x(end) - x(first), top, thickness, "var(--series-1)", tip)
    return drawn


def _rect(x: float, width: float, y: float, height: float, colour: str, tip: str) -> str:
    place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height}"'
    return f'<rect {place} fill="{colour}"><title>{tip}</title></rect>'


def _frame(x: Axis, y: Axis, x_name: str, y_name: str) -> str:
    bottom = max(y.start, y.end)
    parts = []
    for tick in ticks(x.low, x.high):
        parts.append(f'<line class="grid" x1="{x(tick)}" x2="{x(tick)}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{x(tick)}" y="{bottom + 15}" text-anchor="middle">{tick:g}</text>')
    for tick in ticks(y.low, y.high):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{x.end}" y1="{y(tick)}" y2="{y(tick)}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4}" text-anchor="end">{tick:g}</text>')
    middle = (LEFT + x.end) / 2
    parts.append(f'<text x="{middle}" y="{bottom + 31}" text-anchor="middle">{escape(x_name)}</text>')
    centre = (TOP + bottom) / 2
    turned = f'transform="rotate(-90 12 {centre})"'
    parts.append(f'<text x="12" y="{centre}" text-anchor="middle" {turned}>{escape(y_name)}</text>')
    return "".join(parts)


def _figure(title: str, inside: str, width: float, height: float, named: Sequence[tuple[int, str]]) -> str:
    head = f"<figcaption>{escape(title)}</figcaption>" if title else ""
    keys = "".join(
        f'<span><i style="background:var(--series-{index % NUM_COLOURS})"></i>{escape(name)}</span>'
        for index, name in named
        if name
    )
    legend = f'<div class="legend">{keys}</div>' if keys else ""
    svg = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">{inside}</svg>'
    return f"<figure>{head}{svg}{legend}</figure>"
