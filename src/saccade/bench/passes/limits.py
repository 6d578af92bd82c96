"""Hardware limits of a pass: its floating-point operations and bytes, computed from the model's dimensions.

Only unavoidable work counts: matrix products (2 operations per weight and row), the products of attention, weights read
once per pass, and in decode the keys and values of every context. Norms, activations, embeddings and writes are left
out, so a limit is never above the time that is really needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from saccade.layers.layer_spec import MergerSpec, MLPSpec, MoESpec, PoolSpec
from saccade.models.model_spec import DecoderSpec, LayerSpec, VisionSpec


@dataclass(frozen=True, slots=True)
class Rates:
    """Best-case rates of a device. `fp8_flop_per_s` applies to products with one-byte weights."""

    flop_per_s: float
    bytes_per_s: float
    fp8_flop_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ItemSizes:
    """Bytes per number in the layers' weights, and in everything else (keys, values, head, embedding)."""

    layers: int
    others: int


@dataclass(frozen=True, slots=True)
class Limit:
    """The minimum ms of a pass. Compute and reads can overlap, so the longer counts. `products_ms` has no attention."""

    products_ms: float
    flop_ms: float
    bytes_ms: float

    @property
    def ms(self) -> float:
        return max(self.flop_ms, self.bytes_ms)

    @property
    def bound_by(self) -> str:
        return "FLOPs" if self.flop_ms >= self.bytes_ms else "bytes"


def prefill_limit(spec: DecoderSpec, tokens: int, sizes: ItemSizes, rates: Rates) -> Limit:
    """One prompt of `tokens` rows through all layers except the last MLP, which is counted with the head.
    products = 2 * tokens * their parameters; attention as in `causal_flops`; bytes = their weights."""
    products = 2 * tokens * (layer_parameters(spec) - last_mlp_parameters(spec, None))
    read = layer_parameters(spec, tokens) - last_mlp_parameters(spec, tokens)
    return _limit(products, 0, causal_flops(spec, tokens), read * sizes.layers, sizes, rates)


def head_limit(spec: DecoderSpec, num_rows: int, sizes: ItemSizes, rates: Rates) -> Limit:
    """`num_rows` rows through the last MLP to logits: 2 operations per row and weight."""
    products, head = 2 * num_rows * last_mlp_parameters(spec, None), 2 * num_rows * head_parameters(spec)
    read = last_mlp_parameters(spec, num_rows) * sizes.layers + head_parameters(spec) * sizes.others
    return _limit(products, head, 0, read, sizes, rates)


def decode_limit(spec: DecoderSpec, batch: int, context: int, sizes: ItemSizes, rates: Rates) -> Limit:
    """One token for each of `batch` requests that read `context` keys, LM head included.
    products = 2 * batch * (layer_parameters + head); bytes = weights of layers and head + batch * `context_bytes`."""
    products, head = 2 * batch * layer_parameters(spec), 2 * batch * head_parameters(spec)
    attention = batch * sum(_attention_flops(spec, _reach(layer, context)) for layer in spec.layers)
    weights = layer_parameters(spec, batch) * sizes.layers + head_parameters(spec) * sizes.others
    read = weights + batch * context_bytes(spec, context, sizes.others)
    return _limit(products, head, attention, read, sizes, rates)


def layer_parameters(spec: DecoderSpec, num_rows: int | None = None) -> int:
    """Weights in all layers that a pass over `num_rows` rows reads, or that one row is multiplied with (None)."""
    return sum(_attention_parameters(spec) + _mlp_parameters(spec.width, layer.mlp, num_rows) for layer in spec.layers)


def last_mlp_parameters(spec: DecoderSpec, num_rows: int | None) -> int:
    return _mlp_parameters(spec.width, spec.layers[-1].mlp, num_rows)


def head_parameters(spec: DecoderSpec) -> int:
    return spec.vocab_size * spec.width


def causal_flops(spec: DecoderSpec, tokens: int) -> int:
    """Attention of one prompt: row i of a layer sees min(i, window) keys, 4 * heads * head width operations each."""
    return sum(_attention_flops(spec, _seen_keys(layer, tokens)) for layer in spec.layers)


def context_bytes(spec: DecoderSpec, context: int, itemsize: int) -> int:
    """Keys and values that a request reads in decode: 2 * key heads * head width numbers per layer and visible key."""
    row = 2 * spec.attention.num_kv_heads * spec.attention.head_dim * itemsize
    return sum(row * _reach(layer, context) for layer in spec.layers)


def _attention_parameters(spec: DecoderSpec) -> int:
    """Weights of the projections to queries, keys and values, and back."""
    heads = spec.attention
    return spec.width * heads.head_dim * 2 * (heads.num_heads + heads.num_kv_heads)


def _mlp_parameters(width: int, mlp: MLPSpec | MoESpec, num_rows: int | None) -> int:
    """For a mixture of experts: those that `num_rows` rows can reach at most, or that one row is sent to (None)."""
    if isinstance(mlp, MLPSpec):
        return (3 if mlp.gated else 2) * width * mlp.width
    num_experts = mlp.top_k if num_rows is None else min(mlp.num_experts, mlp.top_k * num_rows)
    return width * mlp.num_experts + num_experts * 3 * width * mlp.width


def _attention_flops(spec: DecoderSpec, num_pairs: int) -> int:
    """Scores and weighted values of (row, key) pairs: 2 operations per column, twice."""
    return 4 * spec.attention.num_heads * spec.attention.head_dim * num_pairs


def _seen_keys(layer: LayerSpec, tokens: int) -> int:
    """Sums 1 + 2 + ... up to the window, then adds the window for each further row."""
    ramp = _reach(layer, tokens)
    return ramp * (ramp + 1) // 2 + (tokens - ramp) * ramp


def _reach(layer: LayerSpec, context: int) -> int:
    return context if layer.window is None else min(context, layer.window)


def _limit(products: int, other_products: int, attention: int, num_bytes: int, sizes: ItemSizes, rates: Rates) -> Limit:
    """`products` are operations of the layers, which may run at the FP8 rate."""
    layer_rate = rates.fp8_flop_per_s if sizes.layers == 1 else rates.flop_per_s
    products_ms = (products / layer_rate + other_products / rates.flop_per_s) * 1e3
    return Limit(products_ms, products_ms + attention / rates.flop_per_s * 1e3, num_bytes / rates.bytes_per_s * 1e3)


def vision_limit(spec: VisionSpec, grids: Sequence[tuple[int, int, int]], sizes: ItemSizes, rates: Rates) -> Limit:
    """One pass of the vision tower over media of these grids (frames, rows, columns of patches).
    products = 2 * patches * (patch values * width + depth * block weights) + 2 * units * merger weights of all levels;
    attention = 4 * width operations per pair of patches that see each other; bytes = all of these weights."""
    num_patches = sum(frames * rows * columns for frames, rows, columns in grids)
    width, mlp = spec.block.width, spec.block.mlp
    block = 4 * width * width + (3 if mlp.gated else 2) * width * mlp.width
    per_patch = spec.patch_values * width
    per_unit = _projector_parameters(spec, spec.projector)
    if spec.deepstack_merger is not None:
        per_unit += len(spec.deepstack_layers) * _projector_parameters(spec, spec.deepstack_merger)
    others = 2 * num_patches * per_patch + 2 * num_patches // spec.unit * per_unit
    attention = 4 * width * sum(_visible_pairs(spec, grid) for grid in grids)
    read = spec.depth * block * sizes.layers + (per_patch + per_unit) * sizes.others
    return _limit(2 * num_patches * spec.depth * block, others, attention, read, sizes, rates)


def _projector_parameters(spec: VisionSpec, projector: MergerSpec | PoolSpec) -> int:
    if isinstance(projector, PoolSpec):
        return spec.block.width * projector.out_width
    joined = spec.block.width * spec.unit
    return joined * joined + joined * projector.out_width


def _visible_pairs(spec: VisionSpec, grid: tuple[int, int, int]) -> int:
    """Pairs of patches that see each other, summed over all layers."""
    frames, rows, columns = grid
    whole = frames * (rows * columns) ** 2
    if not spec.window:
        return spec.depth * whole
    side = spec.window * spec.merge
    parts = [(-(-n // side) - 1) * [side] + [n - (-(-n // side) - 1) * side] for n in (rows, columns)]
    windowed = frames * sum(n * n for n in parts[0]) * sum(n * n for n in parts[1])
    num_full = len(spec.full_layers)
    return num_full * whole + (spec.depth - num_full) * windowed
