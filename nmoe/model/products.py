"""Matrix products on a CPU: by oneDNN where torch would ask MKL, and in decoding over packed weights.

torch gives fp32 products to MKL, which on CPUs other than Intel's takes a path of half the width: 3072 x 1024 by 1024 x 256 runs
at 195 GFLOP/s there and at 410 through oneDNN (two Zen 5 cores, torch 2.13). torch reaches oneDNN by an operator of its compiler's
back end, which differentiates nothing, so the gradients are written out here. A row's bits do not depend on how many rows there
are, from two rows on; MKL asks for eight rows to each thread.
"""

# Shapes: N rows, D inputs, F outputs, R rows sorted by expert, E experts.

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmoe.model import order_free
from nmoe.model.kernels.cpu import library, operations

_AVAILABLE = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class PackedWeights:
    """Weights in the order that kernels read them, oneDNN's or our own (`nmoe.model.kernels.cpu`), for a model that runs many small
    batches between two changes of its weights: without it each call rearranges its whole weight first, which for a decode step of
    64 rows takes as long as the product (256 x 4096 in bf16: 185 us packed, 312 us not). oneDNN's results are the same to the bit.

    Takes as much memory again as the weights. A weight changed in place is packed anew when it is next used.
    """

    def __init__(self) -> None:
        self._packed: dict[tuple[int, Packing], tuple[int, Tensor, list[Tensor]]] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Products without gradient use packed weights here, in this thread: a scorer may run its own model beside the engine."""
        outer, _here.packed = _here.packed, self
        try:
            yield
        finally:
            _here.packed = outer

    def clear(self) -> None:
        self._packed.clear()

    def of(self, weight: Tensor, packing: Packing) -> list[Tensor]:
        """What `packing(weight)` gives, made at most once for each state of the weight."""
        key = id(weight), packing
        version, _, packed = self._packed.get(key, (-1, weight, []))
        if version != weight._version:
            packed = packing(weight)
            self._packed[key] = (weight._version, weight, packed)  # holding the weight keeps its id its own
        return packed


Packing = Callable[[Tensor], list[Tensor]]


def _for_onednn(weight_FD: Tensor) -> list[Tensor]:
    return [torch.ops.mkldnn._reorder_linear_weight(weight_FD.contiguous(), None)]


def _each_for_onednn(weight_EDF: Tensor) -> list[Tensor]:
    return [packed for weight_DF in weight_EDF for packed in _for_onednn(weight_DF.t())]


def _panels(weight_FD: Tensor) -> list[Tensor]:
    return [operations.packed_panels(weight_FD.t().unsqueeze(0))]


def _each_panels(weight_EDF: Tensor) -> list[Tensor]:
    return [operations.packed_panels(weight_EDF)]


def _panels_in_fp32(weight_FD: Tensor) -> list[Tensor]:
    return _panels(weight_FD.float())


def _grid(weight_FD: Tensor) -> list[Tensor]:
    return [order_free.on_grid(weight_FD)]


def _each_grid(weight_EDF: Tensor) -> list[Tensor]:
    return [order_free.on_grid(weight_EDF.mT)]


def _gate_up_panels(weight_FD: Tensor) -> list[Tensor]:
    return [operations.packed_gate_up(weight_FD.t().unsqueeze(0))]


def _each_gate_up(weight_EDF: Tensor) -> list[Tensor]:
    return [operations.packed_gate_up(weight_EDF)]


def _each_down(weight_EFD: Tensor) -> list[Tensor]:
    return [operations.packed_down(weight_EFD)]


class _Here(threading.local):
    """What is in force in this thread."""

    packed: PackedWeights | None = None


_here = _Here()


def _can_pack(x: Tensor, weight: Tensor) -> bool:
    """Whether the weight is a parameter whose changes show: one made under `inference_mode` does not count them."""
    return (
        _AVAILABLE
        and _here.packed is not None
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.bfloat16)
        and not torch.is_grad_enabled()
        and isinstance(weight, nn.Parameter)
        and not weight.is_inference()
    )


def by_kernel(x: Tensor, *weights: Tensor) -> bool:
    """Whether this product is to be one of our kernels', which read packed weights."""
    even = x.dtype == torch.float32 or x.shape[-1] % 2 == 0  # bf16 is multiplied in pairs
    return library.usable(x) and even and all(_can_pack(x, weight) for weight in weights)


def by_onednn(x: Tensor) -> bool:
    """Whether products of this tensor are oneDNN's."""
    usable = _AVAILABLE and not torch.compiler.is_compiling()  # the compiler takes its own products
    return usable and x.dtype == torch.float32 and x.device.type == "cpu"


def linear(x_ND: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None, exact: bool = False) -> Tensor:
    """`x @ weight.T + bias`; with `exact`, each row has the same bits in any batch, with gradients and without."""
    exact = exact and order_free.needed(x_ND)
    if exact and torch.is_grad_enabled():
        differentiable_NF: Tensor = _Linear.apply(x_ND, weight_FD, bias_F, True)
        return differentiable_NF
    if exact:
        return _exact(x_ND, weight_FD, bias_F)
    if by_kernel(x_ND, weight_FD):
        return operations.linear(x_ND, _packed(weight_FD, _panels), weight_FD.shape[0], bias_F)
    if _can_pack(x_ND, weight_FD):
        return _product(x_ND, _packed(weight_FD, _for_onednn), bias_F, weight_FD.shape[0])
    if not by_onednn(x_ND):
        return F.linear(x_ND, weight_FD, bias_F)
    if not torch.is_grad_enabled():
        return _product(x_ND, weight_FD, bias_F)
    out_NF: Tensor = _Linear.apply(x_ND, weight_FD, bias_F, False)
    return out_NF


def linear_in_fp32(x_ND: Tensor, weight_FD: Tensor) -> Tensor:
    """`x @ weight.T` in fp32, of a narrower x and weight, whose products fp32 holds exactly."""
    wide_ND = x_ND.float()
    if by_kernel(wide_ND, weight_FD):
        return operations.linear(wide_ND, _packed(weight_FD, _panels_in_fp32), weight_FD.shape[0], None)
    if torch.is_grad_enabled():
        return linear(wide_ND, weight_FD.float())
    return prepared_in_fp32(weight_FD)(x_ND)


def prepared_in_fp32(weight_FD: Tensor) -> Callable[[Tensor], Tensor]:
    """`linear_in_fp32(x, weight)` without gradients, for several x: what has to be widened is widened once."""
    if weight_FD.is_cuda:
        return lambda x_ND: torch.mm(x_ND, weight_FD.t(), out_dtype=torch.float32)
    wide_FD = weight_FD.float()
    return lambda x_ND: linear(x_ND.float(), wide_FD)


def prepared(weight_FD: Tensor, exact: bool) -> Callable[[Tensor], Tensor]:
    """`linear(x, weight, exact=exact)` without gradients, for several x: what exact products need of a weight is made once."""
    if not (exact and order_free.needed(weight_FD)):
        return lambda x_ND: linear(x_ND, weight_FD)
    made = _kept(weight_FD, _exact_packing(weight_FD))
    return lambda x_ND: _exact_product(x_ND, made, weight_FD.shape[0], None)


def _exact(x_ND: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
    return _exact_product(x_ND, _kept(weight_FD, _exact_packing(weight_FD)), weight_FD.shape[0], bias_F)


def _exact_packing(weight: Tensor) -> Packing:
    return _panels if library.serves_exact(weight) else _grid


def _exact_product(x_ND: Tensor, made: Tensor, outputs: int, bias_F: Tensor | None) -> Tensor:
    """By our kernel, which adds in order, or in sums that no order changes."""
    if library.serves_exact(x_ND):
        return operations.linear(x_ND, made, outputs, bias_F)
    out_NF = order_free.product(order_free.on_grid(x_ND), made).to(x_ND.dtype)
    return out_NF if bias_F is None else out_NF + bias_F


def _kept(weight: Tensor, packing: Packing) -> Tensor:
    """Packed before where that is kept, otherwise now: a copy of the weight, little beside products of many rows."""
    kept = _here.packed is not None and _can_pack(weight, weight)
    return _packed(weight, packing) if kept else packing(weight.detach())[0]


def swiglu_linear(x_ND: Tensor, gate_up_FD: Tensor) -> Tensor:
    """The SwiGLU of `linear(x, gate_up)`, where `by_kernel` says so."""
    return operations.swiglu_linear(x_ND, _packed(gate_up_FD, _gate_up_panels), gate_up_FD.shape[0] // 2)


def route(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor | None,
    balance_E: Tensor,
    sigmoid: bool,
    renormalize: bool,
    scale: float,
    chosen: int,
) -> tuple[Tensor, Tensor]:
    """`nmoe.model.kernels.cpu.operations.route`, where `by_kernel` says so."""
    settings = (bias_E, balance_E.float(), sigmoid, renormalize, scale, chosen)
    return operations.route(x_TD, _packed(weight_ED, _panels_in_fp32), *settings)


def experts(
    x_TD: Tensor,
    chosen_TK: Tensor,
    weights_TK: Tensor,
    gate_up_EDF: Tensor,
    down_EFD: Tensor,
    gate_up_bias_EF: Tensor | None,
    down_bias_ED: Tensor | None,
    limit: float,
) -> Tensor:
    """Each token's weighted sum over its experts, `[T, D]`, where `by_kernel` says so."""
    gate_up, down = _packed(gate_up_EDF, _each_gate_up), _packed(down_EFD, _each_down)
    return operations.experts(
        x_TD, chosen_TK, weights_TK, gate_up, down, gate_up_bias_EF, down_bias_ED, limit, down_EFD.shape[1]
    )


def _packed(weight: Tensor, packing: Packing) -> Tensor:
    assert _here.packed is not None, "the caller looked"
    return _here.packed.of(weight, packing)[0]


def input_gradient(grad_NF: Tensor, weight_FD: Tensor) -> Tensor:
    """`grad @ weight`, the gradient of a linear layer's input."""
    return _product(grad_NF, weight_FD.t()) if by_onednn(grad_NF) else grad_NF @ weight_FD


def weight_gradient(x_ND: Tensor, grad_NF: Tensor) -> Tensor:
    """`grad.T @ x`, the gradient of a linear layer's weight, `[F, D]`."""
    if not by_onednn(x_ND):
        return grad_NF.t() @ x_ND
    # With the longer side as columns: a tall result of a long sum takes up to four times as long.
    if grad_NF.shape[1] > x_ND.shape[1]:
        return _product(x_ND.t(), grad_NF.t()).t()
    return _product(grad_NF.t(), x_ND.t())


def linear_by_group(x_RD: Tensor, weight_EDF: Tensor, counts: Sequence[int], exact: bool = False) -> Tensor:
    """`x @ weight[e]` for each group of rows, `counts[e]` of them for expert e, in order; `exact` is that of `linear`."""
    exact = exact and order_free.needed(x_RD)
    if exact and not torch.is_grad_enabled():
        return _exact_groups(x_RD, weight_EDF, counts)
    if exact:
        differentiable_RF: Tensor = _LinearByGroup.apply(x_RD, weight_EDF, tuple(counts), True)
        return differentiable_RF
    if _can_pack(x_RD, weight_EDF):
        assert _here.packed is not None, "looked at"
        packed = _here.packed.of(weight_EDF, _each_for_onednn)
        outputs = weight_EDF.shape[2]
        return torch.cat([_product(part, packed[e], None, outputs) for e, part in enumerate(x_RD.split(list(counts)))])
    if by_onednn(x_RD):
        out_RF: Tensor = _LinearByGroup.apply(x_RD, weight_EDF, tuple(counts), False)
        return out_RF
    weights = weight_EDF.unbind(0)
    return torch.cat([part @ weights[e] for e, part in enumerate(x_RD.split(list(counts)))])


def _exact_groups(x_RD: Tensor, weight_EDF: Tensor, counts: Sequence[int]) -> Tensor:
    if library.serves_exact(x_RD):
        return operations.linear_by_group(x_RD, _kept(weight_EDF, _each_panels), weight_EDF.shape[2], counts)
    parts, weights_EFD = order_free.on_grid(x_RD).split(list(counts)), _kept(weight_EDF, _each_grid)
    return torch.cat([order_free.product(part, weights_EFD[e]) for e, part in enumerate(parts)]).to(x_RD.dtype)


def _product(x_ND: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None, outputs: int | None = None) -> Tensor:
    """`outputs` is F where the weight is packed and does not tell."""
    if x_ND.numel() == 0:
        return x_ND.new_zeros(x_ND.shape[0], outputs or weight_FD.shape[0])
    out_NF: Tensor = torch.ops.mkldnn._linear_pointwise(x_ND, weight_FD, bias_F, "none", [], "")
    return out_NF


class _Linear(torch.autograd.Function):
    """y = x W' + b:  dx = dy W,  dW = dy' x,  db = the sum of dy's rows."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_FD: Tensor, bias_F: Tensor | None, exact: bool) -> Tensor:
        ctx.save_for_backward(x_ND, weight_FD)
        return (_exact if exact else _product)(x_ND, weight_FD, bias_F)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_FD = ctx.saved_tensors
        (grad_NF,) = grads
        return (
            input_gradient(grad_NF, weight_FD) if ctx.needs_input_grad[0] else None,
            weight_gradient(x_ND, grad_NF) if ctx.needs_input_grad[1] else None,
            grad_NF.sum(0) if ctx.needs_input_grad[2] else None,
            None,
        )


class _LinearByGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, weight_EDF: Tensor, counts: tuple[int, ...], exact: bool) -> Tensor:
        ctx.save_for_backward(x_RD, weight_EDF)
        ctx.counts = counts
        if exact:
            return _exact_groups(x_RD, weight_EDF, counts)
        return torch.cat([_product(part, weight_EDF[e].t()) for e, part in enumerate(x_RD.split(counts))])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, weight_EDF = ctx.saved_tensors
        parts = grads[0].split(ctx.counts)
        grad_x_RD = grad_weight_EDF = None
        if ctx.needs_input_grad[0]:
            grad_x_RD = torch.cat([input_gradient(part, weight_EDF[e].t()) for e, part in enumerate(parts)])
        if ctx.needs_input_grad[1]:
            grad_weight_EDF = torch.empty_like(weight_EDF)
            for e, (x_ND, grad_NF) in enumerate(zip(x_RD.split(ctx.counts), parts, strict=True)):
                grad_weight_EDF[e] = weight_gradient(x_ND, grad_NF).t()
        return grad_x_RD, grad_weight_EDF, None, None
