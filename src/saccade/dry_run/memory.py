"""GPU memory of an engine, from its blueprint: exact for buffers, estimated for graphs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from torch import Tensor

from saccade.config import Tier
from saccade.dry_run.blueprint import Blueprint, model_of_rank, peak_bytes
from saccade.errors import ConfigError
from saccade.execution.ranks import largest_passes
from saccade.execution.sizes import HEADROOM_BYTES, block_bytes, blocks_that_fit, wanted_blocks
from saccade.graphs import GraphRunner
from saccade.models.vlm import Model

CONTEXT_BYTES = 600 * 2**20  # CUDA context, library code and workspaces, as measured on an H200
GRAPH_BYTES = 2 * 2**20  # besides temporaries; on an H200, 347 graphs of Qwen3-VL-8B took 0.7 GiB


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of everything except the KV cache, and of one KV block, on one rank."""

    weights: int
    encoder_cache: int
    sampling: int  # logits and token counts
    arenas: dict[str, int]
    language_temporaries: int  # of the largest graph; all graphs share them
    vision_temporaries: int  # of the largest graph; vision graphs have their own pool
    eager_vision: int  # kept for passes without a graph
    num_graphs: int
    block_bytes: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    wanted_blocks: int | None  # if the cache size is configured, or memory is not measured
    shadow: int = 0  # copies for shadow checks, and memory for language passes without a graph
    padding: int = 0  # zeros that make all ranks' shares equally large
    exchange: int = 0  # buffers for exchange with other ranks

    @property
    def graphs(self) -> int:
        return self.language_temporaries + self.vision_temporaries + self.num_graphs * GRAPH_BYTES

    @property
    def needed(self) -> int:
        """Everything except weights and KV cache."""
        own = self.padding + self.exchange + self.encoder_cache + self.sampling + sum(self.arenas.values())
        return own + self.graphs + self.eager_vision + self.shadow

    @property
    def token_bytes(self) -> float:
        return self.block_bytes / self.block_size

    def rows(self) -> list[tuple[str, int, str]]:
        """What takes memory: name, bytes, and where the number comes from."""
        return [
            ("weights", self.weights, "config.json"),
            *([("padding of weights", self.padding, "exact")] if self.padding else []),
            *((f"{name} buffers", size, "exact") for name, size in self.arenas.items()),
            ("encoder cache", self.encoder_cache, "exact, --encoder-cache-tokens"),
            ("logits and sampling", self.sampling, "exact, --max-num-seqs"),
            (f"{self.num_graphs} graphs", self.graphs, "estimated"),
            ("vision passes without a graph", self.eager_vision, "estimated"),
            *([("exchange with other ranks", self.exchange, "exact for symmetric memory")] if self.exchange else []),
            *([("shadow checks", self.shadow, "estimated, --shadow")] if self.shadow else []),
            ("CUDA and libraries", CONTEXT_BYTES, "assumed"),
            ("room to spare", HEADROOM_BYTES, "kept free"),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a GPU has left for keys and values."""

    total_bytes: int
    num_blocks: int  # including block 0 for padding
    kv_tokens: int
    kv_bytes: int
    longest_requests: float  # concurrent requests of --max-model-len tokens
    is_capped: bool  # memory allows more of them than --max-num-seqs
    missing_bytes: int  # for one request of --max-model-len tokens; 0 if the model can be served

    @property
    def fits(self) -> bool:
        return self.missing_bytes == 0


def plan_ranks(blueprint: Blueprint) -> list[MemoryPlan]:
    """One plan per rank. All have the same buffers and graphs; their shares of the weights differ."""
    first, model, resolved = plan_memory(blueprint), blueprint.model, blueprint.resolved
    settings = resolved.settings
    if settings.tensor_parallel_size == 1:
        return [first]
    exchange = sum(model.exchanged_bytes(**largest_passes(model, resolved.executor, resolved.sizes)))
    ranks = range(settings.tensor_parallel_size)
    return [
        replace(first, weights=held.parameter_bytes(), padding=_padding_bytes(held), exchange=exchange)
        for held in (model_of_rank(rank, model.place, model.spec, settings) for rank in ranks)
    ]


def plan_memory(blueprint: Blueprint) -> MemoryPlan:
    executor, resolved = blueprint.executor, blueprint.resolved
    settings, limits, block_size = resolved.settings, resolved.limits, resolved.sizes.block_size
    state, copies = executor.state, sum(resolved.shadow_bytes.values())
    captured = [phase for phase in executor.phases if phase.settings.tiers]
    measured = blueprint.is_cuda and not settings.kv_cache_tokens
    peaks = {phase.phase.name: peak_bytes(blueprint, phase) for phase in executor.phases}
    vision = peaks.pop("vision", 0)
    may_be_eager = executor.encoder is not None and executor.encoder.most_eager_rows() > 0
    return MemoryPlan(
        weights=blueprint.model.parameter_bytes(),
        encoder_cache=_nbytes(state.vision_rows),
        sampling=sum(map(_nbytes, (state.newest_ids, state.logits, state.edited, state.seen))),
        arenas={phase.phase.name: phase.phase.arena.nbytes for phase in executor.phases},
        language_temporaries=max(peaks.values()),
        vision_temporaries=vision,
        eager_vision=vision if may_be_eager else 0,
        shadow=copies + max(peaks.values()) if copies else 0,
        num_graphs=sum(_num_graphs(phase, is_cuda=blueprint.is_cuda) for phase in captured),
        block_bytes=block_bytes(blueprint.model, block_size),
        block_size=block_size,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        wanted_blocks=None if measured else wanted_blocks(settings, limits, block_size),
    )


def least_room(plans: Sequence[MemoryPlan], total_bytes: int, utilization: float) -> Room:
    """The KV cache of an engine with one such GPU per rank. The rank with the least memory left decides."""
    rooms = (room_on(plan, total_bytes, utilization) for plan in plans)
    return max(rooms, key=lambda room: (room.missing_bytes, -room.num_blocks))


def room_on(plan: MemoryPlan, total_bytes: int, utilization: float) -> Room:
    usable = int(total_bytes * utilization)
    left = usable - CONTEXT_BYTES - plan.weights
    possible = blocks_that_fit(left, plan.needed, plan.block_bytes)
    num_blocks = possible if plan.wanted_blocks is None else plan.wanted_blocks
    least = max(-(-plan.max_model_len // plan.block_size) + 1, plan.wanted_blocks or 0)
    tokens = max(num_blocks - 1, 0) * plan.block_size
    return Room(
        total_bytes=total_bytes,
        num_blocks=max(num_blocks, 0),
        kv_tokens=tokens,
        kv_bytes=max(num_blocks, 0) * plan.block_bytes,
        longest_requests=min(tokens / plan.max_model_len, plan.max_num_seqs),
        is_capped=tokens / plan.max_model_len > plan.max_num_seqs,
        missing_bytes=max(0, least - possible) * plan.block_bytes,
    )


@dataclass(frozen=True, slots=True)
class GPU:
    """Memory as CUDA reports it, and the compute capability."""

    name: str
    gib: float
    capability: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return int(self.gib * 2**30)


GPUS = (
    GPU("B200", 178.3, (10, 0)),
    GPU("H200", 139.8, (9, 0)),
    GPU("H100", 79.2, (9, 0)),
    GPU("H100-NVL", 93.1, (9, 0)),
    GPU("GH200", 94.5, (9, 0)),
    GPU("H20", 95.1, (9, 0)),
    GPU("A100-80", 79.2, (8, 0)),
    GPU("A100-40", 39.4, (8, 0)),
    GPU("L40S", 44.4, (8, 9)),
    GPU("A6000", 47.4, (8, 6)),
    GPU("RTX-PRO-6000", 94.9, (12, 0)),
    GPU("RTX-5090", 31.4, (12, 0)),
    GPU("RTX-4090", 23.5, (8, 9)),
    GPU("L4", 22.0, (8, 9)),
    GPU("A10G", 22.0, (8, 6)),
)


def find_gpu(name: str) -> GPU:
    """A listed GPU, or one with as much memory as `name` says, such as 80GiB or 24GB."""
    for unit, scale in (("GIB", 1.0), ("GB", 1e9 / 2**30)):
        if name.upper().endswith(unit):
            return GPU(name, _positive(name[: -len(unit)], name) * scale, (0, 0))
    plain = _plain(name)
    for gpu in GPUS:
        if plain in (_plain(gpu.name), _plain(gpu.name).removeprefix("RTX")):
            return gpu
    raise ConfigError(
        f"gpu is {name!r}; known GPUs are {', '.join(gpu.name for gpu in GPUS)}, and sizes such as 80GiB (--gpu)"
    )


def _plain(name: str) -> str:
    return name.upper().replace("-", "").replace(" ", "").replace("_", "")


def _positive(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < inf:
        raise ConfigError(f"gpu is {name!r}; a size is a number above 0 with GiB or GB (--gpu)")
    return value


def _num_graphs(runner: GraphRunner, *, is_cuda: bool) -> int:
    """One graph per bucket and, on a GPU, as many exact graphs as allowed."""
    settings = runner.settings
    buckets = len(runner.phase.buckets) if Tier.CAPACITY in settings.tiers else 0
    return buckets + (settings.exact_max_graphs if is_cuda and Tier.EXACT in settings.tiers else 0)


def _padding_bytes(model: Model) -> int:
    """Bytes of parameters that no checkpoint tensor fills."""
    storages = [slot.view.untyped_storage() for _, slot in model.slots()]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values()) - model.parameter_bytes()


def _nbytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes
