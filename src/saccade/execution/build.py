"""Builds an engine from a checkpoint: weights, buffers and graphs first, then KV blocks from what memory is left."""

import logging
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import torch

from saccade.config import shadow_folder, writable_folder
from saccade.errors import ConfigError
from saccade.execution.assembly import new_engine, new_executor
from saccade.execution.check_orders import GraphChecks
from saccade.execution.compilers import CompileProcesses
from saccade.execution.executor import DeviceExecutor
from saccade.execution.rank_messages import RankExecutor, RankStart
from saccade.execution.rank_processes import OnDeath, RankProcesses
from saccade.execution.ranks import (
    CALIBRATION_ROUNDS,
    RankedExecutor,
    check_ranks,
    describe_ranks,
    largest_passes,
    share_of,
    start_ranks,
)
from saccade.execution.resolving import Resolved, num_blocks, resolve
from saccade.execution.shadow import Shadow
from saccade.execution.shadow_file import Origin
from saccade.execution.sizes import encoder_index_for
from saccade.execution.verification import check_graphs
from saccade.inputs.processor import Processor
from saccade.inputs.text.generation import GenerationDefaults
from saccade.kernels.dispatch import device_named, open_device
from saccade.kernels.packages import import_packages
from saccade.kernels.toolchain import load_triton_driver
from saccade.layers.connect import connect
from saccade.layers.parallel import Groups, ParallelGroup
from saccade.machine import usable_cores
from saccade.models.model_config import Config
from saccade.models.quantization import Quantize, read_formats
from saccade.models.registry import read_spec
from saccade.models.vlm import Model
from saccade.models.weights import DTYPES, ONE_RANK, checkpoint_dtype, load_model
from saccade.scheduling.engine import Engine
from saccade.scheduling.matcher import GrammarCompiler
from saccade.scheduling.orders import ORDER_TYPES, BeginShadow, Calibrate
from saccade.scheduling.warm_up import warm_up
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings
from saccade.wire.messages import OnStage, Stage, StartEngine
from saccade.wire.tensor_parallel import RankShare, TensorParallel

SMALL_BYTES = 256 * 10**6

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Built:
    """An engine, this process's executor, and the other ranks if there are any."""

    engine: Engine
    executor: DeviceExecutor
    groups: Groups
    tensor_parallel: TensorParallel
    ranks: RankProcesses | None = None

    def close(self) -> None:
        if self.engine.grammars is not None:
            self.engine.grammars.close()
        if self.engine.idle.shadow is not None:
            self.engine.idle.shadow.close()
        self.executor.checks = None  # they refer to each other, and the device's memory is freed with the executor
        if self.ranks is not None:
            self.ranks.close()
        self.groups.close()


def build_engine(  # noqa: PLR0913
    folder: str | Path,
    settings: EngineSettings,
    limits: SchedulerSettings,
    *,
    processor: Processor,
    report: OnStage = lambda stage: None,
    on_death: OnDeath = lambda error: None,
    tries_grammars: bool = False,
    compiling: CompileProcesses | None = None,
    compares_ranks: bool = True,
) -> Built:
    """`report` is called for each stage, and for each tensor or graph in it. `on_death` is called from another thread,
    with the reason, if the engine's ranks cannot continue. `tries_grammars` compiles untrusted grammars in trial
    processes first (see `Trials`). `compiling` is waited for once the weights are loaded. `compares_ranks` raises if
    ranks get different results from a pass."""
    folder, device = Path(folder), device_named(settings.device)
    if settings.shadow and settings.shadow_dir:
        writable_folder(settings.shadow_dir, "--shadow-dir")  # before the weights are loaded
    config = Config.read(folder / "config.json")
    family, spec = read_spec(config)
    eos = GenerationDefaults.from_folder(folder, processor.tokenizer).eos_token_ids
    if is_slow_by_default(settings, device, config):
        log.warning(
            "the checkpoint is in float32, so the model runs in float32: twice the memory of bfloat16, and slower "
            "(--dtype bfloat16)"
        )
    grammars = GrammarCompiler(  # starts its thread early
        processor.tokenizer, spec.decoder.vocab_size, eos, has_trials=tries_grammars
    )
    start = StartEngine(str(folder), settings, limits, compares_ranks)
    size, ranks, groups = settings.tensor_parallel_size, None, Groups()
    if size > 1:
        device = torch.device("cuda", device.index or 0) if device.type == "cuda" else device
        formats = read_formats(
            config, family.renames, Quantize.asked_by(settings), is_dummy=settings.load_format == "dummy"
        )
        ranks = start_ranks(start, spec, formats, device, on_death)
    try:
        if ranks is not None:
            groups = connect(
                rank=0,
                size=size,
                store=Path(ranks.store),
                device=device,
                connect_s=settings.watchdog_timeout_s,
                check=ranks.check,
            )
        executor, resolved = build_executor(start, device, groups, report=report, compiling=compiling)
        held = [share_of(executor)]
        if ranks is not None:
            held += [msgspec.convert(facts, RankShare) for facts in ranks.wait_ready()]
        of_engine = {"eos_token_ids": eos, "seed": settings.seed, "grammars": grammars}
        engine = _finish(folder, executor, resolved, ranks, report, **of_engine)
        return Built(engine, executor, groups, describe_ranks(executor.state.model, groups, held), ranks)
    except BaseException as error:
        grammars.close()
        if ranks is None:
            raise
        reason = ranks.explain(error)
        ranks.close()
        groups.close()
        raise reason from None if reason is error else error


def is_slow_by_default(settings: EngineSettings, device: torch.device, config: Config) -> bool:
    is_chosen = settings.dtype != "auto" or device.type != "cuda"
    return not is_chosen and checkpoint_dtype(config) == torch.float32


def limit_threads(folder: str | Path) -> None:
    """Uses one thread for a small model, because on a CPU synchronising threads costs it more than they save, and for
    others no more than this process has cores: torch knows nothing of a container's quota."""
    is_small = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")) < SMALL_BYTES
    torch.set_num_threads(1 if is_small else min(torch.get_num_threads(), usable_cores()))


def _finish(
    folder: Path,
    executor: DeviceExecutor,
    resolved: Resolved,
    ranks: RankProcesses | None,
    report: OnStage,
    **of_engine: Any,
) -> Engine:
    settings, limits, model = resolved.settings, resolved.limits, executor.state.model
    fingerprint = _fingerprint(folder, model) if settings.enable_prefix_caching else None
    ranked = None if ranks is None else RankedExecutor(executor, ranks)
    engine = new_engine(
        executor,
        limits,
        encoder_index_for(settings, limits),
        fingerprint=fingerprint,
        ordered=ranked,
        **of_engine,
    )
    report(Stage("warming up"))
    is_cuda = model.place.device.type == "cuda"  # elsewhere replays only emulate graphs and are no faster
    times_steps = _times_steps(executor, limits, is_cuda=is_cuda)
    if is_cuda or times_steps:
        num_rounds = CALIBRATION_ROUNDS if ranks is not None else 0
        engine.calibrate(Calibrate(num_rounds, times_vision=is_cuda, times_steps=times_steps))
    if is_cuda:
        engine.idle.capture_usual()
    if settings.warm_up:
        warm_up(engine)
    if settings.shadow:
        shadow: Shadow = engine.executor.execute(BeginShadow())
        shadow.order_all = None if ranked is None else ranked.execute
        engine.idle.shadow = shadow
    report(Stage("ready"))
    return engine


def _times_steps(executor: DeviceExecutor, limits: SchedulerSettings, *, is_cuda: bool) -> bool:
    """Whether to time passes, which is needed to keep steps short while requests generate tokens."""
    has_graphs, limit_ms = bool(executor.prefill.graphs), limits.max_step_ms
    if 0 < limit_ms < inf and not has_graphs:
        raise ConfigError(
            "max_step_ms needs prefill graphs to measure step times; leave it out (--max-step-ms), or turn graphs on "
            "(--graphs prefill=full)"
        )
    return has_graphs and limit_ms < inf and (is_cuda or limit_ms > 0)


def build_executor(
    start: StartEngine,
    device: torch.device,
    groups: Groups = ONE_RANK,
    *,
    report: OnStage = lambda stage: None,
    compiling: CompileProcesses | None = None,
) -> tuple[DeviceExecutor, Resolved]:
    """Builds weights, buffers and checked graphs, on all ranks in lockstep. Also returns the resolved settings."""
    folder, settings, limits = Path(start.folder), start.settings, start.limits
    is_cuda = device.type == "cuda"
    if is_cuda:
        report(Stage("opening the device"))
        open_device(device, _dtype(settings, device) or torch.bfloat16)
        load_triton_driver()
    report(Stage("loading weights"))
    model = load_model(
        folder,
        device=device,
        dtype=_dtype(settings, device),
        load_format=settings.load_format,  # type: ignore[arg-type]
        groups=groups,
        encoder_mode=settings.mm_encoder_tp_mode,  # type: ignore[arg-type]
        quantize=Quantize.asked_by(settings),
        progress=lambda done, total, name: report(Stage("loading weights", done, total, name)),
    )
    resolved = resolve(folder, settings, limits, model, is_cuda=is_cuda)
    if resolved.limits.max_num_batched_tokens < limits.max_num_batched_tokens:
        log.warning(
            "a step on a CPU has at most %d tokens, not %d: longer prompts take several (--max-num-batched-tokens)",
            resolved.limits.max_num_batched_tokens,
            limits.max_num_batched_tokens,
        )
    model.reserve(**largest_passes(model, resolved.executor, resolved.sizes))
    if compiling is not None:
        compiling.wait(report)
    report(Stage("measuring memory"))
    sizes = replace(resolved.sizes, num_blocks=groups.language.agree(num_blocks(model, resolved)))
    if model.place.kernels.compilers:
        report(Stage("loading kernels"))  # of matrix products, whose shapes are known now
        model.place.kernels.compile(device, model.place.dtype)
    report(Stage("capturing graphs"))
    executor = new_executor(model, sizes, resolved.executor)
    executor.capture(lambda done, total, key: report(Stage("capturing graphs", done, total, str(key))))
    _verify(executor, resolved.settings, groups, report)
    executor.reserve()
    if start.compares_ranks:
        check_ranks(executor, groups)
    group = groups.language
    executor.checks = GraphChecks(executor, group, lambda: _new_shadow(executor, folder, resolved, group))
    return executor, resolved


def follow(start: RankStart) -> RankExecutor:
    """Factory of ranks 1 and up: builds the same executor for this rank's share of the model."""
    given = msgspec.convert(start.settings["engine"], StartEngine)
    torch.set_num_threads(start.settings["num_threads"])
    device = device_named(given.settings.device)
    if device.type == "cuda":
        device = torch.device("cuda", start.device)
        torch.cuda.set_device(device)
    import_packages()
    groups = connect(rank=start.rank, size=start.num_ranks, store=Path(start.store), device=device)
    executor, _ = build_executor(given, device, groups)
    return RankExecutor(
        order_types=ORDER_TYPES,
        execute=executor.execute,
        take_digest=executor.take_trace,
        facts=msgspec.to_builtins(share_of(executor)),
        close=groups.close,
    )


def _new_shadow(executor: DeviceExecutor, folder: Path, resolved: Resolved, group: ParallelGroup) -> Shadow:
    settings, state = resolved.settings, executor.state
    kept_in = Path(settings.shadow_dir).expanduser() if settings.shadow_dir else shadow_folder()
    same = replace(settings, kv_cache_tokens=(state.num_blocks - 1) * state.block_size)  # block 0 is for padding
    origin = Origin(model=str(folder.resolve()), settings=same, limits=resolved.limits, folder=kept_in)
    return Shadow(executor, settings.shadow, origin, slab_bytes=resolved.shadow_bytes, group=group)


def _verify(executor: DeviceExecutor, settings: EngineSettings, groups: Groups, report: OnStage) -> None:
    """Raises if a graph is wrong."""
    is_cuda = executor.state.model.place.device.type == "cuda"
    how = settings.verify if settings.verify != "auto" else ("short" if is_cuda else "off")
    if how == "off":
        return
    report(Stage("verifying graphs"))
    check_graphs(executor, is_short=how == "short", group=groups.language)
    if is_cuda:
        torch.cuda.empty_cache()  # frees what the eager runs of verification used


def _dtype(settings: EngineSettings, device: torch.device) -> torch.dtype | None:
    if settings.dtype == "auto":
        return torch.float32 if device.type == "cpu" else None
    return DTYPES[settings.dtype]


def _fingerprint(folder: Path, model: Model) -> bytes:
    named = f"{folder.resolve()} {model.place.dtype} {model.place.formats} {model.spec}"
    return blake2b(named.encode(), digest_size=32).digest()
