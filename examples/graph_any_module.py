"""Replays any module with packed inputs from a graph: one graph serves any boundaries. Runs on a CPU or with CUDA."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade import graphs

WIDTH, HEADS = 64, 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Encoder(nn.Module):
    """Two layers of plain torch. Boundaries are a tensor, so the host reads nothing that varies."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.mlp = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, frame: graphs.Frame) -> dict[str, Tensor]:
        x, cu = frame["x"], frame["cu"]
        segment = torch.bucketize(torch.arange(len(x), device=x.device), cu, right=True)
        together = segment[:, None] == segment[None, :]
        for qkv, mlp in zip(self.qkv, self.mlp, strict=True):
            q, k, v = qkv(x).view(len(x), 3, HEADS, -1).permute(1, 2, 0, 3)
            weights = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~together, -torch.inf).softmax(-1)
            attended = weights.masked_fill(~together, 0) @ v.nan_to_num()  # padding may be anything, even NaN
            x = x + F.gelu(mlp(attended.transpose(0, 1).reshape(x.shape)))
        return {"y": x}


def example(lengths: tuple[int, ...], rng: torch.Generator) -> dict[str, object]:
    x = torch.randn(sum(lengths), WIDTH, generator=rng).to(DEVICE)
    return {"x": x, "cu": [sum(lengths[:i]) for i in range(len(lengths) + 1)]}


encoder = Encoder().to(DEVICE)
buffers = [
    graphs.rows("x", ("tokens", WIDTH), torch.float32),
    graphs.boundaries("cu", of="tokens", count="segments"),
    graphs.output("y", ("tokens", WIDTH), torch.float32),
]
arena = graphs.Arena(buffers, {"tokens": 128, "segments": 9}, DEVICE)
buckets = tuple(graphs.Capacity.of(tokens=tokens, segments=9) for tokens in (32, 64, 128))
weights = graphs.Watched.of_module(encoder)
phase = graphs.Phase(
    name="encoder", body=encoder, arena=arena, rows="tokens", buckets=buckets, example=example, state=weights
)
runner = graphs.GraphRunner(phase)
runner.capture_buckets()
report = graphs.verify(runner)  # equal totals, A-B-A, small-large-small, shuffled, poisoned padding
print(report)
for lengths in ((4, 6, 8), (5, 5, 8)):
    batch = example(lengths, torch.Generator().manual_seed(0))
    difference = (runner.run(batch, graphs.copy_out)["y"] - runner.eager(batch, graphs.copy_out)["y"]).abs().max()
    print(f"{list(lengths)}: {difference:.1e} from eager; {runner.decide(arena.admit(batch))}")
raise SystemExit(0 if report.is_right else 1)
