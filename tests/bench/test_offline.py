"""`saccade bench offline`: limits against numbers worked out by hand, and a whole run on a tiny model."""

import io
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from saccade.bench.passes.limits import (
    ItemSizes,
    Rates,
    causal_flops,
    context_bytes,
    decode_limit,
    head_limit,
    layer_parameters,
    prefill_limit,
)
from saccade.bench.passes.offline_bench import (
    NO_GRAPHS,
    WAYS,
    OfflineBench,
    bench_executor,
    bench_state,
    decode_values,
    run_offline_bench,
)
from saccade.bench.passes.offline_report import print_offline_bench
from saccade.bench.passes.pass_settings import OfflineBenchSettings
from saccade.bench.passes.timing import rates_of
from saccade.cli.parser import Parser, settings_from
from saccade.config import Mode
from saccade.errors import ConfigError
from saccade.execution.state import DeviceState
from saccade.graphs import copy_out
from saccade.layers.layer_spec import AttentionSpec, MLPSpec, MoESpec, NormSpec, RotarySpec
from saccade.models.model_spec import DecoderSpec, LayerSpec
from saccade.models.vlm import Model
from saccade.models.weights import load_model
from saccade.scheduling.buckets import few_buckets, prefill_buckets

H200 = Rates(flop_per_s=783e12, bytes_per_s=4.3e12, fp8_flop_per_s=1490e12)
BF16, FP8 = ItemSizes(2, 2), ItemSizes(1, 2)
SETTINGS = OfflineBenchSettings(
    load_format="dummy",
    device="cpu",
    tokens=(5, 21, 40),
    batches=(1, 3, 11),
    context=19,
    max_model_len=48,
    encoder_budget_tokens=32,
    block_size=8,
    rounds=1,
)
QWEN3_VL = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 100,
    "video_token_id": 101,
    "vision_start_token_id": 102,
    "vision_end_token_id": 103,
    "text_config": {
        "vocab_size": 120,
        "hidden_size": 48,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [3, 3, 2], "rope_type": "default"},
    },
    "vision_config": {
        "depth": 3,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 40,
        "patch_size": 4,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 48,
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0, 2],
        "hidden_act": "gelu_pytorch_tanh",
    },
}


def decoder(layer: LayerSpec, count: int) -> DecoderSpec:
    """Qwen3-8B but for its layers."""
    return DecoderSpec(
        vocab_size=151936,
        width=4096,
        attention=AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5),
        norm=NormSpec(kind="rms", eps=1e-6),
        rotaries=(RotarySpec(width=128, base=5e6, axes=(0,) * 64),),
        layers=(layer,) * count,
        tied_head=False,
    )


EIGHT_B = decoder(LayerSpec(mlp=MLPSpec(width=12288, activation="silu")), 36)


def test_parameters_of_8b_layers() -> None:
    # 4096 x (4096 + 2 x 1024) + 4096 x 4096 + 3 x 4096 x 12288 = 192,937,984, times 36
    assert layer_parameters(EIGHT_B) == layer_parameters(EIGHT_B, 7) == 6_945_767_424


@pytest.mark.parametrize(("tokens", "products_ms"), [(406, 7.05), (1024, 17.77), (4096, 71.09), (8192, 142.2)])
def test_prefill_limit_of_8b_products(tokens: int, products_ms: float) -> None:
    """Of all layers but the last MLP, 3 x 4096 x 12288 of the parameters above."""
    limit = prefill_limit(EIGHT_B, tokens, BF16, H200)
    assert limit.products_ms == pytest.approx(products_ms, rel=5e-3)
    assert limit.bound_by == "FLOPs"


def test_prefill_limit_of_8b_adds_attention() -> None:
    # 36 layers x 32 heads x 128 columns x 4 x 8192 x 8193 / 2 pairs = 1.979e13 operations
    assert causal_flops(EIGHT_B, 8192) == 36 * 32 * 128 * 4 * (8192 * 8193 // 2)
    limit = prefill_limit(EIGHT_B, 8192, BF16, H200)
    assert limit.ms - limit.products_ms == pytest.approx(25.3, rel=5e-3)


def test_prefill_limit_of_a_short_prompt_is_its_weights() -> None:
    limit = prefill_limit(EIGHT_B, 64, BF16, H200)
    assert limit.bound_by == "bytes"
    assert limit.ms == pytest.approx(3.16, rel=5e-3)


def test_head_limit_of_8b() -> None:
    weights = 151936 * 4096 + 3 * 4096 * 12288
    assert head_limit(EIGHT_B, 1, BF16, H200).ms == pytest.approx(weights * 2 / 4.3e12 * 1e3)


def test_decode_limit_of_8b() -> None:
    # 36 layers x 2 x 8 heads x 128 columns x 2 bytes = 147,456 bytes a key
    assert context_bytes(EIGHT_B, 1000, 2) == 147_456_000
    # (13.89 + 1.245) GB of weights; + 64 x 147 MB of keys and values
    assert decode_limit(EIGHT_B, 1, 0, BF16, H200).ms == pytest.approx(3.52, rel=5e-3)
    assert decode_limit(EIGHT_B, 64, 1000, BF16, H200).ms == pytest.approx(5.71, rel=5e-3)
    assert decode_limit(EIGHT_B, 4096, 1, BF16, H200).bound_by == "FLOPs"


def test_limits_of_8b_with_layers_in_fp8() -> None:
    # layers of 6.95 GB; head, keys and values as before
    assert decode_limit(EIGHT_B, 64, 1000, FP8, H200).ms == pytest.approx((6.946 + 1.245 + 9.437) / 4.3, rel=5e-3)
    bf16, fp8 = (prefill_limit(EIGHT_B, 8192, sizes, H200) for sizes in (BF16, FP8))
    assert fp8.products_ms == pytest.approx(bf16.products_ms * 783 / 1490)
    assert fp8.ms - fp8.products_ms == pytest.approx(25.3, rel=5e-3)
    assert head_limit(EIGHT_B, 1, FP8, H200).bytes_ms == pytest.approx((1.245 + 0.151) / 4.3, rel=5e-3)


def test_a_window_bounds_what_a_row_sees() -> None:
    spec = decoder(LayerSpec(mlp=MLPSpec(width=8, activation="silu"), window=3), 1)
    assert causal_flops(spec, 5) == 4 * 32 * 128 * (1 + 2 + 3 + 3 + 3)
    assert context_bytes(spec, 100, 2) == context_bytes(spec, 3, 2)


def test_a_mixture_computes_with_few_experts_and_reads_many() -> None:
    experts = MoESpec(num_experts=16, top_k=2, width=10, activation="silu", renormalise=True)
    spec = decoder(LayerSpec(mlp=experts), 1)
    attention, router, expert = 4096 * 128 * 2 * 40, 4096 * 16, 3 * 4096 * 10
    assert layer_parameters(spec) == attention + router + 2 * expert
    assert layer_parameters(spec, 3) == attention + router + 6 * expert
    assert layer_parameters(spec, 300) == attention + router + 16 * expert


def test_rates_are_measured_where_none_are_given() -> None:
    rates = rates_of(torch.device("cpu"), torch.float32, 0, 12.5)
    assert rates.bytes_per_s == 12.5
    assert 1e8 < rates.flop_per_s < 1e15


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen3_vl")
    (made / "config.json").write_text(json.dumps(QWEN3_VL))
    return made


@pytest.fixture(scope="module")
def bench(folder: Path) -> OfflineBench:
    return run_offline_bench(str(folder), SETTINGS, lambda text: None)


def test_every_way_is_measured_at_every_size(bench: OfflineBench) -> None:
    prefill = [(line.size, line.way) for line in bench.of_phase("prefill")]
    assert prefill == [(tokens, way) for tokens in SETTINGS.tokens for way in WAYS]
    decode = [(line.size, line.way) for line in bench.of_phase("decode")]
    assert decode == [(batch, way) for batch in SETTINGS.batches for way in ("eager", "full")]
    assert all(line.ms >= line.host_ms > 0 and line.rows >= line.size for line in bench.lines)
    assert all(line.of_limit == pytest.approx(line.limit_ms / line.ms) for line in bench.lines)
    buckets = few_buckets(prefill_buckets(max(SETTINGS.tokens), max(SETTINGS.batches) + 1), "tokens")
    padded = next(bucket["tokens"] for bucket in buckets if bucket["tokens"] >= 21)
    assert [line.rows for line in bench.of_phase("prefill") if line.size == 21] == [21, padded, padded]


def test_every_replay_was_compared_and_equal(bench: OfflineBench) -> None:
    graphs = [(line.phase, line.size, line.way) for line in bench.lines if line.way != "eager"]
    assert [(check.phase, check.size, check.way) for check in bench.checks] == graphs
    assert all(check.has_equal_tokens and check.difference == 0 for check in bench.checks)


def test_captures_and_stages_are_reported(bench: OfflineBench) -> None:
    counts = {(part.way, part.phase): part.num_graphs for part in bench.captures}
    assert counts.keys() == {
        ("piecewise", "prefill"),
        *(("full", phase) for phase in ("vision", "prefill", "decode", "head", "sample")),
    }
    assert counts["piecewise", "prefill"] == counts["full", "prefill"] > 0
    assert all(part.buffer_bytes > 0 and part.seconds > 0 for part in bench.captures)
    names = [stage.name for stage in bench.stages]
    assert names[:3] == ["weights", "kernels", "caches"]
    assert "full: capture" in names and "eager: capture" not in names


def test_the_report_has_every_table_and_the_figures_are_plain_data(bench: OfflineBench) -> None:
    shown = io.StringIO()
    print_offline_bench(bench, Console(file=shown, width=160))
    text = shown.getvalue()
    for part in ("prefill: one prompt", "decode: one token", "capture", "start-up", "same tokens at all 3 sizes"):
        assert part in text
    assert len(json.loads(json.dumps(asdict(bench)))["lines"]) == len(bench.lines)


def test_a_replay_with_other_tokens_is_called_out(bench: OfflineBench) -> None:
    broken = replace(bench, checks=[replace(bench.checks[0], has_equal_tokens=False)])
    shown = io.StringIO()
    print_offline_bench(broken, Console(file=shown, width=160))
    assert "OTHER TOKENS at 5" in shown.getvalue()


@pytest.fixture
def state(folder: Path) -> DeviceState:
    model: Model = load_model(folder, load_format="dummy", dtype=torch.float32)
    return bench_state(model, SETTINGS)


def test_decoding_requests_read_their_own_blocks(state: DeviceState) -> None:
    """A changed key in the oldest block of one request shows in that row and in no other."""
    executor = bench_executor(state, SETTINGS, NO_GRAPHS)
    values = decode_values(state, 3, SETTINGS.context)
    tables = values["block_tables"][:, :3]
    assert len(set(tables.flatten().tolist())) == tables.size and tables.min() > 0
    before = executor.decode.eager(values, lambda outputs: state.logits[:3].clone())
    for keys, _ in state.caches:
        keys[tables[1, 0], 0] += 5.0
    after = executor.decode.eager(values, lambda outputs: state.logits[:3].clone())
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, False, True]


def test_a_padded_eager_run_is_a_run_of_the_bucket(state: DeviceState) -> None:
    decode = bench_executor(state, SETTINGS, NO_GRAPHS | {"decode": Mode.FULL}).decode
    values = decode_values(state, 3, SETTINGS.context)
    seen = []
    body = decode.phase.body
    object.__setattr__(decode.phase, "body", lambda frame: seen.append(frame.capacity["tokens"]) or body(frame))  # type: ignore[func-returns-value]
    outputs = decode.eager(values, copy_out, at=decode.phase.buckets[-1])
    assert seen == [11] and outputs["next_ids"].shape == (3,)


def test_flags_are_the_fields_of_the_settings() -> None:
    parser = Parser("bench offline")
    parser.add_settings(OfflineBenchSettings)
    flags = parser.read(["--tokens", "64,4K", "--batches", "8", "--flop-per-s", "1e12", "--load-format", "dummy"])
    settings = settings_from(flags, OfflineBenchSettings)
    assert (settings.tokens, settings.batches, settings.flop_per_s) == ((64, 4096), (8,), 1e12)
    assert replace(settings, tokens=OfflineBenchSettings().tokens).context == 1000


@pytest.mark.parametrize(
    ("name", "value"), [("tokens", (0,)), ("batches", (0,)), ("context", 0), ("rounds", -1), ("flop_per_s", -1.0)]
)
def test_bad_settings_name_their_flag(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}"):
        OfflineBenchSettings(**{name: value})
