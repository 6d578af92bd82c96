"""The tables of `saccade bench offline`."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from saccade.bench.passes.offline_bench import Captured, Check, OfflineBench, PassTimes
from saccade.terminal import print_table

MIB = 2**20


def print_offline_bench(bench: OfflineBench, console: Console) -> None:
    print_table(console, _prefill_table(bench.of_phase("prefill"), bench.of_phase("head")))
    print_table(console, _decode_table(bench.of_phase("decode"), bench.environment["context"]))
    print_table(console, _capture_table(bench.captures))
    stages = Table("stage", "seconds", title="start-up and measurement")
    for stage in bench.stages:
        stages.add_row(stage.name, f"{stage.seconds:.2f}")
    print_table(console, stages)
    for sentence in _verdicts(bench.checks):
        console.print(sentence)


def _prefill_table(lines: Sequence[PassTimes], head: Sequence[PassTimes]) -> Table:
    table = Table(
        *("tokens", "rows", "way", "ms", "host ms", "products ms", "limit ms", "bound by", "of limit"),
        title="prefill: one prompt to hidden states; head: one row to its token",
    )
    for line in (*lines, *head):
        name = str(line.size) if line.phase == "prefill" else "head"
        limits = (f"{line.products_ms:.2f}", f"{line.limit_ms:.2f}", line.bound_by, f"{line.of_limit:.0%}")
        table.add_row(name, str(line.rows), line.way, f"{line.ms:.2f}", f"{line.host_ms:.2f}", *limits)
    return table


def _decode_table(lines: Sequence[PassTimes], context: int) -> Table:
    table = Table(
        *("batch", "rows", "way", "ms a step", "host ms", "tokens/s", "limit ms", "bound by", "of limit"),
        title=f"decode: one token for each request, {context} keys each, greedy sampling inside",
    )
    for line in lines:
        times = (f"{line.ms:.2f}", f"{line.host_ms:.2f}", f"{line.tokens_per_s:.0f}")
        limits = (f"{line.limit_ms:.2f}", line.bound_by, f"{line.of_limit:.0%}")
        table.add_row(str(line.size), str(line.rows), line.way, *times, *limits)
    return table


def _capture_table(captures: Sequence[Captured]) -> Table:
    """Lists the phases of each way, and the total of each way."""
    table = Table("way", "phase", "graphs", "seconds", "graphs MiB", "buffers MiB", title="capture")
    rows = [(part.way, part.phase, [part]) for part in captures]
    for way in dict.fromkeys(part.way for part in captures):
        rows.append((way, "all", [part for part in captures if part.way == way]))
    for way, phase, parts in rows:
        num_graphs, seconds = sum(part.num_graphs for part in parts), sum(part.seconds for part in parts)
        sizes = (sum(part.graph_bytes for part in parts), sum(part.buffer_bytes for part in parts))
        table.add_row(way, phase, str(num_graphs), f"{seconds:.2f}", *(f"{size / MIB:.0f}" for size in sizes))
    return table


def _verdicts(checks: Sequence[Check]) -> Iterable[str]:
    """One sentence per way and phase, about replays compared with eager runs on the same padded buffers."""
    for way, phase in dict.fromkeys((check.way, check.phase) for check in checks):
        own = [check for check in checks if (check.way, check.phase) == (way, phase)]
        wrong = [str(check.size) for check in own if not check.has_equal_tokens]
        what = "hidden states" if phase == "prefill" else "logits"
        tokens = f"OTHER TOKENS at {', '.join(wrong)}" if wrong else f"the same tokens at all {len(own)} sizes"
        worst = max(check.difference for check in own)
        yield f"{way} {phase} against eager, same padding: {tokens}; largest relative difference of {what} {worst:.1e}"
