"""Trains the bundled model on pictures that are drawn on the fly.

    python -m training.train --data .gpu/school/data.safetensors --out OUT --minutes 8.5

OUT gets model.safetensors, log.txt and report.json; `python -m training.export` makes a checkpoint folder of them. The
learning rate follows the clock, so the run ends on time whatever the machine's speed. With --resume a stopped run
continues from its last saved state.
"""

import argparse
import gc
import json
import math
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer

from training.accuracy import Found, accuracy, held_out
from training.backdrops import Palette
from training.batches import SHAPES_ROOM, Emphasis, Recipe, order
from training.dialogue import Book
from training.lessons import make_lessons, prepare, side_batch
from training.marks import Guide
from training.model import Batch, Model, Shape
from training.passes import Passes
from training.pupil import Pupil
from training.scenes import Studio
from training.sprites import kernel_error, make_bank
from training.vocabulary import token_id

RESERVE_S = 12.0
"""Time reserved for the last evaluation and for writing files."""

SAVE_S = 40.0
"""Seconds after which the next report also saves weights and state."""

TOO_SLOW = 3
"""The exit status of a run that --least-rate or a broken loss ended."""

SETTLED_STEPS, TRIAL_S = 10, 60.0
"""The machine is warm after SETTLED_STEPS steps; the second half of the next TRIAL_S seconds then decides the rate."""

GUIDE_SHARE, GUIDED_PART = 0.4, 0.6


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
    least_rate: float
    start: Path | None
    warm_up: int
    freeze_tower: bool
    counting: float
    longer: float
    strange: float
    turns: int
    least_units: int
    least_often: int
    always: str
    side_batch: int
    parts: int
    memory_gib: float

    @property
    def emphasis(self) -> Emphasis:
        return Emphasis(counting=self.counting, longer=self.longer, strange=self.strange, turns=self.turns)


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
    parser.add_argument("--report-every-s", type=float, default=30.0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--no-graphs", dest="graphs", action="store_false", help="no CUDA graphs")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="no torch.compile")
    parser.add_argument("--small", action="store_true", help="a toy model for a CPU")
    parser.add_argument("--least-rate", type=float, default=0.0, help="samples/s below which the run gives up early")
    parser.add_argument(
        "--start", type=Path, help="weights of an earlier run to go on from, with a new schedule and no guide"
    )
    parser.add_argument("--warm-up", type=int, default=300, help="steps until the learning rate is reached")
    parser.add_argument("--freeze-tower", action="store_true", help="train the decoder alone")
    usual = Emphasis()
    parser.add_argument("--counting", type=float, default=usual.counting, help="how much more often to count things")
    parser.add_argument(
        "--longer", type=float, default=usual.longer, help="how much more often to ask two things, or to describe"
    )
    parser.add_argument("--strange", type=float, default=usual.strange, help="share of pictures of nothing known")
    parser.add_argument("--turns", type=int, default=SHAPES_ROOM.turns, help="most questions about a picture")
    parser.add_argument("--least-units", type=int, default=0, help="squares of 32 pixels that a picture has at least")
    parser.add_argument("--least-often", type=int, default=0, help="leave out sizes that GRIDS has less often")
    parser.add_argument("--always", default="", help="pairs, videos or texts in every step, not in turn with others")
    parser.add_argument(
        "--side-batch", type=int, default=0, help="pairs, videos or texts a step; 0: a quarter of --batch"
    )
    parser.add_argument("--parts", type=int, default=1, help="sizes of pictures in a step, which share --batch")
    parser.add_argument("--memory-gib", type=float, default=0.0, help="most memory of a GPU to take; 0: all of it")
    return Options(**vars(parser.parse_args()))


class Log:
    """Writes lines to the terminal and to a file."""

    def __init__(self, path: Path, started: float) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.started = path, started

    def __call__(self, text: str) -> None:
        line = f"{time.perf_counter() - self.started:7.1f}s {text}"
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        with self.path.open("a") as file:
            file.write(line + "\n")


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
            emphasis = Emphasis() if is_exam else options.emphasis
            recipes.append(Recipe(studio, book, shape, len(words), dtype, emphasis))
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
    if options.start is not None:
        model.load_state_dict({name: tensor.float() for name, tensor in load_file(options.start).items()})
    model.to(device=device)
    model.tower.requires_grad_(not options.freeze_tower)
    has_guide = options.start is None and not options.freeze_tower
    guide = Guide(school.recipe.shape.hidden_size).to(device) if has_guide else None
    pupil = Pupil(model, options.rate, device, guide, warm_up=options.warm_up)
    model.to(dtype=school.recipe.dtype)
    if guide is not None:
        guide.to(dtype=school.recipe.dtype)
    pupil.working = pupil.parameters()
    if options.compile and device.type == "cuda":
        model.compile_blocks()
    graphs = options.graphs and device.type == "cuda"
    passes = Passes(
        model, guide=guide, graphs=graphs, log=log, end_id=school.end_id, limit_bytes=int(options.memory_gib * 2**30)
    )
    step, before_s = pupil.load(options.state) if options.resume else (0, 0.0)
    num = sum(part.numel() for part in pupil.masters)
    log(f"{num:,} parameters, ready on {device}; step {step}, {before_s:.0f} s before")
    clock = _Clock(started, before_s, options, step)
    teacher = _Teacher(school, pupil, passes, clock)
    sizes = (options.batch, options.side_batch or side_batch(options.batch))
    grids = order(options.least_units, options.least_often)
    lessons = make_lessons(school.recipe, sizes, grids=grids, always=options.always, parts=options.parts)
    if options.freeze_tower and device.type == "cpu":
        lessons = prepare(lessons, model)
    while step < options.max_steps and clock.progress() < 1:
        passes.guidance.fill_(guidance(clock.progress()))
        for lesson in next(lessons):
            passes.run(lesson.key, lesson.make, lesson.weight, lesson.slot)
        if step % 8 == 0 and passes.losses.is_cuda:
            torch.cuda.current_stream().synchronize()  # the host must not run many batches ahead of the device
        pupil.update(clock.progress(), step)
        step += 1
        if step == clock.first_step + 1:
            gc.freeze()  # compilation leaves very many objects that later collections would traverse
        clock.check(step)
        if clock.is_time_to_report():
            teacher.report(step)
    pupil.export(options.out / "model.safetensors")
    final, first = teacher.examine(256, range(2, 6))
    log("final " + line(final, first))
    return {
        "steps": step,
        "seconds": round(before_s + time.perf_counter() - started, 1),
        "batch": options.batch,
        "graphs": len(passes.captured),
        "right_and_asked": final,
        "right_and_asked_first": first,
    }


def guidance(progress: float) -> float:
    """The weight of the guide's loss: it falls linearly, to 0 for the last part of a run."""
    return GUIDE_SHARE * max(0.0, 1 - progress / GUIDED_PART)


class _Clock:
    """Measures the progress of the run by time, which includes the seconds of a resumed run."""

    def __init__(self, started: float, before_s: float, options: Options, step: int) -> None:
        self.started, self.before_s, self.options = started, before_s, options
        self.reported = self.saved = time.perf_counter()
        self.steps_then = self.first_step = step
        self.trial: list[tuple[float, int]] = []

    def elapsed(self) -> float:
        return self.before_s + time.perf_counter() - self.started

    def progress(self) -> float:
        return self.elapsed() / max(1.0, self.options.minutes * 60 - RESERVE_S)

    def is_time_to_report(self) -> bool:
        return time.perf_counter() - self.reported > self.options.report_every_s

    def check(self, step: int) -> None:
        """Ends a run that is slower than --least-rate. The first steps, which compile, do not count."""
        now = time.perf_counter()
        if not self.options.least_rate or step - self.first_step < SETTLED_STEPS or len(self.trial) > 2:
            return
        if not self.trial or now - self.trial[0][0] > TRIAL_S * len(self.trial) / 2:
            self.trial.append((now, step))
        if len(self.trial) == 3:
            (since, steps), least = self.trial[1], self.options.least_rate
            rate = (step - steps) * samples(self.options.batch) / (now - since)
            self.trial.append((now, step))
            if rate < least:
                raise HopelessError(
                    f"{rate:,.0f} samples/s are fewer than --least-rate {least:,.0f}: nothing more is saved"
                )


class HopelessError(Exception):
    """The run is not worth continuing."""


def samples(batch: int) -> int:
    """The samples of a step, in both batches."""
    return batch + side_batch(batch)


class _Teacher:
    """Evaluates and reports. Exams are drawn when first needed, and kept."""

    def __init__(self, school: School, pupil: Pupil, passes: Passes, clock: _Clock) -> None:
        self.school, self.pupil, self.passes, self.clock = school, pupil, passes, clock
        self.exams: list[Batch] = []
        self.answers_then = 0

    def examine(self, size: int, seeds: range) -> tuple[Found, Found]:
        size = max(8, min(size, self.school.options.batch // 4))
        return accuracy(
            self.pupil.model,
            [part for seed in seeds for part in held_out(self.school.exam, size, seed)],
            self.school.end_id,
        )

    def report(self, step: int) -> None:
        clock, options = self.clock, self.school.options
        losses, answers = self.passes.losses.tolist(), int(self.passes.answers)
        if not math.isfinite(sum(losses)):
            raise HopelessError(f"the losses are {losses} at step {step}: nothing more is saved")
        seconds = time.perf_counter() - clock.reported
        rate = (step - clock.steps_then) * samples(options.batch) / seconds
        self.exams = self.exams or held_out(self.school.exam, max(8, min(128, options.batch // 8)), 1)
        found = accuracy(self.pupil.model, self.exams, self.school.end_id)
        self.school.log(
            f"step {step} {clock.progress():.0%} {rate:,.0f} samples/s {(answers - self.answers_then) / seconds:,.0f} "
            f"answers/s loss {losses[0]:.3f} {losses[1]:.3f} {line(*found)}"
        )
        if time.perf_counter() - clock.saved > SAVE_S:
            self.pupil.export(options.out / "model.safetensors")
            self.pupil.save(options.state, step, clock.elapsed())
            clock.saved = time.perf_counter()
        clock.reported, clock.steps_then, self.answers_then = time.perf_counter(), step, answers


def line(found: Found, first: Found) -> str:
    """Formats percentages of right answers: all, first ones, and by kind. Kinds are abbreviated to three letters per
    word, and left out if always right."""

    def percent(pairs: Found) -> float:
        right, asked = (sum(pair[i] for pair in pairs.values()) for i in range(2))
        return 100 * right / max(1, asked)

    parts = [
        ".".join(word[:3] for word in kind.split()) + f" {100 * right / asked:.0f}"
        for kind, (right, asked) in found.items()
        if right < asked
    ]
    return f"right {percent(found):.2f}% first {percent(first):.2f}%: " + " ".join(parts)


def main() -> None:
    started = time.perf_counter()
    options = read_options()
    log = Log(options.out / "log.txt", started)
    try:
        report = _run(options, log, started)
    except HopelessError as reason:
        log(str(reason))
        sys.exit(TOO_SLOW)
    (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")


def _run(options: Options, log: Log, started: float) -> dict[str, object]:
    if options.device != "cuda":
        return train(School.open(options, log), started)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a new plan for every shape
    if options.memory_gib:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.memory_gib * 2**30 / total))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        return train(School.open(options, log), started)


if __name__ == "__main__":
    main()
