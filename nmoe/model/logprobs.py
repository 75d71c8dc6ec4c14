"""Log-probabilities and entropies of given tokens from hidden states, without a whole `[N, V]` of logits.

Rows go through the head in pieces: product, softmax and statistics, while the piece is in the cache. A piece has 2^20 logits (4
MB in fp32), or 256 rows if that is more, because each piece reads the whole head and adds to its whole gradient: with pieces of
6 rows, this took most of the time at a vocabulary of 152,000 (`benchmarks/head.py`). The backward pass needs `exp(logits -
max)`. It is kept if it has at most 2^24 values (64 MB) or as many as the head has weights; otherwise it is computed again,
piece by piece. So for any N a call holds at most 3 pieces and the kept values, besides its inputs and gradients. A loss that
uses the entropy's gradient needs one more tensor of a piece's size.

On a CPU, a kernel takes a wide vocabulary, in bf16 where there are instructions for it: its logits never leave the cache, and
nothing is kept.
"""

# Shapes: N rows, n the rows of a piece, D width, V vocabulary, M the largest kept set.

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nmoe.model.ops.table import ops_for
from nmoe.model.ops.torch import LOW_PRECISION

_PIECE_LOGITS = 2**20
_LEAST_ROWS = 256
_KEPT_LOGITS = 2**24

# torch adds up a single row of this many numbers with all its threads, each a part (GRAIN_SIZE of its TensorIterator).
_SHARED_ROW = 32_768


def row_sums(x_NV: Tensor) -> Tensor:
    """Returns `x.sum(-1)` with the same bits for a single row as for that row in a batch."""
    if x_NV.shape[0] != 1 or x_NV.shape[1] < _SHARED_ROW:
        return x_NV.sum(-1)
    return torch.cat([x_NV, x_NV]).sum(-1)[:1]


class _HeadLogprobs(torch.autograd.Function):
    """Computes log-probabilities and entropies, and their gradients. With p = softmax(x W^T / t): d logp[target] / d logits =
    (onehot(target) - p) / t and dH / d logits = -p (log p + H) / t, from which dx and dW are two products. An output that no loss
    uses costs nothing in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        temperature: float,
        kept_NM: Tensor | None,
        exact: bool,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        rows, vocabulary = x_ND.shape[0], weight_VD.shape[0]
        ctx.temperature, ctx.exact = temperature, exact
        dtype = torch.promote_types(x_ND.dtype, torch.float32)
        exps_NV = torch.empty(rows, vocabulary, dtype=dtype, device=x_ND.device) if keep else None
        given = (x_ND, weight_VD, targets_N, temperature, kept_NM, exact)
        logprobs_N, entropy_N, _, total_N = _in_pieces(*given, exps_NV)
        ctx.save_for_backward(x_ND, weight_VD, targets_N, kept_NM, exps_NV, total_N, entropy_N)
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x_ND, weight_VD, targets_N, kept_NM, exps_NV, total_N, entropy_N = ctx.saved_tensors
        grad_N = torch.zeros_like(total_N) if grads[0] is None else grads[0] / ctx.temperature
        entropy_grad_N = None if grads[1] is None else grads[1] / ctx.temperature
        # What falls on p, of both outputs: onehot * grad - p * (grad + entropy_grad * H) - p log p * entropy_grad.
        scale_N = -(grad_N if entropy_grad_N is None else grad_N + entropy_grad_N * entropy_N) / total_N
        grad_x_ND = torch.empty_like(x_ND) if ctx.needs_input_grad[0] else None
        grad_weight_VD: Tensor | None = None
        rows, vocabulary = x_ND.shape[0], weight_VD.shape[0]
        head = _Head(weight_VD, ctx.exact) if exps_NV is None else None
        # If few values are kept, the products take them all at once.
        whole = exps_NV is not None and exps_NV.numel() <= _KEPT_LOGITS
        for piece in [slice(0, rows)] if whole else _pieces(rows, vocabulary):
            again_nV = None if head is None else _shifted(head.logits(x_ND[piece]), ctx.temperature, kept_NM, piece)
            exps_nV = exps_NV[piece] if again_nV is None else again_nV.exp_()
            entropic_nV = None
            if entropy_grad_N is not None:
                entropic_nV = exps_nV / total_N[piece].unsqueeze(-1)
                torch.special.entr(entropic_nV, out=entropic_nV)  # -p log p, and 0 where a token is cut out
                entropic_nV.mul_(entropy_grad_N[piece].unsqueeze(-1))
            scale_n1 = scale_N[piece].unsqueeze(-1)
            grad_nV = exps_nV * scale_n1 if head is None else exps_nV.mul_(scale_n1)
            if entropic_nV is not None:
                grad_nV.add_(entropic_nV)
            grad_nV.scatter_add_(-1, targets_N[piece].unsqueeze(-1), grad_N[piece].unsqueeze(-1))
            grad_nV = grad_nV.to(weight_VD.dtype)
            if grad_x_ND is not None:
                grad_x_ND[piece] = ops_for(grad_nV).input_gradient(grad_nV, weight_VD)
            if ctx.needs_input_grad[1]:
                grad_weight_VD = _plus_weight_gradient(grad_weight_VD, x_ND[piece], grad_nV, grad_N.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight_VD = (
                torch.zeros_like(weight_VD) if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
            )
        return grad_x_ND, grad_weight_VD, None, None, None, None, None


class _WideHeadLogprobs(torch.autograd.Function):
    """Computes log-probabilities and entropies with the CPU kernels for a wide vocabulary, for all tokens at once. For exact
    numerics the forward pass uses the sampler's operations instead."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperature: float, exact: bool
    ) -> tuple[Tensor, Tensor]:
        given = (x_ND, weight_VD, targets_N, temperature)
        if exact:
            logprobs_N, entropy_N, largest_N, total_N = _in_pieces(*given, None, exact, None)
        else:
            logprobs_N, entropy_N, largest_N, total_N = ops_for(x_ND).head_forward(*given)
        ctx.temperature = temperature
        ctx.save_for_backward(x_ND, weight_VD, targets_N, entropy_N, largest_N, total_N)
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x_ND, weight_VD, targets_N, entropy_N, largest_N, total_N = ctx.saved_tensors
        grad_N, entropy_grad_N = (
            torch.zeros_like(total_N) if grad is None else grad / ctx.temperature for grad in grads
        )
        # The gradient of a logit l, -p (grad + entropy_grad * (H + log p)), with log p = l - largest - log total.
        slope_N = -entropy_grad_N / total_N
        factor_N = -grad_N / total_N + slope_N * (entropy_N - total_N.log())
        given = (x_ND, weight_VD, targets_N, ctx.temperature, largest_N, factor_N, slope_N, grad_N)
        return *ops_for(x_ND).head_backward(*given, *ctx.needs_input_grad[:2]), None, None, None


def _in_pieces(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    temperature: float,
    kept_NM: Tensor | None,
    exact: bool,
    exps_NV: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns log-probabilities, entropies, largest logits and sums of `exp(logits - largest)`, each `[N]`, from the logits of a
    few rows at a time, so that not all logits are in memory at once. `kept_NM` and `exact` are as in `head_logprobs`. Writes the
    exponentials to `exps_NV` if given."""
    rows, vocabulary = x_ND.shape[0], weight_VD.shape[0]
    logprobs_N = torch.empty(rows, dtype=torch.promote_types(x_ND.dtype, torch.float32), device=x_ND.device)
    entropy_N, largest_N, total_N = (torch.empty_like(logprobs_N) for _ in range(3))
    head = _Head(weight_VD, exact)
    for piece in _pieces(rows, vocabulary):
        logits_nV = head.logits(x_ND[piece])
        for part in _parts(piece, vocabulary):
            part_nV = logits_nV[part.start - piece.start : part.stop - piece.start]
            shifted_nV = _shifted(part_nV, temperature, kept_NM, part, largest_N[part])
            exps_nV = torch.exp(shifted_nV, out=None if exps_NV is None else exps_NV[part])
            total_n = total_N[part].copy_(row_sums(exps_nV))
            log_total_n = total_n.log()
            target_n = shifted_nV.gather(-1, targets_N[part].unsqueeze(-1)).squeeze(-1)
            torch.sub(target_n, log_total_n, out=logprobs_N[part])
            if kept_NM is not None:
                # A token that is cut out has a logit of -inf, and 0 * -inf counts as 0.
                shifted_nV.clamp_(min=-1e30)
            mean_n = torch.linalg.vecdot(exps_nV, shifted_nV).div_(total_n)
            torch.sub(log_total_n, mean_n, out=entropy_N[part])
    return logprobs_N, entropy_N, largest_N, total_N


def _plus_weight_gradient(sum_VD: Tensor | None, x_nD: Tensor, grad_nV: Tensor, dtype: torch.dtype) -> Tensor:
    """Adds a piece's gradient of the head's weight to the sum over earlier pieces, in `dtype`. With a wide vocabulary the gradient
    is as large as the head, so the sum is made in place if possible, in the head's layout, which saves a copy."""
    if is_wide(grad_nV.shape[-1]) and grad_nV.dtype == dtype:
        return grad_nV.t() @ x_nD if sum_VD is None else sum_VD.addmm_(grad_nV.t(), x_nD)
    if sum_VD is None:
        sum_VD = torch.zeros(grad_nV.shape[-1], x_nD.shape[-1], dtype=dtype, device=x_nD.device)
    return sum_VD.add_(ops_for(x_nD).weight_gradient(x_nD, grad_nV))


class _Head:
    """The output head, without gradients, with its weight prepared once for several pieces of rows."""

    def __init__(self, weight_VD: Tensor, exact: bool) -> None:
        if exact and weight_VD.dtype in LOW_PRECISION:
            weight_VD = weight_VD.float()  # exact products are in fp32
        self.ops, self.dtype, self.vocabulary = ops_for(weight_VD, exact), weight_VD.dtype, len(weight_VD)
        self.prepares = self.ops.exact or self.dtype in LOW_PRECISION
        self.weight = self.ops.head_weight(weight_VD) if self.prepares else weight_VD

    def logits(self, x_nD: Tensor) -> Tensor:
        """Returns the logits `[n, V]` of a piece, in fp32, or in fp64 for fp64 inputs."""
        if not self.prepares:
            return self.ops.linear(x_nD, self.weight)
        return self.ops.logits(x_nD.to(self.dtype), self.weight, self.vocabulary)


def _shifted(
    logits_nV: Tensor, temperature: float, kept_NM: Tensor | None, piece: slice, largest_n: Tensor | None = None
) -> Tensor:
    """Divides a piece's logits by the temperature, in place, restricts them to the kept set if there is one, and subtracts each
    row's largest, which is also written to `largest_n` if given."""
    if temperature != 1.0:
        logits_nV.div_(temperature)
    if kept_NM is not None:
        logits_nV = restrict_to_kept(logits_nV, kept_NM[piece])
    found_n1 = logits_nV.amax(-1, keepdim=True)
    if largest_n is not None:
        largest_n.copy_(found_n1.squeeze(-1))
    return logits_nV.sub_(found_n1)


def is_wide(vocabulary: int) -> bool:
    """Returns whether the vocabulary is so wide that the minimum of 256 rows makes a piece larger than 2^20 logits."""
    return vocabulary * _LEAST_ROWS > _PIECE_LOGITS


def kept_logits(rows: int, vocabulary: int, width: int) -> int:
    """Returns how many exponentials of logits the forward pass keeps for the backward pass, 0 if these are too many. `width` is the
    model's hidden size."""
    logits = rows * vocabulary
    return logits if logits <= max(_KEPT_LOGITS, vocabulary * width) else 0


def piece_logits(rows: int, vocabulary: int) -> int:
    """Returns the number of logits of the largest piece."""
    return min(rows, max(_LEAST_ROWS, _PIECE_LOGITS // vocabulary)) * vocabulary


def _pieces(rows: int, vocabulary: int) -> Iterator[slice]:
    step = max(_LEAST_ROWS, _PIECE_LOGITS // vocabulary)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _parts(piece: slice, vocabulary: int) -> Iterator[slice]:
    """Cuts the rows of a piece into parts that stay in the cache from one operation to the next."""
    step = max(1, _PIECE_LOGITS // vocabulary)
    for start in range(piece.start, piece.stop, step):
        yield slice(start, min(start + step, piece.stop))


def head_logprobs(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    temperature: float = 1.0,
    kept_NM: Tensor | None = None,
    exact: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns `log softmax(x @ weight.T / temperature)[target]` and the entropy in nats of that distribution, both `[N]` in fp32
    (in fp64 for fp64 inputs) and with gradient.

    `kept_NM` restricts each row's support, as `restrict_to_kept` does. `exact` is as in `ops_for`.
    """
    if kept_NM is None and is_wide(weight_VD.shape[0]) and ops_for(x_ND).takes_head(x_ND, weight_VD):
        logprobs_N, entropy_N = _WideHeadLogprobs.apply(x_ND, weight_VD, targets_N, temperature, exact)
        return logprobs_N, entropy_N
    needs_grad = torch.is_grad_enabled() and (x_ND.requires_grad or weight_VD.requires_grad)
    keep = needs_grad and kept_logits(x_ND.shape[0], *weight_VD.shape) > 0
    logprobs_N, entropy_N = _HeadLogprobs.apply(x_ND, weight_VD, targets_N, temperature, kept_NM, exact, keep)
    return logprobs_N, entropy_N


def restrict_to_kept(logits_NV: Tensor, kept_NM: Tensor) -> Tensor:
    """Sets logits outside each row's kept set to -inf, so that a learner scores over the support that sampling had after top-k and
    top-p. `kept_NM` holds token ids, padded with -1; a row of only -1 is not restricted."""
    whole_N1 = (kept_NM < 0).all(-1, keepdim=True)
    allowed_NV = torch.zeros(logits_NV.shape, dtype=torch.bool, device=logits_NV.device)
    allowed_NV = allowed_NV.scatter(-1, kept_NM.clamp(min=0), True)
    # The padding wrote token 0; undo that where token 0 was not kept.
    allowed_NV[:, 0] = (kept_NM == 0).any(-1)
    return logits_NV.masked_fill(~(allowed_NV | whole_N1), float("-inf"))
