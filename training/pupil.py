"""The trained weights and their optimizer."""

import math
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.marks import Guide
from training.model import Model

_GUIDE = "guide."


class Pupil:
    """Weights in two precisions: working copies for the passes, and masters for the optimizer. A guide's weights are
    trained but not exported. Weights that need no gradient are exported unchanged."""

    def __init__(
        self, model: Model, rate: float, device: torch.device, guide: Guide | None = None, *, warm_up: int = 300
    ) -> None:
        """The learning rate is reached after `warm_up` steps."""
        self.model, self.guide, self.rate, self.warm_up = model, guide, rate, warm_up
        self.names = [name for name, part in model.named_parameters() if part.requires_grad]
        if guide is not None:
            self.names += [f"{_GUIDE}{name}" for name, _ in guide.named_parameters()]
        self.working: list[Tensor] = self.parameters()
        self.masters: list[Tensor] = [part.detach().float().clone().requires_grad_() for part in self.working]
        matrices = [master for master in self.masters if master.ndim > 1]
        vectors = [master for master in self.masters if master.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=device.type == "cuda")
        for master in self.masters:
            master.grad = torch.zeros_like(master)

    def parameters(self) -> list[Tensor]:
        trained = [part for part in self.model.parameters() if part.requires_grad]
        return [*trained, *(self.guide.parameters() if self.guide is not None else ())]

    @torch.no_grad()
    def update(self, progress: float, step: int) -> None:
        """Takes one step of the optimizer; `progress` runs from 0 to 1."""
        gradients = [master.grad for master in self.masters if master.grad is not None]
        torch._foreach_copy_(gradients, [part.grad for part in self.working if part.grad is not None])
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0, foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * schedule(progress, step, self.warm_up)
        self.optimizer.step()
        torch._foreach_copy_(self.working, self.masters)
        torch._foreach_zero_([part.grad for part in self.working if part.grad is not None])

    def save(self, path: Path, step: int, elapsed_s: float) -> None:
        tensors = dict(zip(self.names, self.masters, strict=True))
        for name, master in zip(self.names, self.masters, strict=True):
            for key, value in self.optimizer.state[master].items():
                tensors[f"{key}/{name}"] = torch.as_tensor(value)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        save_file(
            {name: tensor.detach().cpu() for name, tensor in tensors.items()}, part, {"at": f"{step} {elapsed_s}"}
        )
        part.replace(path)

    @torch.no_grad()
    def load(self, path: Path) -> tuple[int, float]:
        """Returns the step and the seconds at which the state was saved."""
        tensors = load_file(path)
        for name, master in zip(self.names, self.masters, strict=True):
            master.copy_(tensors[name])
            keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}/{name}" in tensors]
            self.optimizer.state[master] = {
                key: tensors[f"{key}/{name}"].to(master.device if key != "step" or master.is_cuda else "cpu")
                for key in keys
            }
        torch._foreach_copy_(self.working, self.masters)
        with safe_open(path, "pt") as file:
            step, elapsed_s = file.metadata()["at"].split()
        return int(step), float(elapsed_s)

    def export(self, path: Path) -> None:
        tensors = zip(self.names, self.masters, strict=True)
        kept: dict[str, Tensor] = dict(self.model.named_parameters())
        kept |= {name: master for name, master in tensors if not name.startswith(_GUIDE)}
        part = path.with_suffix(".part")
        save_file({name: master.detach().bfloat16().cpu() for name, master in kept.items()}, part, {"format": "pt"})
        part.replace(path)


def schedule(progress: float, step: int, warm_up: int) -> float:
    """A linear warm-up, then half a cosine down to one hundredth."""
    fall = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return fall * min(1.0, (step + 1) / warm_up)
