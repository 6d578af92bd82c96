"""Trains the bundled model on pictures that are drawn as it goes.

    python -m training.train --data .gpu/school/data.safetensors --out OUT --minutes 8.5

OUT gets model.safetensors, log.txt and report.json; `python -m training.export` makes a checkpoint folder of them. The
learning rate follows the clock, so the run ends by itself and in time whatever the machine's speed. With --resume a
stopped run goes on from the state it saved last.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from training.accuracy import accuracy, held_out
from training.backdrops import Palette
from training.batches import GRIDS, SMALL_GRIDS, Recipe
from training.dialogue import Book
from training.model import Batch, Model, Shape
from training.scenes import Studio
from training.sprites import kernel_error, make_bank
from training.vocabulary import token_id

RESERVE_S = 20.0
"""Left of the time for the last evaluation and the files."""

WARM_UP = 300
"""Steps until the learning rate is reached."""

SIDE_SHARE = 0.35
"""Weight of the second batch of a step: pairs, videos and text take turns in it."""


@dataclass(frozen=True)
class Options:
    data: Path
    out: Path
    state: Path
    minutes: float
    batch: int
    rate: float
    seed: int
    device: str
    dtype: str
    max_steps: int
    report_every_s: float
    resume: bool
    graphs: bool
    compile: bool
    small: bool


def read_options() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--state", type=Path, default=Path(".gpu/school/state.safetensors"), help="for --resume")
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=1.6e-3)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--report-every-s", type=float, default=20.0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--no-graphs", dest="graphs", action="store_false", help="no CUDA graphs")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="no torch.compile")
    parser.add_argument("--small", action="store_true", help="a toy model for a CPU")
    return Options(**vars(parser.parse_args()))


class Log:
    """Lines to the terminal and to a file."""

    def __init__(self, path: Path, started: float) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.started = path, started

    def __call__(self, text: str) -> None:
        line = f"{time.perf_counter() - self.started:7.1f}s {text}"
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        with self.path.open("a") as file:
            file.write(line + "\n")


class Passes:
    """Forward and backward passes over batches that are made on the way.

    With `graphs`, a kind of batch is captured when it comes for the second time, drawing and all, and replayed from
    then on: torch's own generator gives every replay other random numbers, and gradients are added up where they were
    allocated first. Host values that were drawn for the capture stay as they were.
    """

    def __init__(self, model: Model, *, graphs: bool, log: Callable[[str], None]) -> None:
        self.model, self.graphs, self.log = model, graphs, log
        self.losses = torch.zeros(2, device=next(model.parameters()).device)
        self.met: set[tuple[str, tuple[int, int]]] = set()
        self.captured: dict[tuple[str, tuple[int, int]], torch.cuda.CUDAGraph] = {}
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def run(self, key: tuple[str, tuple[int, int]], make: Callable[[], Batch], weight: float, slot: int) -> None:
        if not self.met:
            self._first(make(), weight, slot)
        if not self.graphs or key not in self.met:
            self.met.add(key)
            self._eager(make(), weight, slot)
            return
        if key not in self.captured:
            graph = torch.cuda.CUDAGraph()
            pool = next(iter(self.captured.values())).pool() if self.captured else None
            with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
                self._eager(make(), weight, slot)
            self.captured[key] = graph
        self.captured[key].replay()

    def _first(self, batch: Batch, weight: float, slot: int) -> None:
        """Compiles, and goes on without where that fails: a slow run is better than none."""
        started = time.perf_counter()
        try:
            self._eager(batch, weight, slot)
            self.log(f"the first pass took {time.perf_counter() - started:.1f} s")
        except Exception as error:  # whatever a compiler raises
            self.log(f"without torch.compile: {type(error).__name__}: {str(error)[:2000]}")
            torch.compiler.set_stance("force_eager")

    def _eager(self, batch: Batch, weight: float, slot: int) -> None:
        logits = self.model(batch).float().flatten(0, 1)
        loss = functional.cross_entropy(logits, batch.targets.flatten(), ignore_index=-100)
        (loss * weight).backward()
        self.losses[slot].copy_(loss.detach())


class Pupil:
    """Weights in two precisions: those that the passes use, and the masters that the optimizer changes."""

    def __init__(self, model: Model, rate: float, device: torch.device) -> None:
        self.model, self.rate = model, rate
        self.names = [name for name, _ in model.named_parameters()]
        self.working: list[Tensor] = list(model.parameters())
        self.masters: list[Tensor] = [part.detach().float().clone().requires_grad_() for part in self.working]
        matrices = [master for master in self.masters if master.ndim > 1]
        vectors = [master for master in self.masters if master.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=device.type == "cuda")
        for master in self.masters:
            master.grad = torch.zeros_like(master)

    @torch.no_grad()
    def update(self, progress: float, step: int) -> None:
        """One step of the optimizer; `progress` runs from 0 to 1."""
        gradients = [master.grad for master in self.masters if master.grad is not None]
        torch._foreach_copy_(gradients, [part.grad for part in self.working if part.grad is not None])
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0, foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * schedule(progress, step)
        self.optimizer.step()
        torch._foreach_copy_(self.working, self.masters)
        torch._foreach_zero_([part.grad for part in self.working if part.grad is not None])

    def save(self, path: Path, step: int, elapsed_s: float) -> None:
        tensors = dict(zip(self.names, self.masters, strict=True))
        for name, master in zip(self.names, self.masters, strict=True):
            for key, value in self.optimizer.state[master].items():
                tensors[f"{key}/{name}"] = torch.as_tensor(value)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        save_file(
            {name: tensor.detach().cpu() for name, tensor in tensors.items()}, part, {"at": f"{step} {elapsed_s}"}
        )
        part.replace(path)

    @torch.no_grad()
    def load(self, path: Path) -> tuple[int, float]:
        """The step and the seconds at which the state was saved."""
        tensors = load_file(path)
        for name, master in zip(self.names, self.masters, strict=True):
            master.copy_(tensors[name])
            keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}/{name}" in tensors]
            self.optimizer.state[master] = {
                key: tensors[f"{key}/{name}"].to(master.device if key != "step" or master.is_cuda else "cpu")
                for key in keys
            }
        torch._foreach_copy_(self.working, self.masters)
        with safe_open(path, "pt") as file:
            step, elapsed_s = file.metadata()["at"].split()
        return int(step), float(elapsed_s)

    def export(self, path: Path) -> None:
        tensors = zip(self.names, self.masters, strict=True)
        save_file({name: master.detach().bfloat16().cpu() for name, master in tensors}, path, {"format": "pt"})


def schedule(progress: float, step: int) -> float:
    """Up within the first steps, then half a cosine down to one hundredth."""
    fall = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return fall * min(1.0, (step + 1) / WARM_UP)


@dataclass(frozen=True)
class School:
    """Everything a run needs, on its device."""

    options: Options
    recipe: Recipe
    exam: Recipe
    end_id: int
    log: Log

    @classmethod
    def open(cls, options: Options, log: Log) -> "School":
        device, dtype = torch.device(options.device), getattr(torch, options.dtype)
        with safe_open(options.data, "pt") as file:
            metadata = file.metadata()
        tensors = load_file(options.data)
        tokenizer, words = Tokenizer.from_str(metadata["tokenizer"]), json.loads(metadata["words"])
        shape = _shape(options)
        book = Book(tokenizer, words, device)
        if device.type == "cuda":
            log(f"the drawing kernel is off by {kernel_error(device):.1e}")
        recipes = []
        for is_exam in (False, True):
            studio = Studio(make_bank(tensors, device, heldout=is_exam), Palette.on(device), device)
            recipes.append(Recipe(studio, book, shape, len(words), dtype))
        return cls(options, recipes[0], recipes[1], token_id(tokenizer, "<|im_end|>"), log)


def _shape(options: Options) -> Shape:
    if not options.small:
        return Shape()
    return Shape(
        hidden_size=64,
        layers=4,
        heads=2,
        kv_heads=1,
        intermediate_size=96,
        vision_size=64,
        vision_layers=4,
        vision_heads=2,
    )


def train(school: School, started: float) -> dict[str, object]:
    options, log = school.options, school.log
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    model = Model(school.recipe.shape)
    model.initialise(torch.Generator().manual_seed(options.seed))
    model.to(device=device)
    pupil = Pupil(model, options.rate, device)
    model.to(dtype=school.recipe.dtype)
    pupil.working = list(model.parameters())
    if options.compile and device.type == "cuda":
        model.compile_blocks()
    passes = Passes(model, graphs=options.graphs and device.type == "cuda", log=log)
    step, before_s = pupil.load(options.state) if options.resume else (0, 0.0)
    size = max(8, min(256, options.batch // 4))
    exams = held_out(school.exam, size, seed=1)
    num = sum(part.numel() for part in pupil.masters)
    log(f"{num:,} parameters, ready on {device}; step {step}, {before_s:.0f} s before")
    clock = _Clock(started, before_s, options)
    while step < options.max_steps and clock.progress() < 1:
        _one_step(school, passes, step)
        pupil.update(clock.progress(), step)
        step += 1
        if clock.is_time_to_report():
            _report(school, pupil, passes, exams, clock, step)
    final = accuracy(model, [part for seed in range(2, 6) for part in held_out(school.exam, size, seed)], school.end_id)
    pupil.export(options.out / "model.safetensors")
    log("final " + _line(final))
    return {
        "steps": step,
        "seconds": round(before_s + time.perf_counter() - started, 1),
        "batch": options.batch,
        "graphs": len(passes.captured),
        "right_and_asked": final,
    }


class _Clock:
    """How far the run is, by time; the seconds of an earlier run count."""

    def __init__(self, started: float, before_s: float, options: Options) -> None:
        self.started, self.before_s, self.options = started, before_s, options
        self.reported = time.perf_counter()
        self.steps_then = 0
        self.saved = time.perf_counter()

    def elapsed(self) -> float:
        return self.before_s + time.perf_counter() - self.started

    def progress(self) -> float:
        return self.elapsed() / max(1.0, self.options.minutes * 60 - RESERVE_S)

    def is_time_to_report(self) -> bool:
        return time.perf_counter() - self.reported > self.options.report_every_s


def _one_step(school: School, passes: Passes, step: int) -> None:
    recipe, batch = school.recipe, school.options.batch
    grid = random.choice(GRIDS)
    passes.run(("pictures", grid), lambda: recipe.pictures(grid, batch), 1.0, 0)
    side = ("pairs", "videos", "pairs", "texts")[step % 4]
    small = random.choice(SMALL_GRIDS) if side != "texts" else (1, 1)
    passes.run((side, small), lambda: getattr(recipe, side)(small, max(8, batch // 4)), SIDE_SHARE, 1)
    if step % 8 == 0 and passes.losses.is_cuda:
        torch.cuda.current_stream().synchronize()  # the host must not run many batches ahead of the device


def _report(school: School, pupil: Pupil, passes: Passes, exams: list[Batch], clock: _Clock, step: int) -> None:
    rate = (step - clock.steps_then) * school.options.batch * 1.25 / (time.perf_counter() - clock.reported)
    losses = [round(value, 4) for value in passes.losses.tolist()]
    found = accuracy(pupil.model, exams, school.end_id)
    school.log(f"step {step} {clock.progress():.0%} {rate:,.0f} samples/s loss {losses} {_line(found)}")
    if time.perf_counter() - clock.saved > 60:
        pupil.export(school.options.out / "model.safetensors")
        pupil.save(school.options.state, step, clock.elapsed())
        clock.saved = time.perf_counter()
    clock.reported, clock.steps_then = time.perf_counter(), step


def _line(found: dict[str, tuple[int, int]]) -> str:
    right, asked = (sum(pair[i] for pair in found.values()) for i in range(2))
    parts = [f"{kind} {100 * r / a:.0f}" for kind, (r, a) in found.items()]
    return f"right {100 * right / max(1, asked):.2f}%: " + ", ".join(parts)


def main() -> None:
    started = time.perf_counter()
    options = read_options()
    log = Log(options.out / "log.txt", started)
    if options.device == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every shape
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            report = train(School.open(options, log), started)
    else:
        report = train(School.open(options, log), started)
    (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
