"""An engine without a device: every buffer has its real shape but no memory. The code of real engines builds it on
torch's meta device, so sizes (`saccade plan`), buckets and decisions (`saccade explain`) cannot differ from theirs."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from saccade.errors import ConfigError
from saccade.execution.assembly import new_executor
from saccade.execution.executor import DeviceExecutor
from saccade.execution.ranks import check_division
from saccade.execution.resolving import Resolved, resolve
from saccade.graphs import Frame, GraphRunner
from saccade.graphs.operation_mode import OperationMode
from saccade.graphs.recorded import leaves_of
from saccade.kernels.dispatch import Kernels, KernelTable, SamplingKernels, kernels_for, sampling_for
from saccade.layers.formats import Formats
from saccade.layers.layer import Placement
from saccade.layers.parallel import Groups
from saccade.models.model_config import Config
from saccade.models.model_spec import ModelSpec
from saccade.models.quantization import Quantize, read_formats
from saccade.models.registry import read_spec
from saccade.models.vlm import EncoderMode, Model
from saccade.models.weights import DTYPES, checkpoint_dtype
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings

Tables = tuple[Kernels, SamplingKernels]
TableT = TypeVar("TableT", bound=KernelTable)

META = torch.device("meta")
MAX_RANKS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    model: Model
    executor: DeviceExecutor
    resolved: Resolved
    is_cuda: bool
    live: "LiveBytes"


def draw(
    folder: Path,
    settings: EngineSettings,
    limits: SchedulerSettings,
    *,
    is_cuda: bool = True,
    tables: Tables | None = None,
) -> Blueprint:
    """The blueprint of an engine, or of its rank 0, from the checkpoint's config.json and image settings. Without
    `tables`, kernels are plain torch, and `live` counts what they allocate."""
    config = Config.read(folder / "config.json")
    family, spec = read_spec(config)
    dtype = dtype_for(settings, config, is_cuda=is_cuda)
    live = LiveBytes()
    kernels, sampling = tables or (_counted(kernels_for("cpu", dtype), live), _counted(sampling_for("cpu"), live))
    is_dummy = settings.load_format == "dummy"
    formats = read_formats(config, family.renames, Quantize.asked_by(settings), is_dummy=is_dummy)
    place = Placement(kernels=kernels, device=META, dtype=dtype, formats=formats)
    model = model_of_rank(0, place, spec, settings)
    resolved = resolve(folder, settings, limits, model, is_cuda=is_cuda)
    executor = new_executor(model, resolved.sizes, resolved.executor, sampling)
    return Blueprint(model=model, executor=executor, resolved=resolved, is_cuda=is_cuda, live=live)


def dividing_sizes(spec: ModelSpec, formats: Formats, encoder_mode: EncoderMode) -> list[int]:
    return [size for size in range(1, MAX_RANKS + 1) if _can_be_divided(spec, size, formats, encoder_mode)]


def peak_bytes(blueprint: Blueprint, runner: GraphRunner, *, all_layers: bool = False) -> int:
    """Peak bytes of live temporaries in a phase's largest bucket, with fused kernels. One layer of each kind is enough,
    because each layer frees what the one before it made."""
    arena = runner.phase.arena
    live = blueprint.live
    live.reset()
    with torch.no_grad(), live:
        runner.phase.body(Frame(arena, arena.limits, is_warmup=not all_layers))
    return live.peak


class LiveBytes(OperationMode):
    """Counts the bytes of live storages that operations made. A kernel counts as one operation, because its fused form
    does not allocate the intermediates of its plain-torch reference."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, int] = {}
        self._is_inside = False

    def reset(self) -> None:
        self.peak, self._live = 0, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._is_inside:
            self._note(result, (args, kwargs))
        return result

    def as_one(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **how: Any) -> Any:
            outer, self._is_inside = self._is_inside, True
            try:
                result = kernel(*args, **how)
            finally:
                self._is_inside = outer
            if not outer:
                self._note(result, (args, how))
            return result

        return call

    def _note(self, result: Any, given: Any) -> None:
        known = {t.untyped_storage()._cdata for t in leaves_of(given) if isinstance(t, Tensor)}
        for leaf in leaves_of(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in known and storage._cdata not in self._live:
                    self._live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self._live.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self._live.values()))


def _can_be_divided(spec: ModelSpec, size: int, formats: Formats, encoder_mode: EncoderMode) -> bool:
    try:
        check_division(spec, size, encoder_mode, formats)
    except ConfigError:
        return False
    return True


def model_of_rank(rank: int, place: Placement, spec: ModelSpec, settings: EngineSettings) -> Model:
    group = Groups.imagined(rank, settings.tensor_parallel_size).language
    return Model(replace(place, group=group), spec, encoder_mode=settings.mm_encoder_tp_mode)  # type: ignore[arg-type]


def dtype_for(settings: EngineSettings, config: Config, *, is_cuda: bool) -> torch.dtype:
    if settings.dtype in DTYPES:
        return DTYPES[settings.dtype]
    return checkpoint_dtype(config) if is_cuda else torch.float32


def _like_queries(queries: Tensor, *args: Any, **how: Any) -> Tensor:
    """Stands in for attention, whose reference would take seconds to run."""
    return torch.empty_like(queries)


def _counted(table: TableT, live: LiveBytes) -> TableT:
    """The same kernels, each counted as one operation."""
    found = {name: getattr(table, name) for name in table.kernel_names()}
    found |= {name: _like_queries for name in ("varlen_attention", "paged_attention") if name in found}
    return table.replacing(**{name: live.as_one(kernel) for name, kernel in found.items()})
