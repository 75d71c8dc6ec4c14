"""AdamW over groups of parameters (Loshchilov and Hutter 2017, arXiv:1711.05101), by the kernel of `torch.optim.AdamW`.

That class imports torch's compiler as soon as one is made, which takes each start of a training 2 s.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw


class AdamW:
    """`param_groups` have `params`, of which ranks give what they hold, `lr` and `weight_decay`. `state` has the tensors `step`,
    `exp_avg` and `exp_avg_sq` of every parameter that was stepped."""

    def __init__(self, groups: Iterable[dict[str, Any]], beta1: float, beta2: float, eps: float) -> None:
        self.param_groups = list(groups)
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Steps the parameters that have a gradient, in place."""
        for group in self.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self._state(parameter) for parameter in params]
            adamw(
                params,
                [parameter.grad for parameter in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                amsgrad=False,
                beta1=self.beta1,
                beta2=self.beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=self.eps,
                maximize=False,
            )

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        if not self.state.get(parameter):
            self.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        return self.state[parameter]
