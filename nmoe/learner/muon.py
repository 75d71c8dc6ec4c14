"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): momentum whose matrices are orthogonalised.

The update of a matrix is its Nesterov momentum with all singular values made about 1, by five Newton-Schulz iterations in bfloat16.
It is scaled by 0.2 sqrt(max(rows, columns)), so that it moves weights as far as AdamW does, at the same learning rate and weight
decay (Liu et al. 2025, arXiv:2502.16982, eq. 4). Embedding, head, norms, routers and biases stay with AdamW.

torch.optim.Muon computes the same for single matrices. Here the experts of a layer are a stack, of which each is orthogonalised by
itself; so are queries, keys and values, and gate and up projection, which are one parameter each. On several ranks a matrix that is
divided between them is gathered, and each rank orthogonalises all of it and keeps its part.
"""

# Shapes: E experts or other matrices of a stack, M rows, N columns.

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nmoe.errors import UserError
from nmoe.model.layers import Attention, Linear, SwiGLU
from nmoe.model.moe import MoE
from nmoe.parallel.ranks import is_sharded, part_of, sharded_as, whole

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_EPS = 1e-7
_RMS_OF_ADAMW = 0.2


@dataclass(frozen=True)
class Matrices:
    """The matrices of a parameter: `Matrices(0, (64, 16, 16))` are 64, 16 and 16 of its rows. Without sizes it is one matrix, or a
    stack of them."""

    axis: int = 0
    sizes: tuple[int, ...] = ()


def hidden_matrices(model: nn.Module) -> dict[str, Matrices]:
    """Returns the parameters that Muon trains, by name: the weights of linear maps within the blocks, and the experts."""
    found: dict[str, Matrices] = {}
    for name, module in model.named_modules():
        if not name.startswith("blocks."):
            continue
        if isinstance(module, Linear) and min(module.weight.shape) > 1:
            found.setdefault(f"{name}.weight", Matrices())
        elif isinstance(module, Attention):
            heads = (module.gates, module.heads, module.kv_heads, module.kv_heads)
            rows = tuple(count * module.head_dim for count in heads if count)
            found[f"{name}.qkv_proj.weight"] = Matrices(0, rows)
        elif isinstance(module, SwiGLU):
            half = module.gate_up_proj.weight.shape[0] // 2
            found[f"{name}.gate_up_proj.weight"] = Matrices(0, (half, half))
        elif isinstance(module, MoE) and module.gate_up is not None:
            half = module.gate_up.shape[-1] // 2
            found |= {f"{name}.gate_up": Matrices(2, (half, half)), f"{name}.down": Matrices()}
    return found


def orthogonalised(matrices: Tensor) -> Tensor:
    """Returns matrices `[..., M, N]` with their singular values moved to between 0.7 and 1.2, in bfloat16."""
    a, b, c = _COEFFICIENTS
    x_EMN = matrices.bfloat16().reshape(-1, *matrices.shape[-2:])
    tall = x_EMN.shape[1] > x_EMN.shape[2]
    x_EMN = x_EMN.mT if tall else x_EMN
    x_EMN = x_EMN / torch.linalg.vector_norm(x_EMN, dim=(1, 2), keepdim=True).clamp(min=_EPS)
    for _ in range(_ITERATIONS):
        gram_EMM = x_EMN @ x_EMN.mT
        change_EMM = torch.baddbmm(gram_EMM, gram_EMM, gram_EMM, beta=b, alpha=c)
        x_EMN = torch.baddbmm(x_EMN, change_EMM, x_EMN, beta=a)
    return (x_EMN.mT if tall else x_EMN).reshape(matrices.shape)


def update_of(momentum: Tensor, matrices: Matrices) -> Tensor:
    """Returns the step of a parameter for a learning rate of 1: each of its matrices orthogonalised and scaled."""
    parts = momentum.split(matrices.sizes, matrices.axis) if matrices.sizes else (momentum,)
    steps = [orthogonalised(part).float() * (_RMS_OF_ADAMW * math.sqrt(max(part.shape[-2:]))) for part in parts]
    return torch.cat(steps, matrices.axis)


class Muon:
    """Muon with its state. `param_groups` has one group, with `lr` and `weight_decay`. `state` has the tensor `momentum` of every
    parameter that was updated; on several ranks, of this rank's part."""

    def __init__(
        self, trained: Iterable[tuple[Tensor, Tensor, Matrices]], momentum: float, group: dict[str, Any]
    ) -> None:
        """Takes for each parameter what this rank holds of it, the whole parameter as it is divided, and its matrices."""
        self._trained = list(trained)
        self._members = {mine for mine, _, _ in self._trained}
        self.momentum = momentum
        self.param_groups = [group]
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        for mine, parameter, _ in self._trained:
            if is_sharded(parameter) and mine.device.type != parameter.device_mesh.device_type:
                raise UserError(
                    'optimizer.kind = "muon" gathers matrices from all ranks, which parallel.offload = "cpu" keeps in host '
                    'memory; set parallel.offload = "none", or train by "adamw"'
                )

    def __contains__(self, mine: Tensor) -> bool:
        return mine in self._members

    @torch.no_grad()
    def step(self) -> None:
        """Updates in place all parameters that have a gradient."""
        (group,) = self.param_groups
        for mine, parameter, matrices in self._trained:
            if mine.grad is None:
                continue
            momentum = self.moments(mine)["momentum"]
            momentum.lerp_(mine.grad, 1 - self.momentum)
            step = _step_of(mine.grad.lerp(momentum, self.momentum), parameter, matrices)
            mine.mul_(1 - group["lr"] * group["weight_decay"]).add_(step, alpha=-group["lr"])

    def moments(self, mine: Tensor) -> dict[str, Tensor]:
        """Returns the state of a parameter, zeros if it was never updated."""
        if not self.state.get(mine):
            self.state[mine] = {"momentum": torch.zeros_like(mine)}
        return self.state[mine]


def _step_of(mine: Tensor, parameter: Tensor, matrices: Matrices) -> Tensor:
    """Returns this rank's part of the step of a parameter, from its part of the momentum."""
    if not is_sharded(parameter):
        return update_of(mine, matrices)
    experts_apart = parameter.ndim == 3 and all(getattr(one, "dim", 0) == 0 for one in parameter.placements)
    if experts_apart:
        return update_of(mine, matrices)
    # Orthogonalised in bfloat16, and so gathered.
    gathered = whole(sharded_as(mine.bfloat16(), parameter))
    return part_of(update_of(gathered, matrices), parameter)
