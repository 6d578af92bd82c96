"""A process that compiles its share of a model's kernels: `python -m saccade.dry_run.compile_process`, started only by
`saccade.execution.compilers`. It runs the engine's passes on meta tensors, so it needs no weights.

One line of standard input says what to compile. The process ends when the input closes, or with its parent.
"""

import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch

from saccade.config import Tier
from saccade.dry_run.blueprint import META, Blueprint, draw, dtype_for
from saccade.execution.compilers import CompileJob
from saccade.execution.logits import warm_up_rows
from saccade.execution.pixels import StagedPixels, warm_up_picture
from saccade.graphs import Frame, GraphRunner
from saccade.kernels.compile_only import CompileOnly, Share
from saccade.kernels.dispatch import device_named, open_device, sampling_for
from saccade.kernels.fused_attention import SHORT_SEGMENT
from saccade.kernels.packages import import_compilers
from saccade.models.model_config import Config
from saccade.processes import EXIT_FAILED, EXIT_ORPHANED, end_with_input, end_with_parent


def main() -> int:
    end_with_parent()
    import_compilers()  # while the job is still unknown
    line = sys.stdin.buffer.readline()
    if not line:
        return EXIT_ORPHANED
    end_with_input()
    job = msgspec.json.decode(line, type=CompileJob)
    try:
        return EXIT_FAILED if compile_share(job) else 0
    except Exception:
        if job.index == 0:  # all processes have the same errors
            traceback.print_exc()
        return EXIT_FAILED


def compile_share(job: CompileJob) -> int:
    """Returns how many passes failed. The engine compiles their kernels itself."""
    folder, settings = Path(job.start.folder), job.start.settings
    device = device_named(settings.device)
    dtype = dtype_for(settings, Config.read(folder / "config.json"), is_cuda=True)
    open_device(device, dtype)
    # Triton's kernels are dealt out from the other end: attention and products keep the first processes busy longer.
    share, heavy = Share(job.count - 1 - job.index, job.count), Share(job.index, job.count)
    only = CompileOnly(device, dtype, share, heavy)
    blueprint = draw(folder, settings, job.start.limits, tables=(only.kernels, sampling_for(device)))
    num_failed = 0
    with torch.no_grad(), only.compiling():
        for run in passes(blueprint):
            try:
                run()
            except Exception:
                if num_failed == job.index == 0:
                    traceback.print_exc()
                num_failed += 1
    return num_failed


def passes(blueprint: Blueprint) -> Iterator[Callable[[], object]]:
    """Every pass that is captured, in as few layers as launch all its kernels, and what runs outside graphs."""
    executor = blueprint.executor
    for runner in executor.phases:
        yield from (partial(_run, runner, i) for i in reversed(range(len(runner.phase.buckets))))
        if Tier.EXACT in runner.settings.tiers:
            yield partial(_run_small_images, runner)
    yield partial(_outside_graphs, blueprint)


def _run(runner: GraphRunner, bucket: int) -> None:
    phase = runner.phase
    phase.body(Frame(phase.arena, phase.buckets[bucket], is_warmup=True))


def _run_small_images(runner: GraphRunner) -> None:
    """An exact graph knows its longest image, and small ones have an attention kernel of their own."""
    phase = runner.phase
    structure = {one.name: np.array([0, SHORT_SEGMENT]) for one in phase.arena.boundaries}
    phase.body(Frame(phase.arena, phase.buckets[0], structure, is_warmup=True))


def _outside_graphs(blueprint: Blueprint) -> None:
    """Turns pixels into patches, and edits and scores logits."""
    executor, state = blueprint.executor, blueprint.executor.state
    if executor.encoder is not None:
        pixels = StagedPixels(META, executor.encoder.shapes)
        for kind, shape in executor.encoder.shapes.items():
            picture = warm_up_picture(kind, shape)
            pixels.patchify([picture], executor.encoder.graphs.phase.arena.rows("patches", picture.num_rows))
    sampling, ids_1 = state.sampling, torch.zeros(1, dtype=torch.int64, device=META)
    for note in (sampling.mark_prompt, sampling.count_tokens):
        note(state.seen, ids_1, ids_1, ids_1 > 0)
    warm_up_rows(state, torch.zeros(1, 1, dtype=torch.int32, device=META))


if __name__ == "__main__":
    sys.exit(main())
