"""The kernels in which a decode step and a prompt's prefill spend their time. Run by hand on a GPU:

python -m tests.gpu.profile_steps                           Qwen3-VL-8B's dimensions, random weights
python -m tests.gpu.profile_steps FOLDER --way eager        any checkpoint or config.json, launched eagerly
"""

import json
import tempfile
from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from saccade.bench.passes.offline_bench import WAYS, bench_executor, bench_state, decode_values, prefill_values
from saccade.bench.passes.pass_settings import OfflineBenchSettings, suited_to
from saccade.graphs import GraphRunner
from saccade.models.weights import load_model
from tests.gpu.test_families import QWEN3_VL_8B

NUM_STEPS = 5
MAX_NAME_CHARS = 96


def profile_pass(runner: GraphRunner, values: Mapping[str, Any], num_shown: int = 25) -> list[str]:
    """Lines of a table: device microseconds and launches per pass, share, kernel. Captures only this batch's bucket."""
    batch = runner.phase.arena.admit(values)
    bucket = runner.catalogue.shape.bucket_for(batch.sizes)
    assert bucket is not None, f"no bucket holds {batch.sizes}"
    runner = GraphRunner(replace(runner.phase, buckets=(bucket,)), runner.settings)
    runner.capture_buckets()
    is_cuda = runner.phase.arena.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if is_cuda else [])
    for _ in range(2):
        runner.run(values, lambda outputs: None)
    with profile(activities=activities) as recorded:
        for _ in range(NUM_STEPS):
            runner.run(values, lambda outputs: None)
        if is_cuda:
            torch.cuda.synchronize()
    return _table(recorded.key_averages(), is_cuda, f"{runner.phase.name} {batch.sizes} in {bucket}", num_shown)


def _table(events: Any, is_cuda: bool, title: str, num_shown: int) -> list[str]:
    found = []
    for event in events:
        if is_cuda and str(event.device_type).endswith("CUDA"):
            found.append((event.self_device_time_total / NUM_STEPS, event.count / NUM_STEPS, event.key))
        elif not is_cuda:
            found.append((event.self_cpu_time_total / NUM_STEPS, event.count / NUM_STEPS, event.key))
    total = sum(us for us, _, _ in found) or 1.0
    lines = [f"{title}: {total / 1e3:.3f} ms in {sum(n for _, n, _ in found):.0f} launches"]
    lines += [
        f"{us:10.1f} us {count:7.1f} x {us / total:6.1%}  {name[:MAX_NAME_CHARS]}"
        for us, count, name in sorted(found, reverse=True)[:num_shown]
    ]
    return lines


def profile_steps(folder: str, *, way: str, tokens: int, batch: int, context: int, device: str = "cuda") -> None:
    chosen = OfflineBenchSettings(
        load_format="dummy", device=device, tokens=(tokens,), batches=(batch,), context=context
    )
    settings = suited_to(device, chosen)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = load_model(folder, device=device, dtype=dtype, load_format="dummy")
    runner = bench_executor(bench_state(model, settings), settings, WAYS[way])
    with torch.no_grad():
        passes = (
            (runner.prefill, prefill_values(runner, tokens)),
            (runner.decode, decode_values(runner.state, batch, context)),
        )
        for phase, values in passes:
            print("\n".join(profile_pass(phase, values)), flush=True)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--way", default="full", choices=list(WAYS))
    parser.add_argument("--tokens", type=int, default=406)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--device", default="cuda")
    flags = vars(parser.parse_args())
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / "config.json").write_text(json.dumps(QWEN3_VL_8B))
        folder = flags.pop("folder") or made
        profile_steps(folder, **flags)


if __name__ == "__main__":
    main()
