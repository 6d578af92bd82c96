"""How fast the kernels are on this GPU: median times, and the share of the speed of a device copy or a dense product.

Run `python -m tests.gpu.profile_kernels`.
"""

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from saccade.kernels.dispatch import Kernels, SamplingKernels, kernels_for, sampling_for
from saccade.kernels.fused_images import JobKernels
from saccade.kernels.image_jobs import MAX_JOBS, Column, PatchSettings, whole_job, write_table
from tests.gpu.test_kernels import BF16, cuda, every_attention
from tests.gpu.test_sampling import GEMMA, QWEN, normal
from tests.kernels.cases import boundaries, paged_case, photo, qkv_slices, rotary_tables
from tests.kernels.sampling_cases import rows_of

Work = tuple[str, Callable[[], object], float]


def median_ms(body: Callable[[], object], copies: int = 10) -> float:
    """Milliseconds per call, measured in a graph of several calls, so that launches do not count."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(copies):
            body()
    times: list[float] = []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / copies)
    return statistics.median(times)


COPY_BYTES_PER_S = 4.3e12
PRODUCT_FLOP_PER_S = 783e12


def main() -> None:
    kernels, sampling = kernels_for("cuda", BF16), sampling_for("cuda")
    lines = [f"{'kernel':46} {'ms':>8} {'achieved':>14} {'of ceiling':>10}"]
    lines += [
        format_bytes(name, body, count)
        for name, body, count in [
            *norm_work(kernels),
            *rotary_work(kernels),
            *vision_work(kernels),
            *image_work(),
            *sampling_work(sampling),
        ]
    ]
    lines += [format_flops(name, body, count) for name, body, count in attention_work()]
    print(kernels.name, *lines, sep="\n")


def format_bytes(name: str, body: Callable[[], object], num_bytes: float) -> str:
    ms = median_ms(body)
    rate = num_bytes / ms * 1e3
    return f"{name:46} {ms:8.4f} {rate / 1e9:9.0f} GB/s {rate / COPY_BYTES_PER_S:9.0%}"


def format_flops(name: str, body: Callable[[], object], num_flop: float) -> str:
    ms = median_ms(body)
    rate = num_flop / ms * 1e3
    return f"{name:46} {ms:8.4f} {rate / 1e12:7.0f} TFLOP/s {rate / PRODUCT_FLOP_PER_S:8.0%}"


def norm_work(kernels: Kernels) -> Iterator[Work]:
    """Name, call, bytes read and written. The largest rows exceed the L2 cache."""
    for rows, width in ((64, 4096), (406, 4096), (8192, 4096), (1296, 1152), (10368, 1152)):
        x, residual, weight = cuda(rows, width, seed=1), cuda(rows, width, seed=2), cuda(width, seed=3)
        num_bytes = 4 * rows * width * 2
        yield f"add_rms_norm {rows}x{width}", partial(kernels.add_rms_norm, x, residual, weight, 1e-6), num_bytes
        body = partial(kernels.add_layer_norm, x, residual, weight, weight, 1e-6)
        yield f"add_layer_norm {rows}x{width}", body, num_bytes
    for rows in (406, 8192):
        gate_up = cuda(rows, 2 * 12288, seed=4)
        yield f"gated {rows}x12288", partial(kernels.gated_activation, gate_up, "silu"), 3 * rows * 12288 * 2


def rotary_work(kernels: Kernels) -> Iterator[Work]:
    heads, groups, width = 32, 8, 128
    for rows in (64, 406, 8192):
        q, k, v = qkv_slices(rows, heads, groups, width, seed=5, dtype=BF16, device="cuda")
        cos, sin = rotary_tables(rows, width, seed=6, device="cuda")
        weight, slots = cuda(width, seed=7), torch.arange(128, 128 + rows, dtype=torch.int32, device="cuda")
        caches = [torch.zeros(rows // 128 + 3, 128, groups, width, dtype=BF16, device="cuda") for _ in "kv"]
        body = partial(kernels.qk_norm_rotary_store, q, k, v, weight, weight, 1e-6, cos, sin, slots, *caches)
        yield f"qk_norm_rotary_store {rows}x32/8x128", body, rows * width * (4 * (heads + 2 * groups) + 8)


def vision_work(kernels: Kernels) -> Iterator[Work]:
    """Kernels of vision towers: in-place rotary on packed q, k and v, positions, and rows to the encoder cache."""
    for rows in (1296, 10368):
        qkv, (cos, sin) = cuda(rows, 3 * 1152, seed=8), rotary_tables(rows, 72, seed=9, device="cuda")
        yield (
            f"rotate_packed {rows}x16x72",
            partial(kernels.rotate_packed, qkv, 16, cos, sin),
            rows * (4 * 2 * 1152 + 8 * 36),
        )
        x, table = cuda(rows, 1152, seed=10), cuda(2304, 1152, seed=11)
        indices = torch.randint(0, 2304, (4, rows), dtype=torch.int32, device="cuda")
        add = partial(kernels.add_positions, x, table, indices, torch.rand(4, rows, device="cuda"))
        yield f"add_positions {rows}x1152", add, rows * 1152 * 2 * 2
        levels, cache = cuda(4, rows // 4, 4096, seed=12), cuda(4, 16384, 4096, seed=13)
        scatter = partial(kernels.scatter_rows, levels, torch.randperm(16384, device="cuda")[: rows // 4], cache)
        yield f"scatter_rows 4x{rows // 4}x4096", scatter, 2 * levels.nbytes


def image_work() -> Iterator[Work]:
    """Pixels are already on the device; the table of a job is written once."""
    shape = PatchSettings(mean=(0.5,) * 3, std=(0.5,) * 3, patch=16, temporal_patch=2, merge=2, resample="bicubic")
    for height, width in ((560, 560), (1080, 1920)):
        pixels = photo(height, width, seed=10)
        new = (height * 3 // 4 // 32 * 32, width * 3 // 4 // 32 * 32)
        out = torch.empty(new[0] * new[1] // 256, 1536, dtype=BF16, device="cuda")
        job, table = whole_job(pixels.numpy()[None], new, 0, shape), np.zeros((len(Column), MAX_JOBS), np.int32)
        counts = write_table(table, [job], [0], shape)
        scratch = torch.empty(job.scratch_bytes, dtype=torch.uint8, device="cuda")
        run = JobKernels(torch.from_numpy(table).cuda(), pixels.cuda().flatten(), scratch)
        body = partial(run, out, shape, counts)
        yield f"resize and patchify {height}x{width} to {new[0]}x{new[1]}", body, pixels.numel() + out.numel() * 2


def attention_work() -> Iterator[Work]:
    """Name, call, floating-point operations of the scores and of the weighted values."""
    for count, length, width in ((1, 1296, 72), (8, 1296, 72), (8, 1296, 80), (162, 64, 80)):
        q, k, v = qkv_slices(count * length, 16, 16, width, seed=11, dtype=BF16, device="cuda")
        starts = boundaries([length] * count, "cuda")
        for attention in every_attention(is_paged=False):
            body = partial(attention.varlen_attention, q, k, v, starts, length, scale=width**-0.5)
            yield (
                f"varlen {count} x {length} x 16x{width} {attention.name}",
                body,
                4 * count * length**2 * 16 * width,
            )
    for queries, keys, count in ((2048, 2048, 1), (406, 406, 8), (1, 1024, 256), (1, 8192, 4)):
        case = paged_case(
            [queries] * count, [keys] * count, num_heads=32, num_groups=8, head_width=128,
            block_size=128, dtype=BF16, device="cuda", poison=1.0,
        )  # fmt: skip
        seen = keys if queries == 1 else (keys + 1) / 2
        for attention in every_attention(is_paged=True):
            body = partial(attention.paged_attention, *case.inputs, max_query=queries, max_keys=keys, scale=128**-0.5)
            yield (
                f"paged {count} x {queries} over {keys} {attention.name}",
                body,
                4 * count * queries * seen * 32 * 128,
            )


def sampling_work(sampling: SamplingKernels) -> Iterator[Work]:
    """Bytes as if every logit were read once."""
    for count, vocabulary in ((1, QWEN), (64, QWEN), (256, QWEN), (256, GEMMA)):
        logits = normal(count, vocabulary, seed=9)
        size = f"{count} x {vocabulary}"
        num_bytes = 4.0 * count * vocabulary
        yield f"greedy {size}", partial(sampling.greedy, logits), num_bytes
        for name, scale, setting in (
            ("temperature", 3.0, (0.7, 0, 1.0, 0.0)),
            ("min-p", 3.0, (0.7, 0, 1.0, 0.05)),
            ("top-k 20, top-p 0.8", 3.0, (0.7, 20, 0.8, 0.0)),
            ("top-p 0.9", 3.0, (0.7, 0, 0.9, 0.0)),
            ("top-p 0.9, flat logits", 0.5, (1.0, 0, 0.9, 0.0)),
            ("top-k 5000, top-p 0.9, flat", 0.5, (1.0, 5000, 0.9, 0.0)),
        ):
            _, *parameters = rows_of([setting] * count, 1, seed=10).to("cuda").inputs
            yield f"{name} {size}", partial(sampling.sample, logits * (scale / 3.0), *parameters), num_bytes
        ids, rates = logits.argmax(1), torch.full((count,), 1.1, device="cuda")
        seen = torch.zeros(count, vocabulary, dtype=torch.int32, device="cuda")
        seen[:, ::100] = 3
        allowed = torch.full((count, vocabulary // 32), -1, dtype=torch.int32, device="cuda")
        yield f"penalise {size}", partial(sampling.penalise, logits, seen, ids * 0, rates, rates, rates), num_bytes
        yield f"allow_only, all allowed {size}", partial(sampling.allow_only, logits, allowed), num_bytes / 32
        for k in (0, 20):
            yield f"logprobs k={k} {size}", partial(sampling.logprobs, logits, ids, k), num_bytes


if __name__ == "__main__":
    main()
