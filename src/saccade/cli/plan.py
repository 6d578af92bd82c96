"""`saccade plan`: computes the GPU memory a model needs, from its settings files alone."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from saccade.cli.model import engine_parser, engine_settings
from saccade.cli.parser import Parser, settings_from
from saccade.config import Word, setting
from saccade.terminal import Output, print_json, print_table
from saccade.wire.engine_settings import EngineSettings

if TYPE_CHECKING:
    from saccade.dry_run.memory import GPU, MemoryPlan, Room

EXIT_DOES_NOT_FIT = 1
GIB = 2**30
CAPPED = "*"  # marks a number that --max-num-seqs limits, not memory


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """What `saccade plan` shows."""

    gpu: tuple[Word, ...] = setting(
        (), "GPU such as H200 or A100-40, or a size such as 80GiB; by default all known GPUs"
    )
    json: bool = setting(False, "print JSON")


def new_parser(name: str) -> Parser:
    about = (
        "Show what a model needs on a GPU and what is left for requests. Downloads only the model's settings. Buffers "
        "are counted by the code that allocates them; graphs are estimated."
    )
    return engine_parser(name, about, PlanSettings)


def run(flags: Namespace) -> int:
    asked = settings_from(flags, PlanSettings)
    model, engine, limits = engine_settings(flags)
    from saccade.dry_run.blueprint import draw  # imports torch
    from saccade.dry_run.memory import GPUS, find_gpu, least_room, plan_ranks

    gpus = [find_gpu(name) for name in asked.gpu] or list(GPUS)
    plans = plan_ranks(draw(settings_folder(model, engine), engine, limits))
    rooms = [(gpu, least_room(plans, gpu.nbytes, engine.gpu_memory_utilization)) for gpu in gpus]
    if asked.json:
        print_json(as_data(model, plans, rooms))
    else:
        _show(Output(), model, plans, rooms)
    return EXIT_DOES_NOT_FIT if asked.gpu and not all(room.fits for _, room in rooms) else 0


def settings_folder(model: str, engine: EngineSettings) -> Path:
    """Finds the folder with a model's settings files, without fetching weights. Also accepts a path to config.json."""
    from saccade.models.folder import find_folder

    path = Path(model).expanduser()
    if path.name == "config.json" and path.is_file():
        return path.parent
    return find_folder(model, revision=engine.revision, download_dir=engine.download_dir, with_weights=False)


def as_data(model: str, plans: "Sequence[MemoryPlan]", rooms: "list[tuple[GPU, Room]]") -> dict[str, Any]:
    """The figures of the first rank, plus the bytes of each if there are several. Each rank has its own GPU."""
    plan = plans[0]
    ranks = [{"rank": rank, "bytes": {name: size for name, size, _ in one.rows()}} for rank, one in enumerate(plans)]
    return {
        "model": model,
        **({"tensor_parallel_size": len(plans), "ranks": ranks} if len(plans) > 1 else {}),
        "bytes": {name: size for name, size, _ in plan.rows()},
        "kv_token_bytes": plan.token_bytes,
        "block_size": plan.block_size,
        "num_graphs": plan.num_graphs,
        "max_model_len": plan.max_model_len,
        "max_num_seqs": plan.max_num_seqs,
        "gpus": [{"gpu": gpu.name, "fits": room.fits, **asdict(room)} for gpu, room in rooms],
    }


def _show(console: Console, model: str, plans: "Sequence[MemoryPlan]", rooms: "list[tuple[GPU, Room]]") -> None:
    plan = plans[0]
    console.print(model, markup=False, highlight=False, soft_wrap=True)
    _show_parts(console, plans)
    table = Table("GPU", "GiB", "KV GiB", "KV tokens", f"requests of {plan.max_model_len:,} tokens", "kernels")
    for gpu, room in rooms:
        if room.fits:
            count = f"{room.longest_requests:.0f} {CAPPED}" if room.is_capped else f"{room.longest_requests:.1f}"
            figures = (f"{room.kv_bytes / GIB:.1f}", f"{room.kv_tokens:,}", count)
        else:
            figures = ("-", "-", f"does not fit: {room.missing_bytes / GIB:.1f} GiB missing")
        table.add_row(gpu.name, f"{gpu.gib:.1f}", *figures, _kernels(gpu))
    print_table(console, table)
    if len(plans) > 1:
        console.print(f"each of the {len(plans)} ranks has such a GPU; the fullest one limits the KV cache")
    if any(room.fits and room.is_capped for _, room in rooms):
        console.print(f"{CAPPED} memory has room for more; at most {plan.max_num_seqs} run at a time (--max-num-seqs)")
    where = " per rank" if len(plans) > 1 else ""
    console.print(
        f"a token takes {plan.token_bytes / 1024:.0f} KiB of KV cache{where}; a block has {plan.block_size} tokens"
    )
    if not all(room.fits for _, room in rooms):
        console.print(
            "to make it fit: lower --max-model-len, --max-num-seqs, --encoder-cache-tokens, --encoder-budget-tokens or "
            "--max-num-batched-tokens, raise --gpu-memory-utilization or --tensor-parallel-size, or use a smaller model"
        )


def _show_parts(console: Console, plans: "Sequence[MemoryPlan]") -> None:
    """Prints the parts of the memory, with one column for all ranks that use the same amounts."""
    columns: dict[tuple[tuple[str, int, str], ...], list[int]] = {}
    for rank, plan in enumerate(plans):
        columns.setdefault(tuple(plan.rows()), []).append(rank)
    titles = [f"GiB, {_named(ranks)}" for ranks in columns.values()] if len(plans) > 1 else ["GiB"]
    parts = Table("part", *titles, "source", title="memory besides the KV cache")
    sizes = [{name: size for name, size, _ in rows} for rows in columns]
    for name, _, source in max(columns, key=len):  # only the last ranks have a row for padding
        parts.add_row(name, *(f"{held.get(name, 0) / GIB:.2f}" for held in sizes), source)
    print_table(console, parts)


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def _kernels(gpu: "GPU") -> str:
    if gpu.capability == (0, 0):
        return "?"
    if gpu.capability >= (9, 0):
        return "flash-attn-4, Triton"
    return "torch varlen, Triton" if gpu.capability >= (8, 0) else "Triton"
