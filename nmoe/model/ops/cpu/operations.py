"""Calls the C++ kernels with tensors. Each docstring names the torch operations that the kernel replaces."""

# Shapes: N rows, D inputs, F outputs of a linear layer or width of an expert, T tokens, K chosen experts, E experts, B rows, H
# query heads, J key-value heads, C key width, U value width, M blocks of each of S sequences, V vocabulary.

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from nmoe.model.ops.attention import AttentionLayer, Clusters
from nmoe.model.ops.cpu.library import DTYPES, call
from nmoe.model.ops.cpu.packing import HALF, PANEL


def linear(x_ND: Tensor, packed: Tensor, outputs: int, bias_F: Tensor | None) -> Tensor:
    """Computes `F.linear` with a weight arranged by `packed_panels`."""
    x_ND = x_ND.contiguous()
    out_NF = x_ND.new_empty(x_ND.shape[0], outputs)
    call(f"nmoe_linear_{DTYPES[x_ND.dtype]}", x_ND, packed, bias_F, out_NF, *x_ND.shape, outputs)
    return out_NF


def multiplies_bf16() -> bool:
    """Returns whether the processor has an instruction that multiplies pairs of bf16 numbers and sums in fp32."""
    return call("nmoe_multiplies_bf16") == 1


def linear_in_fp32(x_ND: Tensor, packed: Tensor, outputs: int) -> Tensor:
    """Computes `F.linear(x.float(), weight.float())` for x and weight in bf16, with sums in fp32.

    The weight is arranged by `packed_panels`.
    """
    x_ND = x_ND.contiguous()
    out_NF = x_ND.new_empty(x_ND.shape[0], outputs, dtype=torch.float32)
    call("nmoe_linear_bf16_in_fp32", x_ND, packed, out_NF, *x_ND.shape, outputs)
    return out_NF


def linear_by_group(x_RD: Tensor, packed: Tensor, outputs: int, counts: Sequence[int]) -> Tensor:
    """Multiplies each row by its expert's weight, `x @ weight[e]`, for rows sorted by expert with `counts[e]` rows for
    expert e.

    The weights are arranged by `packed_panels`.
    """
    x_RD = x_RD.contiguous()
    out_RF = x_RD.new_empty(x_RD.shape[0], outputs)
    groups = torch.tensor([0, *accumulate(counts)])
    call(
        f"nmoe_linear_by_group_{DTYPES[x_RD.dtype]}", x_RD, packed, groups, out_RF, len(counts), x_RD.shape[1], outputs
    )
    return out_RF


def swiglu_linear(x_ND: Tensor, packed: Tensor, width: int) -> Tensor:
    """Computes `swiglu(F.linear(x, gate_up))`, `[N, width]`, with a weight arranged by `packed_gate_up`."""
    x_ND = x_ND.contiguous()
    out_NF = x_ND.new_empty(x_ND.shape[0], width)
    call(f"nmoe_swiglu_linear_{DTYPES[x_ND.dtype]}", x_ND, packed, out_NF, *x_ND.shape, width)
    return out_NF


def experts(
    x_TD: Tensor,
    chosen_TK: Tensor,
    weights_TK: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias_EF: Tensor | None,
    down_bias_ED: Tensor | None,
    limit: float,
    width: int,
) -> Tensor:
    """Runs all of a layer's routed experts, which are `width` wide: sends rows to their experts, applies SwiGLU as
    `TorchOps.swiglu` defines it, and returns each token's weighted sum, `[T, D]`."""
    x_TD, chosen_TK, weights_TK = x_TD.contiguous(), chosen_TK.contiguous(), weights_TK.contiguous()
    (tokens, inputs), chosen, count = x_TD.shape, chosen_TK.shape[1], gate_up.shape[0]
    rows = tokens * chosen
    out_TD = torch.empty_like(x_TD)
    numbers = rows * (inputs + (inputs + -inputs % PANEL) + (width + -width % HALF))
    scratch, integers = x_TD.new_empty(numbers), chosen_TK.new_empty(rows + 2 * count + 1, dtype=torch.int32)
    weights = (gate_up, down, gate_up_bias_EF, down_bias_ED, float(limit))
    shape = (tokens, chosen, inputs, width, count)
    call(f"nmoe_experts_{DTYPES[x_TD.dtype]}", x_TD, chosen_TK, weights_TK, *weights, out_TD, scratch, integers, *shape)
    return out_TD


def route(
    x_TD: Tensor,
    packed: Tensor,
    bias_E: Tensor | None,
    balance_E: Tensor,
    sigmoid: bool,
    renormalize: bool,
    scale: float,
    chosen: int,
) -> tuple[Tensor, Tensor]:
    """Runs a router without groups, as `nmoe.model.moe.Router` defines it: returns weights `[T, K]` in fp32 and expert ids `[T,
    K]`. `packed` is the router's weight in fp32, arranged by `packed_panels`; both biases are fp32."""
    x_TD = x_TD.contiguous()
    weights_TK = torch.empty(x_TD.shape[0], chosen)
    chosen_TK = torch.empty(x_TD.shape[0], chosen, dtype=torch.int64)
    settings = (bias_E, balance_E, int(sigmoid), int(renormalize), float(scale))
    shape = (*x_TD.shape, balance_E.shape[0], chosen)
    call(f"nmoe_route_{DTYPES[x_TD.dtype]}", x_TD, packed, *settings, weights_TK, chosen_TK, *shape)
    return weights_TK, chosen_TK


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Computes `TorchOps.rms_norm` over rows of any shape."""
    x_ND = x_ND.contiguous()
    out_ND, width = torch.empty_like(x_ND), x_ND.shape[-1]
    call(f"nmoe_rms_norm_{DTYPES[x_ND.dtype]}", x_ND, weight_D, float(eps), out_ND, x_ND.numel() // width, width)
    return out_ND


def norm_and_turn_(
    qkv_TNC: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
    cos_T1c: Tensor,
    sin_T1c: Tensor,
    heads: int,
    kv_heads: int,
) -> None:
    """Changes the first heads of each token's row in place, which are `heads` queries and then `kv_heads` keys: RMSNorm if `norms`
    are given (the weights for queries and keys, and epsilon), then `TorchOps.rotate`. The heads of a row are contiguous; rows need
    not be."""
    tokens, _, width = qkv_TNC.shape
    q_norm_C, k_norm_C, eps = norms or (None, None, 0.0)
    kind, row, shape = DTYPES[qkv_TNC.dtype], qkv_TNC.stride(0), (tokens, heads, kv_heads, width)
    call(f"nmoe_norm_and_turn_{kind}", qkv_TNC, row, q_norm_C, k_norm_C, float(eps), cos_T1c, sin_T1c, *shape)


def attention(
    layer: AttentionLayer,
    q_BHC: Tensor,
    keys_NJPC: Tensor,
    values_NJPU: Tensor,
    table_SM: Tensor,
    positions_B: Tensor,
    sequence_B: Tensor | None = None,
    new: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Computes `TorchOps.paged_attention` of each row's query to its sequence up to the row's position, `[B, H, U]`.

    Row b belongs to sequence `sequence_B[b]`, or to sequence b if that is None. `new` holds the rows' own keys and
    values, which are written to the cache first; leave it out if rows see each other's keys. The heads of a row are
    contiguous; rows need not be.
    """
    (rows, heads, width), (kv_heads, _, value_width) = q_BHC.shape, values_NJPU.shape[1:]
    out_BHU = q_BHC.new_empty(rows, heads, value_width)
    strided = _by_token(q_BHC, *(new or ()))
    cached = (keys_NJPC, values_NJPU, table_SM, table_SM.stride(0), sequence_B, positions_B)
    sinks_H = None if layer.sinks_H is None else layer.sinks_H.float()
    shape = (rows, heads, kv_heads, width, value_width)
    call(
        f"nmoe_attention_{DTYPES[q_BHC.dtype]}",
        *(strided if new else (*strided, None, 0, None, 0)),
        *cached,
        sinks_H,
        float(layer.scale),
        layer.window,
        out_BHU,
        *shape,
    )
    return out_BHU


def head_forward(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns `log_softmax(logits)[target]`, the entropy, the largest logit and the sum of `exp(logits - largest)`, `[N]` each and
    in fp32 for any inputs, where `logits = x @ weight.T / temperature`."""
    x_ND = x_ND.contiguous()
    out = [torch.empty(x_ND.shape[0]) for _ in range(4)]
    given = (x_ND, weight_VD, targets_N.contiguous(), float(temperature))
    call(f"nmoe_head_forward_{DTYPES[x_ND.dtype]}", *given, *out, *x_ND.shape, weight_VD.shape[0])
    return out[0], out[1], out[2], out[3]


def head_backward(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    temperature: float,
    largest_N: Tensor,
    factor_N: Tensor,
    slope_N: Tensor,
    onehot_N: Tensor,
    of_x: bool,
    of_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of x (if `of_x`) and of the weight (if `of_weight`), else None, in the inputs' dtype, rounded once at
    the end. A logit's gradient is `exp(shifted) * (factor + slope * shifted)`, with `shifted = logit - largest` and the logits of
    `head_forward`; the target's gets `onehot` added."""
    x_ND = x_ND.contiguous()
    grad_x_ND = torch.empty(x_ND.shape) if of_x else None
    grad_weight_VD = None
    if of_weight:  # the first tokens write it, so it is cleared only if there are none
        grad_weight_VD = torch.empty(weight_VD.shape) if len(x_ND) else torch.zeros(weight_VD.shape)
    by_token = [column_N.contiguous() for column_N in (largest_N, factor_N, slope_N, onehot_N)]
    given = (x_ND, weight_VD, targets_N.contiguous(), float(temperature))
    call(
        f"nmoe_head_backward_{DTYPES[x_ND.dtype]}",
        *given,
        *by_token,
        grad_x_ND,
        grad_weight_VD,
        *x_ND.shape,
        weight_VD.shape[0],
    )
    of_x_ND, of_weight_VD = (None if x is None else x.to(x_ND.dtype) for x in (grad_x_ND, grad_weight_VD))
    return of_x_ND, of_weight_VD


def causal_attention(layer: AttentionLayer, q_HLC: Tensor, k_JSC: Tensor, v_JSU: Tensor) -> Tensor:
    """Computes `TorchOps.causal_attention` for one sequence, `[H, L, U]`. C is even in bf16."""
    (heads, length, width), (kv_heads, positions, value_width) = q_HLC.shape, v_JSU.shape
    views = [x if x.stride(2) == 1 else x.contiguous() for x in (q_HLC, k_JSC, v_JSU)]
    strided = [part for x in views for part in (x, x.stride(1), x.stride(0))]
    out_LHU = q_HLC.new_empty(length, heads, value_width)
    sinks_H = None if layer.sinks_H is None else layer.sinks_H.float()
    shape = (length, positions, heads, kv_heads, width, value_width)
    name = f"nmoe_causal_attention_{DTYPES[q_HLC.dtype]}"
    call(name, *strided, sinks_H, float(layer.scale), layer.window, out_LHU, *shape)
    return out_LHU.transpose(0, 1)


def attend_in_clusters(
    layer: AttentionLayer, q_SHC: Tensor, k_SJC: Tensor, v_SJU: Tensor, clusters: Clusters
) -> tuple[Tensor, Tensor]:
    """Computes `TorchOps.attend_in_clusters` for layers without window and sinks.

    Returns the output and the logarithms of the softmax's sums.
    """
    (rows, heads, width), (_, kv_heads, value_width) = q_SHC.shape, v_SJU.shape
    out_SHU, log_sums_SH = q_SHC.new_empty(rows, heads, value_width), torch.empty(rows, heads)
    shape = (len(clusters.bounds_G) - 1, heads, kv_heads, width, value_width, clusters.longest)
    spans = (clusters.spans_B3, clusters.bounds_G, float(layer.scale))
    name = f"nmoe_packed_attention_{DTYPES[q_SHC.dtype]}"
    call(name, *_by_token(q_SHC, k_SJC, v_SJU), *spans, out_SHU, log_sums_SH, *shape)
    return out_SHU, log_sums_SH


def attend_in_clusters_backward(
    layer: AttentionLayer,
    q_SHC: Tensor,
    k_SJC: Tensor,
    v_SJU: Tensor,
    clusters: Clusters,
    out_SHU: Tensor,
    log_sums_SH: Tensor,
    grad_SHU: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of `attend_in_clusters` for queries, keys and values.

    Sums over queries and heads are in fp32, and rounded at the end.
    """
    (_, heads, width), (_, kv_heads, value_width) = q_SHC.shape, v_SJU.shape
    grad_q_SHC = torch.empty(q_SHC.shape, dtype=q_SHC.dtype)
    grad_k_SJC, grad_v_SJU = torch.zeros(k_SJC.shape), torch.zeros(v_SJU.shape)
    call(
        f"nmoe_packed_attention_backward_{DTYPES[q_SHC.dtype]}",
        *_by_token(q_SHC, k_SJC, v_SJU),
        out_SHU,
        grad_SHU.contiguous(),
        log_sums_SH,
        clusters.spans_B3,
        clusters.bounds_G,
        float(layer.scale),
        grad_q_SHC,
        grad_k_SJC,
        grad_v_SJU,
        *(len(clusters.bounds_G) - 1, heads, kv_heads, width, value_width, clusters.longest),
    )
    return grad_q_SHC, grad_k_SJC.to(k_SJC.dtype), grad_v_SJU.to(v_SJU.dtype)


def _by_token(*rows: Tensor) -> list[Tensor | int]:
    """Returns for each tensor of heads the tensor, contiguous within a token, and its stride from one token to the next."""
    views = [x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in rows]
    return [part for x in views for part in (x, x.stride(0))]


def sample(logits_BV: Tensor, temperature_B: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Samples as `nmoe.engine.native.sampler.sample` does, for rows without top-k and top-p: returns tokens and their
    log-probabilities, `[B]` each, and whether all logits were finite."""
    logits_BV, rows = logits_BV.contiguous(), logits_BV.shape[0]
    tokens_B = torch.empty(rows, dtype=torch.int64)
    logprobs_B = torch.empty(rows)
    bad = call("nmoe_sample", logits_BV, temperature_B, uniforms_B.contiguous(), tokens_B, logprobs_B, *logits_BV.shape)
    return tokens_B, logprobs_B, bad == 0


def kept_mask(logits_BV: Tensor, top_p_B: Tensor, top_k_B: Tensor) -> Tensor:
    """Computes `nmoe.engine.native.sampler.kept_mask` for fp32 logits without sorting whole rows; equal up to the
    rounding of sums."""
    logits_BV = logits_BV.contiguous()
    kept_BV = torch.empty(logits_BV.shape, dtype=torch.bool)
    call("nmoe_kept", logits_BV, top_p_B.contiguous(), top_k_B.contiguous(), kept_BV, *logits_BV.shape)
    return kept_BV
