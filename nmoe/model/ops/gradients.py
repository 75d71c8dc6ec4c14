"""Operations whose gradient is written out: norm, rotary turn, rows to experts and back, and the products of its own table.

On a CPU torch's `rms_norm` differentiates each of its steps: 6.3 ms forward and backward for 6144 x 128 in fp32. The closed
form below takes a third of that (one Zen 5 core, torch 2.13).

Rows move between tokens and experts with no atomics and in a fixed order. `Dispatch` copies every token's row to the experts that
it chose; `Combine` adds up what came back, each row times its weight. torch's backward of a gather adds rows in the order in which
threads arrive, and on CUDA rounds each sum to bf16; here it is a sum of K rows in order.
"""

# Shapes: N any number of rows (in `[T, N, C]` the heads turned, query and key heads together), D width or inputs, F outputs,
# T tokens, C dimensions turned, c = C / 2 pairs, K chosen experts, R = T * K rows sorted by expert, E experts.

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from nmoe.model.ops.attention import AttentionLayer, Clusters


class Ops(Protocol):
    """The operations of a table that the functions here are made of; `nmoe.model.ops.torch.TorchOps` says what each does."""

    def product(self, x_ND: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor: ...

    def product_by_group(self, x_RD: Tensor, weight_EDF: Tensor, counts: tuple[int, ...]) -> Tensor: ...

    def input_gradient(self, grad_NF: Tensor, weight_FD: Tensor) -> Tensor: ...

    def weight_gradient(self, x_ND: Tensor, grad_NF: Tensor) -> Tensor: ...

    def attend_in_clusters(
        self, layer: AttentionLayer, q_SHC: Tensor, k_SJC: Tensor, v_SJU: Tensor, clusters: Clusters
    ) -> tuple[Tensor, Tensor]: ...

    def attend_in_clusters_backward(
        self,
        layer: AttentionLayer,
        q_SHC: Tensor,
        k_SJC: Tensor,
        v_SJU: Tensor,
        clusters: Clusters,
        out_SHU: Tensor,
        log_sums_SH: Tensor,
        grad_SHU: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def sum_rows(self, y_RD: Tensor, weights_TK: Tensor | None, row_TK: Tensor) -> Tensor: ...

    def spread_rows(
        self, grad_TD: Tensor, y_RD: Tensor, weights_TK: Tensor, row_TK: Tensor
    ) -> tuple[Tensor, Tensor]: ...


def _inverse_rms(x_ND: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps), `[N, 1]`, in fp32 or better: in bf16 it would scale a row wrong by up to 0.4%."""
    dtype = torch.promote_types(x_ND.dtype, torch.float32)
    norm_N1 = torch.linalg.vector_norm(x_ND, dim=-1, keepdim=True, dtype=dtype)
    return norm_N1.square_().div_(x_ND.shape[-1]).add_(eps).rsqrt_()


class _RMSNorm(torch.autograd.Function):
    """y = x * r * w with r = 1 / sqrt(mean(x^2) + eps) (Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4)."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        inverse_rms_N1 = _inverse_rms(x_ND, eps)
        ctx.save_for_backward(x_ND, weight_D, inverse_rms_N1)
        return (x_ND * inverse_rms_N1).to(x_ND.dtype).mul_(weight_D)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x_ND, weight_D, inverse_rms_N1 = ctx.saved_tensors
        (grad_ND,) = grads
        # With z = x r:  dz = g w,  dx = r (dz - z mean(dz z)),  dw = sum over rows of g z.
        z_ND = x_ND * inverse_rms_N1
        gz_ND = grad_ND * z_ND
        grad_weight_D = gz_ND.reshape(-1, *weight_D.shape).sum(0)
        if weight_D.dim() == 1:
            mean_N1 = (gz_ND @ weight_D.to(gz_ND.dtype)).unsqueeze(-1).div_(x_ND.shape[-1])
        else:
            mean_N1 = gz_ND.mul_(weight_D).mean(-1, keepdim=True)
        grad_x_ND = (grad_ND * weight_D).sub_(z_ND.mul_(mean_N1)).mul_(inverse_rms_N1)
        return grad_x_ND.to(x_ND.dtype), grad_weight_D.to(weight_D.dtype), None


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalisation over the last axis. The weight is `[D]`, or has an axis for each of the last few of x."""
    if not torch.is_grad_enabled():
        return (x_ND * _inverse_rms(x_ND, eps)).to(x_ND.dtype).mul_(weight_D)
    out: Tensor = _RMSNorm.apply(x_ND, weight_D, eps)
    return out


def turn(x_TNC: Tensor, cos_T1c: Tensor, sin_T1c: Tensor) -> Tensor:
    """Turns each pair `(x[i], x[i + C/2])` of every head by its position's angle (Su et al. 2021, arXiv:2104.09864), in the
    half-split layout of Llama and Qwen."""
    half = x_TNC.shape[-1] // 2
    first, second = x_TNC[..., :half], x_TNC[..., half:]
    out_TNC = torch.empty_like(x_TNC, memory_format=torch.contiguous_format)
    torch.mul(first, cos_T1c, out=out_TNC[..., :half]).addcmul_(second, sin_T1c, value=-1)
    torch.mul(second, cos_T1c, out=out_TNC[..., half:]).addcmul_(first, sin_T1c)
    return out_TNC


Turn = Callable[[Tensor, Tensor, Tensor], Tensor]


class Rotate(torch.autograd.Function):
    """A rotation, scaled where the table is; its gradient is the transposed map, the rotation back."""

    @staticmethod
    def forward(ctx: Any, turn: Turn, x_TNC: Tensor, cos_T1c: Tensor, sin_T1c: Tensor) -> Tensor:
        ctx.save_for_backward(cos_T1c, sin_T1c)
        ctx.turn = turn
        return turn(x_TNC, cos_T1c, sin_T1c)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None]:
        cos_T1c, sin_T1c = ctx.saved_tensors
        return None, ctx.turn(grads[0], cos_T1c, -sin_T1c), None, None


class AttentionInClusters(torch.autograd.Function):
    """Of weights w = exp(s - log sum), o = w v:  dv = w' do,  ds = w (do v' - sum of do o),  dq = ds k,  dk = ds' q, where
    s = scale q k' (Dao et al. 2022, arXiv:2205.14135, section 3.1)."""

    @staticmethod
    def forward(
        ctx: Any, ops: Ops, layer: AttentionLayer, clusters: Clusters, q_SHC: Tensor, k_SJC: Tensor, v_SJU: Tensor
    ) -> Tensor:
        out_SHU, log_sums_SH = ops.attend_in_clusters(layer, q_SHC, k_SJC, v_SJU, clusters)
        ctx.save_for_backward(q_SHC, k_SJC, v_SJU, out_SHU, log_sums_SH)
        ctx.ops, ctx.layer, ctx.clusters = ops, layer, clusters
        return out_SHU

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_SHC, k_SJC, v_SJU, out_SHU, log_sums_SH = ctx.saved_tensors
        given = (ctx.layer, q_SHC, k_SJC, v_SJU, ctx.clusters, out_SHU, log_sums_SH, grads[0])
        return None, None, None, *ctx.ops.attend_in_clusters_backward(*given)


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ops: Ops, x_TD: Tensor, token_R: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_TK)
        ctx.ops = ops
        return x_TD.index_select(0, token_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None]:
        (row_TK,) = ctx.saved_tensors
        return None, ctx.ops.sum_rows(grads[0], None, row_TK), None, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ops: Ops, y_RD: Tensor, weights_TK: Tensor, row_TK: Tensor) -> Tensor:
        ctx.save_for_backward(y_RD, weights_TK, row_TK)
        ctx.ops = ops
        return ops.sum_rows(y_RD, weights_TK, row_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor, None]:
        return None, *ctx.ops.spread_rows(grads[0], *ctx.saved_tensors), None


def sum_rows(y_RD: Tensor, weights_TK: Tensor | None, row_TK: Tensor) -> Tensor:
    """`out[t] = sum over k of weights[t, k] * y[row[t, k]]`."""
    if weights_TK is None:
        return _gathered(y_RD, row_TK).sum(1)
    return torch.bmm(weights_TK.to(y_RD.dtype).unsqueeze(1), _gathered(y_RD, row_TK)).squeeze(1)


def sum_rows_in_order(y_RD: Tensor, weights_TK: Tensor, row_TK: Tensor) -> Tensor:
    """The same, element by element, one expert after another: a batched product takes another kernel for another shape."""
    parts = zip(weights_TK.to(y_RD.dtype).split(1, 1), row_TK.unbind(1), strict=True)
    products = (y_RD.index_select(0, row_T).mul_(weight_T1) for weight_T1, row_T in parts)
    out_TD = next(products)
    for product_TD in products:
        out_TD += product_TD
    return out_TD


def spread_rows(grad_TD: Tensor, y_RD: Tensor, weights_TK: Tensor, row_TK: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `sum_rows` for its rows and its weights."""
    grad_weights_TK = torch.bmm(_gathered(y_RD, row_TK), grad_TD.unsqueeze(-1)).squeeze(-1).to(weights_TK.dtype)
    grad_TKD = grad_TD.unsqueeze(1) * weights_TK.to(y_RD.dtype).unsqueeze(-1)
    grad_RD = torch.empty_like(y_RD).index_copy_(0, row_TK.reshape(-1), grad_TKD.flatten(0, 1))
    return grad_RD, grad_weights_TK


def _gathered(y_RD: Tensor, row_TK: Tensor) -> Tensor:
    return y_RD.index_select(0, row_TK.reshape(-1)).view(*row_TK.shape, -1)


class Linear(torch.autograd.Function):
    """y = x W' + b:  dx = dy W,  dW = dy' x,  db = the sum of dy's rows."""

    @staticmethod
    def forward(ctx: Any, ops: Ops, x_ND: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_ND, weight_FD)
        ctx.ops = ops
        return ops.product(x_ND, weight_FD, bias_F)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_FD = ctx.saved_tensors
        (grad_NF,) = grads
        _, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            None,
            ctx.ops.input_gradient(grad_NF, weight_FD) if needs_x else None,
            ctx.ops.weight_gradient(x_ND, grad_NF) if needs_weight else None,
            grad_NF.sum(0) if needs_bias else None,
        )


class LinearByGroup(torch.autograd.Function):
    """The same for each group of rows."""

    @staticmethod
    def forward(ctx: Any, ops: Ops, x_RD: Tensor, weight_EDF: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x_RD, weight_EDF)
        ctx.ops, ctx.counts = ops, counts
        return ops.product_by_group(x_RD, weight_EDF, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, weight_EDF = ctx.saved_tensors
        parts = grads[0].split(ctx.counts)
        grad_x_RD = grad_weight_EDF = None
        _, needs_x, needs_weight, _ = ctx.needs_input_grad
        if needs_x:
            grad_x_RD = torch.cat([ctx.ops.input_gradient(part, weight_EDF[e].t()) for e, part in enumerate(parts)])
        if needs_weight:
            grad_weight_EDF = torch.empty_like(weight_EDF)
            for e, (x_ND, grad_NF) in enumerate(zip(x_RD.split(ctx.counts), parts, strict=True)):
                grad_weight_EDF[e] = ctx.ops.weight_gradient(x_ND, grad_NF).t()
        return None, grad_x_RD, grad_weight_EDF, None
