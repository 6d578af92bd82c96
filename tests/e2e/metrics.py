"""Prometheus text as numbers."""

from prometheus_client.parser import text_string_to_metric_families


def gauges(text: str) -> dict[str, float]:
    """Samples by name; those that differ in labels are summed."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found
