"""Measures the host's work for a pass: `python -m tests.execution.host_time [--against SRC]`.

This is the real engine, with the buffers, buckets and layers of Qwen3-VL-8B (but narrow), fed with pixels as on a GPU.
The GPU's work is left out: graphs are empty, and copies, fills, kernels and events are only counted. What remains is
the host's work in Python, numpy and torch's views.

Prints medians over runs, for one pass: CPU microseconds and calls of Python functions and built-ins, both until the
first graph is launched and in total; and calls to the device, which would take some more host time. `--against`
measures other sources, such as another checkout's `src`, in turns with these."""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import saccade
from saccade.cache.encoder import EncoderIndex
from saccade.config import Mode, Tier
from saccade.execution.assembly import new_engine, new_executor
from saccade.execution.executor import DeviceExecutor, ExecutorSettings
from saccade.execution.pixels import StagedPixels
from saccade.execution.state import StateSizes
from saccade.inputs.media_settings import read_image_settings
from saccade.inputs.placeholders import Media, text_prompt
from saccade.inputs.plans import plan_image
from saccade.kernels.launch import Launcher
from saccade.models.weights import load_model
from saccade.scheduling.arrays import LiveRequest
from saccade.scheduling.engine import Engine
from saccade.scheduling.media_encoder import MediaEncoder
from saccade.scheduling.pass_log import PassLog
from saccade.scheduling.request import Request
from saccade.scheduling.step_plan import EncodeItem, StepPlan
from saccade.wire.engine_settings import GPU_LIMITS, SchedulerSettings
from saccade.wire.sampling_params import SamplingParams

MODULE = "tests.execution.host_time"
WIDTH, VOCABULARY, SIDE = 32, 1024, 560
BLOCK_SIZE, NUM_BLOCKS, PAGE_ROWS, VISION_ROWS = 128, 700, 16, 16384
CONTEXT, PROMPT = 1000, 406
NUM_WARM_UPS = 20
NUM_POINTERS = 4  # of both kernels that make patches
Figures = dict[str, float]
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "image_token_id": 1000,
    "video_token_id": 1001,
    "vision_start_token_id": 1002,
    "vision_end_token_id": 1003,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "hidden_act": "silu",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 36,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000,
        "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [2, 1, 1]},
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "hidden_act": "gelu_pytorch_tanh",
        "depth": 27,
        "deepstack_visual_indexes": [8, 16, 24],
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_heads": 2,
        "out_hidden_size": WIDTH,
        "in_channels": 3,
        "num_position_embeddings": 2304,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
PIXELS = {"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 16777216}} | {
    name: [0.5] * 3 for name in ("image_mean", "image_std")
}


class Device:
    """Stands in for a GPU: counts calls, and notes when a graph is launched."""

    def __init__(self) -> None:
        self.num_calls, self.num_python_calls = 0, 0
        self.launches: list[tuple[int, int]] = []  # CPU time, and Python calls until then

    def called(self, *args: Any, **how: Any) -> None:
        self.num_calls += 1

    def replay(self) -> None:
        self.called()
        self.launches.append((time.thread_time_ns(), self.num_python_calls))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts calls of Python functions and built-ins."""
        self.num_calls = self.num_python_calls = 0
        self.launches.clear()

        def note(frame: Any, event: str, arg: Any) -> None:
            self.num_python_calls += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)

    @contextmanager
    def installed(self) -> Iterator[None]:
        event, nothing = partial(Event, self), lambda *args, **how: None
        constants = ("JOBS", "CUBIC", "PATCH", "TEMPORAL", "MERGE", "BLOCK")
        places = {
            "torch.cuda.Event": event,
            "torch.Tensor.copy_": lambda tensor, *args, **how: self.called(),
            "torch.Tensor.fill_": lambda tensor, *args, **how: self.called(),
            "saccade.kernels.fused_images.job_rows_kernel": launcher(self, "JOBS", "CUBIC", "BLOCK", num_numbers=0),
            "saccade.kernels.fused_images.job_patches_kernel": launcher(self, *constants, num_numbers=7),
            "saccade.graphs.capture.run_body": nothing,
            "saccade.graphs.piecewise.run_body": nothing,
            "saccade.graphs.runner.run_body": nothing,
            "saccade.graphs.recorded.RecordedLane.begin": nothing,
            "saccade.graphs.recorded.RecordedLane.end": lambda lane: self.replay,
            "saccade.execution.vision_encoder.new_pixels": StagedPixels,
            "saccade.execution.vision_encoder.now": lambda device: event().record(),
        }
        with ExitStack() as stack:
            for name, value in places.items():
                stack.enter_context(patch(name, value))
            yield


class Event:
    """Replaces `torch.cuda.Event`."""

    def __init__(self, device: Device, **how: Any) -> None:
        self.record = device.called

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Kernel:
    """Replaces a Triton kernel, whose first launch returns what later launches run."""

    function = packed_metadata = None

    def __init__(self, device: Device, *constants: str, num_numbers: int) -> None:
        pointers = [f"{i}_ptr" for i in range(NUM_POINTERS)]
        self.arg_names = (*pointers, *map(str, range(num_numbers)), *constants)
        self.run = device.called

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **constants: self


class Current:
    """Replaces `kernels.launch.Current`."""

    def stream(self, index: int) -> int:
        return 0

    def device(self) -> int:
        return 0


def launcher(device: Device, *constants: str, num_numbers: int) -> Launcher:
    return Launcher(Kernel(device, *constants, num_numbers=num_numbers), Current())


def narrow_settings(folder: Path) -> tuple[StateSizes, ExecutorSettings]:
    """Those of a GPU, and the files of a narrow checkpoint."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    limits = SchedulerSettings(**GPU_LIMITS)
    sizes = StateSizes(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_blocks=limits.max_model_len // BLOCK_SIZE,
        max_sequences=limits.max_num_seqs,
        num_vision_rows=VISION_ROWS,
    )
    settings = ExecutorSettings(
        max_tokens=limits.max_num_batched_tokens,
        max_units=limits.encoder_budget_tokens,
        page_rows=PAGE_ROWS,
        images=read_image_settings(folder),
        videos=None,
        modes=dict.fromkeys(("vision", "prefill", "decode"), Mode.FULL),
        strict=False,
        vision_tiers=frozenset({Tier.CAPACITY, Tier.EXACT}),
    )
    return sizes, settings


def new_rig(folder: Path) -> Engine:
    """A narrow engine, set up as on a GPU."""
    sizes, settings = narrow_settings(folder)
    model = load_model(folder, dtype=torch.float32, load_format="dummy")
    executor = new_executor(model, sizes, settings)
    executor.capture()
    pixels: Any = executor.encoder and executor.encoder._pixels
    for staging in [*(runner.phase.arena._staging for runner in executor.phases), pixels._slots]:
        staging._events = [torch.cuda.Event() for _ in staging._slabs]
    executor._is_cuda = True
    return new_engine(
        executor, SchedulerSettings(**GPU_LIMITS), EncoderIndex(VISION_ROWS, PAGE_ROWS), fingerprint=b"narrow"
    )


@dataclass(frozen=True)
class Case:
    """Measures `run`, a pass. `before` prepares each run; `ready` is the context of all of them."""

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None
    ready: Callable[[], AbstractContextManager[None]] = nullcontext


class Rig:
    """An engine, and the cases measured with it."""

    def __init__(self, folder: Path) -> None:
        self.engine, self._names = new_rig(folder), map(str, count())
        self._rng = np.random.default_rng(0)
        executor = self.engine.executor
        assert isinstance(executor, DeviceExecutor) and executor.encoder is not None
        self.executor, self.encoder = executor, executor.encoder
        self.cases: dict[str, Callable[[], Case]] = {
            "vision, exact graph": lambda: self.vision(is_exact=True),
            "vision, bucket": lambda: self.vision(is_exact=False),
            "decode, 1 row": lambda: self.decode(1),
            "decode, 64 rows": lambda: self.decode(64),
            f"prefill, {PROMPT} tokens": self.prefill,
        }

    def vision(self, *, is_exact: bool) -> Case:
        """One image, from its plan to the launched pass."""
        composer, images, clock = self.engine.composer, self.encoder.settings.images, time.monotonic
        assert composer.vision is not None and images is not None, "it sees images"
        pixels = self._rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        media = Media("image", pixels, plan_image(SIDE, SIDE, images), b"")
        rows = media.plan.num_tokens
        plan = StepPlan(0, (EncodeItem("image", 0, b"", rows, tuple(range(1, 2 + rows // PAGE_ROWS))),))
        request = Request(id="image", prompt_ids=(1,), params=SamplingParams())
        live = LiveRequest(request, replace(text_prompt([1]), media=(media,)))
        encoder = MediaEncoder(self.executor, composer, PassLog(composer.catalogues, clock), clock)
        self.encoder.graphs.forget_exact()
        if is_exact:
            layout = next(one for one in composer.vision.usual_layouts() if one.sizes["units"] == rows)
            self.encoder.graphs.catalogue.exact.add(layout.key, self.executor.capture_layout(layout))

        def encode() -> None:
            failed = encoder.encode(plan, {"image": live})
            assert not failed, failed

        return Case(encode, before=live.laps.clear)

    def decode(self, rows: int) -> Case:
        """A step in the middle of many: it also takes in the one launched before it."""

        @contextmanager
        def ready() -> Iterator[None]:
            names = [self.add(CONTEXT, 1000) for _ in range(rows)]
            while any(not self.engine.scheduler.live[name].output_ids for name in names):
                self.engine.step()
            yield
            for name in names:
                self.engine.abort(name)
            self.finish()

        return Case(self.engine.step, ready=ready)

    def prefill(self) -> Case:
        """A prompt, from its plan to its token."""
        return Case(self.finish, before=lambda: self.add(PROMPT, 1))

    def finish(self) -> None:
        while self.engine.has_work:
            self.engine.step()

    def add(self, length: int, max_tokens: int) -> str:
        prompt = text_prompt(self._rng.integers(1, 900, length, dtype=np.int32))
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return self.engine.add(next(self._names), prompt, params)[0]


def measure(case: Case, device: Device, num_passes: int) -> Figures:
    """Medians over passes, and the calls of one."""
    times = []
    gc.disable()
    with case.ready():
        for _ in range(NUM_WARM_UPS + num_passes):
            case.before()
            device.launches.clear()
            started = time.thread_time_ns()
            case.run()
            ended = time.thread_time_ns()
            times.append((device.launches[0][0] - started, ended - started))
        case.before()
        with device.counting():
            case.run()
    gc.enable()
    gc.collect()
    until, whole = np.median(times[NUM_WARM_UPS:], axis=0) / 1e3
    return {
        "us until the graph": until,
        "us": whole,
        "calls until the graph": device.launches[0][1],
        "calls": device.num_python_calls,
        "calls to the device": device.num_calls,
    }


def work() -> None:
    """Measures the case that each line of standard input names."""
    torch.set_num_threads(1)
    device = Device()
    with tempfile.TemporaryDirectory() as folder, device.installed(), torch.no_grad():
        rig = Rig(Path(folder))
        print(json.dumps(list(rig.cases)), flush=True)
        for line in sys.stdin:
            name, num_passes = json.loads(line)
            print(json.dumps(measure(rig.cases[name](), device, num_passes)), flush=True)


class Worker:
    """A process that measures with these sources: `python -m MODULE --worker`, which first writes the names of its
    cases, then figures for each line it reads."""

    def __init__(self, src: Path, module: str) -> None:
        place = os.environ | {"PYTHONPATH": f"{src}:{Path(__file__).parents[2]}"}
        command = [sys.executable, "-m", module, "--worker"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=place)
        self.cases: list[str] = self._told()

    def measure(self, *what: str | int) -> Figures:
        assert self._process.stdin is not None, "it is a pipe"
        print(json.dumps(what), file=self._process.stdin, flush=True)
        found: Figures = self._told()
        return found

    def _told(self) -> Any:
        assert self._process.stdout is not None, "it is a pipe"
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=60)


def show(src: Path, found: Sequence[Figures]) -> None:
    until, whole, calls_until, calls, called = np.median([list(one.values()) for one in found], axis=0)
    graph, all_of_it = f"graph after {until:.0f} us ({calls_until:.0f} calls)", f"{whole:.0f} us ({calls:.0f} calls)"
    print(f"  {src}: {graph}, in all {all_of_it}, {called:.0f} calls to the device")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--against", type=Path, action="append", default=[], help="other sources to compare with")
    parser.add_argument("--case", action="append", help="only this one")
    parser.add_argument("--passes", type=int, default=200, help="of a run")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.worker:
        work()
        return 0
    sources = [Path(saccade.__file__).parents[1], *flags.against]
    with ExitStack() as stack:
        workers = [stack.enter_context(closing(Worker(src, MODULE))) for src in sources]
        for case in flags.case or workers[0].cases:
            found = [[worker.measure(case, flags.passes) for worker in workers] for _ in range(flags.runs)]
            print(case)
            for src, ones in zip(sources, zip(*found, strict=True), strict=True):
                show(src, ones)
    return 0


if __name__ == "__main__":
    sys.exit(main())
