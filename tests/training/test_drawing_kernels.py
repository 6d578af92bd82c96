"""The Triton kernels of the drawing, interpreted: Triton decides at import whether it interprets, so in a process of
their own."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch
from training.backdrops import quantise
from training.drawing_kernels import develop, draw_in_place
from training.sprites import Pose, _theta, blend

torch.manual_seed(0)
B, K, S, H, W = 2, 3, 28, 64, 96
canvas, fields, rgb = torch.rand(B, 3, H, W), torch.rand(B, K, S, S), torch.rand(B, K, 3)
x, y, turn = torch.rand(B, K) * W, torch.rand(B, K) * H, torch.randn(B, K)
theta = _theta(Pose(x, y, 5 + x / 3, 5 + y / 3, turn, turn * 0.2), H, W)
gain, bias = torch.rand(B, K) * 5, torch.randn(B, K)
parameters = torch.cat([theta.flatten(2), gain[..., None], bias[..., None], rgb], -1)
drawn = draw_in_place(canvas.clone(), fields, parameters)
torch.testing.assert_close(drawn, blend(canvas, fields, theta, gain, bias, rgb), atol=1e-4, rtol=1e-4)
scale, shift = 0.8 + 0.2 * torch.rand(B), 0.05 * torch.rand(B)
assert torch.equal(develop(canvas, scale, shift, torch.float32), quantise(canvas, scale, shift))
"""


def test_kernels_draw_what_their_twins_draw() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
