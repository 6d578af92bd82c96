"""Reads a server's /metrics. Lines that are not understood are left out, whoever wrote them."""

import re
from contextlib import suppress

SAMPLE_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{[^}]*\})?\s+(\S+)")
LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


def parse_metrics(text: str) -> tuple[dict[str, float], dict[str, float]]:
    """Parses Prometheus text into values that only grow (counters; sums and counts of histograms) and gauges."""
    kinds: dict[str, str] = {}
    grown: dict[str, float] = {}
    gauges: dict[str, float] = {}
    for line in text.splitlines():
        match line.split():
            case ["#", "TYPE", name, kind]:
                kinds[name] = kind
        if (match := SAMPLE_LINE.match(line)) is None or match[1].endswith(("_bucket", "_created")):
            continue
        family = re.sub(r"_(total|sum|count)$", "", match[1])
        is_gauge = kinds.get(match[1]) == "gauge" or (match[1] == family and kinds.get(family) != "counter")
        with suppress(ValueError):
            (gauges if is_gauge else grown)[f"{match[1]}{match[2] or ''}"] = float(match[3])
    return grown, gauges


def family_and_labels(name: str) -> tuple[str, dict[str, str]]:
    """Splits the name of a sample."""
    family, _, labels = name.partition("{")
    return family, dict(LABEL.findall(labels))
