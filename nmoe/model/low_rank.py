"""Low-rank updates of frozen weights: `W + scale * B A`, computed beside the weight and never added to it.

LoRA, Hu et al. 2021 (arXiv:2106.09685, section 4.1). A linear layer that holds several projections end to end (query, key and
value; gate and up) can have an update for each of them. Their A are one matrix, because a small product costs more to launch
than to compute; each B adds to its own columns of the output.

With fast numerics only the frozen weight's product comes from the table (`nmoe.model.ops`), and the narrow products are
torch's: with oneDNN, decoding with adapted experts took three times as long (docs/decisions.md). With exact numerics all
products come from the table, because MKL's narrow products depend on the batch.
"""

# Shapes: N rows, D inputs, F outputs, G projections with an update, r rank, S outputs of those projections together, E experts,
# R routed rows sorted by expert.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmoe.model.ops.table import ops_for

Span = tuple[int, int]


class LowRank(nn.Module):
    """The updates of one linear layer: `y[:, span] += scale * (x @ A.T) @ B.T` for each span of outputs.

    `a_GD` is `[G * r, D]`, the projections' A one after another; `b_Sr` is `[S, r]`, their B one after another.
    """

    def __init__(self, inputs: int, spans: tuple[Span, ...], rank: int, scale: float, like: Tensor) -> None:
        super().__init__()
        outputs = sum(stop - start for start, stop in spans)
        self.spans, self.rank, self.scale = spans, rank, scale
        self.a_GD = nn.Parameter(torch.empty(len(spans) * rank, inputs, dtype=like.dtype, device=like.device))
        self.b_Sr = nn.Parameter(torch.zeros(outputs, rank, dtype=like.dtype, device=like.device))

    def forward(self, x_ND: Tensor, weight_FD: Tensor, bias_F: Tensor | None, exact: bool = False) -> Tensor:
        """Computes the whole layer, frozen weight plus updates, `[N, F]`; `exact` is as in `ops_for`."""
        if torch.is_grad_enabled():
            out_NF: Tensor = _LinearWithUpdates.apply(x_ND, weight_FD, bias_F, self.a_GD, self.b_Sr, self, exact)
            return out_NF
        return self.product(x_ND, weight_FD, bias_F, self.a_GD, self.b_Sr, exact)[0]

    def product(
        self, x_ND: Tensor, weight_FD: Tensor, bias_F: Tensor | None, a_GD: Tensor, b_Sr: Tensor, exact: bool
    ) -> tuple[Tensor, Tensor]:
        """Returns the layer's output `[N, F]` and `x @ A.T`. Called where no gradient is recorded."""
        ops = ops_for(x_ND, exact)
        out_NF = ops.linear(x_ND, weight_FD, bias_F)
        low_NG = ops.linear(x_ND, a_GD) if exact else F.linear(x_ND, a_GD)
        for (start, stop), ranks, rows in self.parts():
            if exact:
                # Scaled first, then added, because the intermediate rounding of `addmm_` depends on the library.
                update_NF = ops.linear(low_NG[:, ranks], b_Sr[rows])
                out_NF[:, start:stop] += update_NF.mul_(self.scale)
            else:
                out_NF[:, start:stop].addmm_(low_NG[:, ranks], b_Sr[rows].t(), alpha=self.scale)
        return out_NF, low_NG

    def parts(self) -> list[tuple[Span, slice, slice]]:
        """Returns for each projection its span of outputs, its rows of A (which are columns of `x @ A.T`) and its rows of B."""
        parts, row = [], 0
        for i, (start, stop) in enumerate(self.spans):
            rows = slice(row, row + stop - start)
            parts.append(((start, stop), slice(i * self.rank, (i + 1) * self.rank), rows))
            row = rows.stop
        return parts

    @torch.no_grad()
    def merged(self, weight_FD: Tensor) -> Tensor:
        """Returns the frozen weight `[F, D]` with the updates added in fp32 and rounded once."""
        merged_FD = weight_FD.clone()
        for (start, stop), ranks, rows in self.parts():
            update_FD = self.b_Sr[rows].float() @ self.a_GD[ranks].float()
            merged_FD[start:stop] = torch.add(weight_FD[start:stop], update_FD, alpha=self.scale)
        return merged_FD


class _LinearWithUpdates(torch.autograd.Function):
    """`LowRank.product` with a backward pass that writes each projection's gradient in place. The frozen weight gets no gradient,
    which saves a third of a linear layer's work."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_FD: Tensor,
        bias_F: Tensor | None,
        a_GD: Tensor,
        b_Sr: Tensor,
        low_rank: LowRank,
        exact: bool,
    ) -> Tensor:
        assert not weight_FD.requires_grad, "the base is frozen, or its gradient would be missing"
        out_NF, low_NG = low_rank.product(x_ND, weight_FD, bias_F, a_GD, b_Sr, exact)
        ctx.save_for_backward(x_ND, weight_FD, a_GD, b_Sr, low_NG)
        ctx.low_rank = low_rank
        return out_NF

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_NF: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_FD, a_GD, b_Sr, low_NG = ctx.saved_tensors
        grad_low_NG, grad_b_Sr = torch.empty_like(low_NG), torch.empty_like(b_Sr)
        for (start, stop), ranks, rows in ctx.low_rank.parts():
            part_NF = grad_NF[:, start:stop]
            torch.mm(part_NF, b_Sr[rows], out=grad_low_NG[:, ranks])
            torch.mm(part_NF.t(), low_NG[:, ranks], out=grad_b_Sr[rows])
        grad_low_NG *= ctx.low_rank.scale
        grad_b_Sr *= ctx.low_rank.scale
        grad_a_GD = grad_low_NG.t() @ x_ND
        grad_x_ND = None
        if ctx.needs_input_grad[0]:
            grad_x_ND = ops_for(grad_NF).input_gradient(grad_NF, weight_FD).addmm_(grad_low_NG, a_GD)
        return grad_x_ND, None, None, grad_a_GD, grad_b_Sr, None, None


class ExpertsLowRank(nn.Module):
    """The low-rank update of one weight of a layer's routed experts, with an A and a B for each expert: `a_EDr` and `b_ErF`."""

    def __init__(self, experts: int, inputs: int, outputs: int, rank: int, scale: float, like: Tensor) -> None:
        super().__init__()
        self.rank, self.scale = rank, scale
        self.a_EDr = nn.Parameter(torch.empty(experts, inputs, rank, dtype=like.dtype, device=like.device))
        self.b_ErF = nn.Parameter(torch.zeros(experts, rank, outputs, dtype=like.dtype, device=like.device))

    def forward(self, x: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Returns the update to add to `product(x, weight_EDF)`, where `product` multiplies each row by its expert's weight."""
        return self.scale * product(product(x, self.a_EDr), self.b_ErF)

    @torch.no_grad()
    def merged(self, weight_EDF: Tensor) -> Tensor:
        """Returns the frozen weight `[E, D, F]` with the update added in fp32 and rounded once."""
        update_EDF = torch.bmm(self.a_EDr.float(), self.b_ErF.float())
        return torch.add(weight_EDF, update_EDF, alpha=self.scale).to(weight_EDF.dtype)
