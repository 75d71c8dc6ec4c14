"""AdamW with global-norm clipping and the learning-rate schedule, saved without pickling."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nmoe.errors import UserError
from nmoe.learner.schedule import learning_rate_factor


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101). Weight decay touches matrices only, never norms.

    `max_grad_norm` bounds the global 2-norm of the gradient.
    """

    learning_rate: float
    warmup_steps: int = 0
    min_lr_ratio: float = 0.1
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    max_grad_norm: float = 1.0


class Optimizer:
    """Steps a model's parameters; `steps` counts the optimizer steps taken."""

    def __init__(self, model: nn.Module, settings: OptimizerSettings, total_steps: int) -> None:
        self.settings = settings
        self.total_steps = total_steps
        self.steps = 0
        self.names = [name for name, _ in model.named_parameters()]
        self.parameters = [parameter for _, parameter in model.named_parameters()]
        groups = [
            {"params": [p for p in self.parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in self.parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )

    def step(self) -> tuple[float, float]:
        """One step; returns the gradient norm before clipping and the learning rate used.

        Raises FloatingPointError, and leaves the weights alone, where the gradient is not finite.
        """
        settings = self.settings
        factor = learning_rate_factor(self.steps, self.total_steps, settings.warmup_steps, settings.min_lr_ratio)
        for group in self.adamw.param_groups:
            group["lr"] = settings.learning_rate * factor
        grad_norm = float(nn.utils.clip_grad_norm_(self.parameters, settings.max_grad_norm))
        if not grad_norm < float("inf"):
            raise FloatingPointError(f"gradient norm is {grad_norm} at optimizer step {self.steps}: no step was taken")
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        self.steps += 1
        return grad_norm, settings.learning_rate * factor

    def save(self, directory: Path) -> None:
        tensors: dict[str, Tensor] = {}
        for name, parameter in zip(self.names, self.parameters, strict=True):
            for key, value in self.adamw.state.get(parameter, {}).items():
                tensors[f"{name}/{key}"] = value.contiguous()
        save_file(tensors, directory / "optimizer.safetensors")
        (directory / "optimizer.json").write_text(json.dumps({"steps": self.steps}) + "\n")

    def load(self, directory: Path) -> None:
        """Takes back what `save` wrote; raises UserError for a missing or torn file and where a parameter's state is missing."""
        try:
            tensors = load_file(directory / "optimizer.safetensors")
            self.steps = int(json.loads((directory / "optimizer.json").read_text())["steps"])
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{directory}: its optimizer state is missing or torn: {error}") from None
        for name, parameter in zip(self.names, self.parameters, strict=True):
            keys = [key for key in tensors if key.rpartition("/")[0] == name]
            if not keys and self.steps:
                raise UserError(f"{directory / 'optimizer.safetensors'}: no state for parameter {name}")
            self.adamw.state[parameter] = {key.rpartition("/")[2]: tensors[key] for key in keys}
