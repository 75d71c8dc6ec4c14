"""Mixture of experts: an fp32 router that picks K of E experts per token, and the experts as grouped matrix products."""

# Shapes: T tokens, D width, E experts, K chosen experts, F expert width, R = T * K routed rows.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmoe.model.config import ModelConfig
from nmoe.model.expert_profile import ProfiledExperts
from nmoe.model.layers import Linear, SwiGLU
from nmoe.model.low_rank import ExpertsLowRank
from nmoe.model.ops.table import ops_for
from nmoe.model.ops.torch import TorchOps
from nmoe.model.packed_experts import FORMS, PackedExperts
from nmoe.types import PackedForm


class RouterTrace:
    """Records what the routers do in one forward pass, layer by layer: the experts that they choose (`chosen_TK`), the scores with
    gradient (`scores_TE`), and the biases added to the scores for the choice (`biases_E`).

    With `replay` (`[T, layers, K]`), each layer uses those experts and not the router's choice, so a learner recomputes exactly
    the engine's pass even if two scores are equal up to rounding. The router's own choice is still recorded for comparison.

    Not a dataclass, because FSDP2 would pass the module a copy with new lists.
    """

    def __init__(
        self,
        replay: Tensor | None = None,
        chosen_TK: list[Tensor] | None = None,
        scores_TE: list[Tensor] | None = None,
        biases_E: list[Tensor] | None = None,
    ) -> None:
        self.replay = replay
        self.chosen_TK = chosen_TK or []
        self.scores_TE = scores_TE or []
        self.biases_E = biases_E or []

    def repetition(self, layer: int) -> RouterTrace:
        """Returns a separate trace with the same replay, for running the layers from `layer` on a second time, which records
        nothing in this trace."""
        return RouterTrace(None if self.replay is None else self.replay[:, layer:])

    def routes(self) -> Tensor:
        """Returns the experts that all layers' routers chose themselves, `[T, layers, K]` in int16."""
        return torch.stack(self.chosen_TK, 1).to(torch.int16)


class Router(nn.Module):
    """Chooses K experts per token by scores in fp32. The balancing bias changes the choice but not the weights (arXiv:2408.15664,
    eq. 3)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden_size))
        self.linear_bias = nn.Parameter(torch.zeros(config.experts)) if config.router_linear_bias else None
        self.register_buffer("bias", torch.zeros(config.experts))
        self.bias: Tensor
        self.experts_per_token = config.experts_per_token
        self.sigmoid = config.router_scores == "sigmoid"
        self.renormalize, self.scale = config.renormalize, config.router_scale
        self.groups, self.groups_kept = config.router_groups, config.router_groups_kept
        self.exact = False

    def forward(self, x_TD: Tensor, trace: RouterTrace) -> tuple[Tensor, Tensor]:
        """Returns the weights `[T, K]` and the expert ids `[T, K]` of the chosen experts."""
        bias_E = None if self.linear_bias is None else self.linear_bias.float()
        if self.groups == 1 and trace.replay is None:
            rule = (self.sigmoid, self.renormalize, self.scale, self.experts_per_token)
            routed = ops_for(x_TD).route(x_TD, self.weight, bias_E, self.bias, *rule)
            if routed is not None:
                trace.chosen_TK.append(routed[1])
                return routed
        wide_TD = x_TD.float()
        ops = ops_for(wide_TD, self.exact)
        logits_TE = ops.linear(wide_TD, self.weight.float(), bias_E)
        scores_TE = ops.sigmoid(logits_TE) if self.sigmoid else logits_TE.softmax(-1)
        layer = len(trace.chosen_TK)
        choice_TE = self._limit_groups(scores_TE.detach() + self.bias)
        own_TK = choice_TE.topk(self.experts_per_token, dim=-1).indices
        trace.chosen_TK.append(own_TK)
        trace.scores_TE.append(scores_TE)
        trace.biases_E.append(self.bias)
        chosen_TK = own_TK if trace.replay is None else trace.replay[:, layer].long()
        weights_TK = scores_TE.gather(-1, chosen_TK)
        if self.renormalize:
            total_T1 = weights_TK.sum(-1, keepdim=True)
            # Sigmoids can all be 0, so this adds 1e-20, as DeepSeek-V3's release does. A softmax's best K are never all 0.
            weights_TK = weights_TK / (total_T1 + 1e-20 if self.sigmoid else total_T1)
        return weights_TK if self.scale == 1 else weights_TK * self.scale, chosen_TK

    def _limit_groups(self, choice_TE: Tensor) -> Tensor:
        """Excludes experts outside the best groups from the choice (arXiv:2412.19437, section 2.1.2)."""
        if self.groups == 1:
            return choice_TE
        grouped_TGe = choice_TE.unflatten(-1, (self.groups, -1))
        best_TG = grouped_TGe.topk(2, dim=-1).values.sum(-1)
        kept_TG = torch.zeros_like(best_TG, dtype=torch.bool)
        kept_TG.scatter_(-1, best_TG.topk(self.groups_kept, dim=-1).indices, True)
        return grouped_TGe.masked_fill(~kept_TG.unsqueeze(-1), float("-inf")).flatten(-2)


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of a layer's experts. Biases are `[E, 2F]` and `[E, D]` or None; `limit` is as in `swiglu`, `exact` as in
    `ops_for`."""

    gate_up_EDF: Tensor | PackedExperts
    down_EFD: Tensor | PackedExperts
    gate_up_bias_EF: Tensor | None = None
    down_bias_ED: Tensor | None = None
    limit: float = 0.0
    exact: bool = False
    gate_up_adapter: ExpertsLowRank | None = None
    down_adapter: ExpertsLowRank | None = None
    own: Callable[[Tensor], Tensor] | None = None
    """Selects this rank's experts from an adapter's weights, if the adapters hold the experts of all ranks; None if they hold the
    same experts."""
    rows: Callable[[Tensor], Tensor] | None = None
    """Quantises activation rows before each product, if the experts' profile does so; else None."""


class Dispatcher(Protocol):
    """Carries routed rows to the ranks that own their experts (`nmoe.parallel.dispatcher`)."""

    def own(self, weight_E: Tensor) -> Tensor: ...

    def dispatch(self, rows_RD: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, Any]: ...

    def combine(self, rows_SD: Tensor, handle: Any) -> Tensor: ...

    def sent(self) -> Any: ...


class ExpertComputation(ABC):
    """Runs a layer's experts and their adapters on rows sorted by expert; `counts_E` is the number of rows of each expert. A
    subclass implements the product of rows with their experts' weights."""

    def __init__(self, x_RD: Tensor, counts_E: Tensor, weights: ExpertWeights) -> None:
        self.x_RD, self.counts_E, self.weights = x_RD, counts_E, weights
        self.ops = ops_for(x_RD, weights.exact)

    def run(self) -> Tensor:
        """Returns `down(swiglu(gate_up(x)))` of each row by its expert, `[R, D]`."""
        return self.feed_forward(self.x_RD)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Computes what `run` does, for rows in the layout that `product` takes."""
        weights = self.weights
        hidden = self._layer(x, weights.gate_up_EDF, weights.gate_up_bias_EF, weights.gate_up_adapter)
        hidden = self.ops.swiglu(hidden, weights.limit)
        return self._layer(hidden, weights.down_EFD, weights.down_bias_ED, weights.down_adapter)

    def _layer(
        self, x: Tensor, weight_EDF: Tensor | PackedExperts, bias_EF: Tensor | None, adapter: ExpertsLowRank | None
    ) -> Tensor:
        rounded = x if self.weights.rows is None else self.weights.rows(x)
        if isinstance(weight_EDF, PackedExperts):
            out: Tensor = _PackedProduct.apply(rounded, weight_EDF, self.packed_product())
        else:
            out = self.product(rounded, weight_EDF)
        if adapter is not None:
            out = out + adapter(x, self._update)
        return out if bias_EF is None else out + self.spread(bias_EF)

    def _update(self, x: Tensor, weight_E: Tensor) -> Tensor:
        own = self.weights.own
        return self.narrow_product(x, weight_E if own is None else own(weight_E))

    @abstractmethod
    def product(self, x: Tensor, weight_EDF: Tensor) -> Tensor:
        """Multiplies each row by its expert's weight."""

    @abstractmethod
    def narrow_product(self, x: Tensor, weight_EDF: Tensor) -> Tensor:
        """Multiplies each row by its expert's weight, as `product` does, for the narrow weights of adapters."""

    def packed_product(self) -> PackedMultiply:
        """Returns the product of rows with packed experts."""
        raise NotImplementedError(f"{type(self).__name__} does not dequantise")

    def spread(self, bias_EF: Tensor) -> Tensor:
        """Repeats each expert's bias for each of the expert's rows, `[R, F]`."""
        return bias_EF.repeat_interleave(self.counts_E, 0, output_size=self.x_RD.shape[0])


PackedMultiply = Callable[[Tensor, PackedExperts, bool], Tensor]
"""Multiplies each row by its packed expert's weight or, if the last argument is true, by its transpose."""


class _PackedProduct(torch.autograd.Function):
    """A product with packed experts. Its backward pass dequantises again, because the dequantised experts of all layers together
    are what packing saves."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, packed: PackedExperts, multiply: PackedMultiply) -> Tensor:
        ctx.packed, ctx.multiply = packed, multiply
        return multiply(x_RD, packed, False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor, None, None]:
        return ctx.multiply(grad_RF, ctx.packed, True), None, None


def _one_by_one(ops: TorchOps, counts: Sequence[int], x_RD: Tensor, packed: PackedExperts, transposed: bool) -> Tensor:
    """Dequantises one expert at a time, and only those that have rows."""
    _, inputs, outputs = packed.shape
    out_RF = x_RD.new_empty(x_RD.shape[0], inputs if transposed else outputs)
    for expert, (x_ND, out_NF) in enumerate(zip(x_RD.split(counts), out_RF.split(counts), strict=True)):
        if len(x_ND):
            weight_DF = packed.one(expert, x_RD.dtype)
            if transposed:
                out_NF.copy_(ops.input_gradient(x_ND, weight_DF.t()))
            else:
                out_NF.copy_(ops.linear_by_group(x_ND, weight_DF.unsqueeze(0), [len(x_ND)]))
    return out_RF


def _all_at_once(offsets_E: Tensor, x_RD: Tensor, packed: PackedExperts, transposed: bool) -> Tensor:
    """Dequantises all experts of the projection, so that the host need not learn which have rows."""
    weight_EDF = packed.whole(x_RD.dtype)
    return F.grouped_mm(x_RD, weight_EDF.mT if transposed else weight_EDF, offs=offsets_E)


class ExpertsByLoop(ExpertComputation):
    """Runs one expert after another, each on its rows."""

    def __init__(self, x_RD: Tensor, counts_E: Tensor, weights: ExpertWeights) -> None:
        super().__init__(x_RD, counts_E, weights)
        self.counts, self.offsets_E = counts_E.tolist(), counts_E.cumsum(0, dtype=torch.int32)

    def product(self, x: Tensor, weight_EDF: Tensor) -> Tensor:
        return self.ops.linear_by_group(x, weight_EDF, self.counts)

    def packed_product(self) -> PackedMultiply:
        return partial(_one_by_one, self.ops, self.counts)

    def narrow_product(self, x: Tensor, weight_EDF: Tensor) -> Tensor:
        if self.weights.exact:
            return self.product(x, weight_EDF)
        # Not by oneDNN, as `low_rank` says.
        if x.shape[0] and grouped_mm_fits(x, weight_EDF.shape[-1]):
            return F.grouped_mm(x, weight_EDF, offs=self.offsets_E)
        return torch.cat([part @ weight for part, weight in zip(x.split(self.counts), weight_EDF, strict=True)])


class ExpertsByGroupedMM(ExpertComputation):
    """Runs all experts by one grouped matrix product per projection. In bf16 on CUDA neither forward nor backward pass waits for
    the device, and an expert may have any number of rows; only the bytes of a row must be aligned."""

    def __init__(self, x_RD: Tensor, counts_E: Tensor, weights: ExpertWeights) -> None:
        super().__init__(x_RD, counts_E, weights)
        self.offsets_E = counts_E.cumsum(0, dtype=torch.int32)

    def product(self, x: Tensor, weight_EDF: Tensor) -> Tensor:
        return F.grouped_mm(x, weight_EDF, offs=self.offsets_E)

    narrow_product = product

    def packed_product(self) -> PackedMultiply:
        return partial(_all_at_once, self.offsets_E)


class ExpertsByPadding(ExpertComputation):
    """Runs all experts by one batched product per projection, with every expert's rows padded to the busiest expert's: `[E,
    longest, D]`."""

    def run(self) -> Tensor:
        x_RD, counts_E = self.x_RD, self.counts_E
        experts, longest = self.weights.gate_up_EDF.shape[0], int(counts_E.max())
        first_E = counts_E.cumsum(0) - counts_E
        shift_E = torch.arange(experts, device=x_RD.device) * longest - first_E
        row_R = torch.arange(x_RD.shape[0], device=x_RD.device) + shift_E.repeat_interleave(counts_E)
        padded = x_RD.new_zeros(experts * longest, x_RD.shape[1]).index_copy(0, row_R, x_RD)
        return self.feed_forward(padded.view(experts, longest, -1)).flatten(0, 1).index_select(0, row_R)

    def product(self, x: Tensor, weight_EDF: Tensor) -> Tensor:
        return torch.bmm(x, weight_EDF)

    narrow_product = product

    def spread(self, bias_EF: Tensor) -> Tensor:
        return bias_EF.unsqueeze(1)


def grouped_mm_fits(x_RD: Tensor, *widths: int) -> bool:
    """Returns whether `grouped_mm` is worth using for these rows. It needs row strides that are multiples of 16 bytes. It is
    slow in fp16 on a CPU, and on CUDA it has a kernel only for bf16: other types run one group after another, as in
    `ExpertsByLoop`. `widths` are the experts' widths and the ranks of their adapters."""
    row = 16 // x_RD.element_size()
    dtypes = (torch.bfloat16,) if x_RD.is_cuda else (torch.float32, torch.bfloat16)
    return x_RD.dtype in dtypes and all(width % row == 0 for width in (x_RD.shape[-1], *widths))


# Padding may multiply the number of rows by at most this. It saves the cost of calls, which small experts feel most. In fp32, where
# the batched product is MKL's, it pays for them alone: 0.07 against 0.19 ms at 128 x 256, 0.65 against 0.62 ms at 256 x 512 (two
# Zen 5 cores).
_PADDED_SHARE = 3
_SMALL_PRODUCT = 2**20
# In bf16 it pays for larger ones too while few rows are padding. Forward and backward, one Zen 4 thread, padded against grouped: 8
# experts of 128 rows, 256 x 256, 5.1 against 5.8 ms, and 8.2 against 6.2 where one has 1.8 times as many; 4 of 300 rows, 576 x
# 1536, 57 against 53 ms, and 91 against 53.
_LITTLE_PADDING = 1.25
_MEDIUM_PRODUCT = 2**24


def compute_experts(x_RD: Tensor, counts_E: Tensor, weights: ExpertWeights) -> Tensor:
    """Runs the experts on rows sorted by expert, by the fastest method; returns `[R, D]`."""
    return fastest_computation(x_RD, counts_E, weights)(x_RD, counts_E, weights).run()


def fastest_computation(x_RD: Tensor, counts_E: Tensor, weights: ExpertWeights) -> type[ExpertComputation]:
    """Returns the fastest method to run experts on this device; with exact numerics, the method that gives a row the same bits in
    any batch, and on a CPU for packed experts, the method that holds one of them dequantised."""
    if weights.exact or x_RD.shape[0] == 0:  # grouped and batched products refuse to have no row
        return ExpertsByLoop
    ranks = [a.rank for a in (weights.gate_up_adapter, weights.down_adapter) if a is not None]
    fits = grouped_mm_fits(x_RD, weights.down_EFD.shape[1], *ranks)
    grouped: type[ExpertComputation] = ExpertsByGroupedMM if fits else ExpertsByLoop
    if x_RD.device.type != "cpu":
        return grouped
    if isinstance(weights.gate_up_EDF, PackedExperts) or x_RD.dtype not in (torch.float32, torch.bfloat16):
        return ExpertsByLoop
    experts, longest = counts_E.shape[0], int(counts_E.max())
    _, width, hidden = weights.gate_up_EDF.shape
    product, share = longest * width * hidden, 0.0
    if product <= _SMALL_PRODUCT:
        share = _PADDED_SHARE
    elif product <= _MEDIUM_PRODUCT and x_RD.dtype == torch.bfloat16:
        share = _LITTLE_PADDING
    if experts * longest <= share * x_RD.shape[0]:
        return ExpertsByPadding
    return ExpertsByLoop if ops_for(x_RD).loops_over_experts(x_RD, longest, width, hidden) else grouped


def _elsewhere(dispatcher: Dispatcher, rows_RD: Tensor, counts_E: Tensor, weights: ExpertWeights) -> Tensor:
    """Sends each row to the rank that owns its expert, runs it there, and returns the results in the original order. In `weights`,
    the two projections belong to this rank's experts; biases and adapters belong to all experts, and each rank uses its part."""
    rows_SD, counts_e, handle = dispatcher.dispatch(rows_RD, counts_E)
    own, gate_up_bias, down_bias = dispatcher.own, weights.gate_up_bias_EF, weights.down_bias_ED
    weights = replace(
        weights,
        gate_up_bias_EF=None if gate_up_bias is None else own(gate_up_bias),
        down_bias_ED=None if down_bias is None else own(down_bias),
        own=own,
    )
    return dispatcher.combine(compute_experts(rows_SD, counts_e, weights), handle)


class MoE(nn.Module):
    """Routed SwiGLU experts plus optional shared experts that every token passes through (arXiv:2401.06066); a gate weighs the
    shared experts if the configuration has one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.exact = False
        self.dispatcher: Dispatcher | None = None
        self.sharded = False  # whether ranks hold a part of the experts' weights each, and gather them for a pass
        self.profile = None if config.expert_profile is None else ProfiledExperts(config.expert_profile)
        self.limit = config.swiglu_limit
        self.router = Router(config)
        self.experts = experts = config.experts
        width, expert_width = config.hidden_size, config.expert_width
        self.gate_up: nn.Parameter | None = nn.Parameter(torch.empty(experts, width, 2 * expert_width))
        self.down: nn.Parameter | None = nn.Parameter(torch.empty(experts, expert_width, width))
        self.gate_up_packed: PackedExperts | None = None
        self.down_packed: PackedExperts | None = None
        self.gate_up_bias = nn.Parameter(torch.zeros(experts, 2 * expert_width)) if config.expert_bias else None
        self.down_bias = nn.Parameter(torch.zeros(experts, width)) if config.expert_bias else None
        self.gate_up_adapter: ExpertsLowRank | None = None
        self.down_adapter: ExpertsLowRank | None = None
        self.shared_gate = Linear(config.hidden_size, 1) if config.shared_gate else None
        self.shared = (
            SwiGLU(config.hidden_size, config.shared_experts * config.expert_width) if config.shared_experts else None
        )

    def pack(self, form: PackedForm) -> None:
        """Replaces the experts' weights by unset buffers of a packed form with the same shape."""
        assert self.gate_up is not None
        assert self.down is not None
        self.gate_up_packed, self.down_packed = (FORMS[form](*one.shape) for one in (self.gate_up, self.down))
        self.gate_up = self.down = None

    def forward(self, x_TD: Tensor, trace: RouterTrace) -> Tensor:
        weights_TK, chosen_TK = self.router(x_TD, trace)
        projections = self._projections(x_TD.dtype)
        out_TD = self._at_once(x_TD, weights_TK, chosen_TK, *projections)
        if out_TD is None:
            out_TD = self._routed(x_TD, weights_TK, chosen_TK, *projections)
        if self.shared is None:
            return out_TD
        shared_TD = self.shared(x_TD)
        if self.shared_gate is not None:
            shared_TD = shared_TD * ops_for(x_TD, self.exact).sigmoid(self.shared_gate(x_TD))
        return out_TD + shared_TD

    def _projections(self, dtype: torch.dtype) -> tuple[Tensor | PackedExperts, Tensor | PackedExperts]:
        """Returns gate and up `[E, D, 2F]`, and down `[E, F, D]`, of this rank's experts, packed or rounded by their profile if
        there is one. Weights gathered from ranks are quantised for this pass only."""
        if self.gate_up_packed is not None and self.down_packed is not None:
            return self.gate_up_packed, self.down_packed
        assert self.gate_up is not None
        assert self.down is not None
        gate_up_EDF: Tensor = self.gate_up
        down_EFD: Tensor = self.down
        if self.dispatcher is not None:
            gate_up_EDF, down_EFD = self.dispatcher.own(gate_up_EDF), self.dispatcher.own(down_EFD)
        if self.profile is None or not self.profile.changes(dtype):
            return gate_up_EDF, down_EFD
        if self.sharded:
            return self.profile.weight_once(gate_up_EDF), self.profile.weight_once(down_EFD)
        return self.profile.weight("gate_up", self.gate_up), self.profile.weight("down", self.down)

    @torch.no_grad()
    def quantise(self) -> None:
        """Quantises the experts again after their weights changed, if they have a profile and the quantised weights are kept."""
        if self.profile is not None and self.gate_up is not None and not self.sharded:
            self.profile.expire()
            self._projections(self.gate_up.dtype)

    def _quantise_rows(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor] | None:
        profile = self.profile
        return profile.rows if profile is not None and profile.rounds_rows and profile.changes(dtype) else None

    def _at_once(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        chosen_TK: Tensor,
        gate_up_EDF: Tensor | PackedExperts,
        down_EFD: Tensor | PackedExperts,
    ) -> Tensor | None:
        """Runs all experts by one kernel; returns None if there is no kernel for these weights, for packed experts, and with
        adapters, a dispatcher or a profile that quantises rows."""
        if isinstance(gate_up_EDF, PackedExperts) or isinstance(down_EFD, PackedExperts):
            return None
        if self.gate_up_adapter is not None or self.down_adapter is not None or self.dispatcher is not None:
            return None
        if self._quantise_rows(x_TD.dtype) is not None:  # which the kernel does not do between its two products
            return None
        weights = (gate_up_EDF, down_EFD, self.gate_up_bias, self.down_bias)
        return ops_for(x_TD).experts(x_TD, chosen_TK, weights_TK, *weights, self.limit)

    def _routed(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        chosen_TK: Tensor,
        gate_up_EDF: Tensor | PackedExperts,
        down_EFD: Tensor | PackedExperts,
    ) -> Tensor:
        tokens, k = chosen_TK.shape
        expert_R, order_R = chosen_TK.reshape(-1).sort(stable=True)
        # `bincount` would wait for the device on CUDA, to learn the length of its result.
        ends_E = torch.searchsorted(expert_R, torch.arange(self.experts, device=expert_R.device), right=True)
        counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        row_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(tokens * k, device=order_R.device))
        row_TK = row_R.view(tokens, k)
        rows_RD = ops_for(x_TD).dispatch(x_TD, order_R.div(k, rounding_mode="floor"), row_TK)
        adapters = (self.gate_up_adapter, self.down_adapter)
        weights = ExpertWeights(
            *(gate_up_EDF, down_EFD, self.gate_up_bias, self.down_bias, self.limit, self.exact),
            *adapters,
            rows=self._quantise_rows(x_TD.dtype),
        )
        if self.dispatcher is None:
            out_RD = compute_experts(rows_RD, counts_E, weights)
        else:
            out_RD = _elsewhere(self.dispatcher, rows_RD, counts_E, weights)
        return ops_for(out_RD, self.exact).combine(out_RD, weights_TK, row_TK)
