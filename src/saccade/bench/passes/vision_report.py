"""The tables and the plot of `saccade bench vision`."""

import importlib
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from saccade.bench.passes.vision_bench import EncodeTimes, MixedBatch, Preprocessing, VisionBench
from saccade.terminal import print_table


def print_vision_bench(bench: VisionBench, console: Console) -> None:
    print_table(console, _lines_table(bench.lines))
    print_table(console, _preprocessing_table(bench.preprocessing))
    if bench.mixed:
        print_table(console, _mixed_table(bench.mixed))
        for sentence in _verdicts(bench.mixed):
            console.print(sentence)
    console.print(f"{bench.num_graphs} vision graphs captured in {bench.capture_s:.2f} s")


def plot_vision_bench(bench: VisionBench, path: str) -> None:
    """Draws latency by number of images: one panel per size, one line per way, and the limit."""
    pyplot: Any = importlib.import_module("matplotlib.pyplot")  # see `check_plot`
    sizes = list(dict.fromkeys(line.size for line in bench.lines))
    figure, panels = pyplot.subplots(1, len(sizes), figsize=(4 * len(sizes), 3.5), squeeze=False)
    for panel, size in zip(panels[0], sizes, strict=True):
        own = [line for line in bench.lines if line.size == size]
        for way in dict.fromkeys(line.way for line in own):
            mine = sorted((line for line in own if line.way == way), key=lambda line: line.count)
            panel.plot([line.count for line in mine], [line.ms for line in mine], marker="o", label=way)
        limits = sorted({(line.count, line.limit_ms) for line in own})
        panel.plot([n for n, _ in limits], [ms for _, ms in limits], linestyle=":", color="grey", label="limit")
        panel.set(title=size, xlabel="images", ylabel="ms", xscale="log", yscale="log")
        panel.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _lines_table(lines: Sequence[EncodeTimes]) -> Table:
    table = Table(
        *("size", "images", "way", "rows", "padding", "ms", "host ms", "images/s", "limit ms", "of limit"),
        title="images of one size, encoded together",
    )
    for line in sorted(lines, key=lambda line: (line.size, line.count)):
        figures = (f"{line.ms:.2f}", f"{line.host_ms:.2f}", f"{line.images_per_s:.0f}")
        limits = (f"{line.limit_ms:.2f}", f"{line.of_limit:.0%}")
        table.add_row(line.size, str(line.count), line.way, str(line.rows), f"{line.padding:.1%}", *figures, *limits)
    return table


def _preprocessing_table(lines: Sequence[Preprocessing]) -> Table:
    table = Table("size", "ms", "host ms", "device ms", title="pixels to patches: upload, resize, normalise, cut")
    for line in lines:
        on_device = "" if line.device_ms is None else f"{line.device_ms:.3f}"
        table.add_row(line.size, f"{line.ms:.3f}", f"{line.host_ms:.3f}", on_device)
    return table


def _mixed_table(batches: Sequence[MixedBatch]) -> Table:
    table = Table(
        *("images", "rows", "passes", "padding", "eager ms", "ms", "of eager", "chosen"),
        title="batches of images with sides of 224 to 1280 pixels",
    )
    for batch in batches:
        chosen = ", ".join(f"{way} {count}" for way, count in batch.ways.items())
        times = (f"{batch.eager_ms:.2f}", f"{batch.ms:.2f}", f"{batch.ratio:.0%}")
        counts = (str(batch.count), str(batch.rows), str(batch.num_passes))
        table.add_row(*counts, f"{batch.padding:.1%}", *times, chosen)
    return table


def _verdicts(batches: Sequence[MixedBatch]) -> Iterator[str]:
    rows = sum(batch.rows for batch in batches)
    padded = sum(batch.rows * batch.padding for batch in batches)
    average = mean(batch.padding for batch in batches)
    yield f"padding: {average:.1%} of a batch on average, {padded / rows:.1%} of all rows"
    replayed = [batch for batch in batches if not any(way.startswith("eager") for way in batch.ways)]
    if replayed:
        worst = max(batch.ratio for batch in replayed)
        yield f"{len(replayed)} of {len(batches)} batches were replayed; the slowest took {worst:.0%} of an eager run"
