"""Tests whether exact numerics are exact on this machine: runs each part of a model on a whole batch and on parts of the batch, and
compares the bits.

Products, attention and the sum over a token's experts are exact by construction (`nmoe.model.ops.exact`). Norms, softmax,
exponentials, rotary turns and the sums of recurrent layers are torch's, whose kernels differ between processors and versions. The
whole test takes about 0.1 s.
"""

# Shapes: N rows, D width, V vocabulary.

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nmoe.model.config import DeltaNet
from nmoe.model.logprobs import head_logprobs
from nmoe.model.ops.attention import AttentionLayer
from nmoe.model.ops.table import ops_for
from nmoe.model.packed import PackedAttention
from nmoe.model.recurrence import RecurrentLayer, Spans, run

_ROWS = 97
_CPU = torch.device("cpu")
_SOME = (slice(0, 1), slice(0, 8), slice(5, 22), slice(40, 41), slice(64, _ROWS))


@torch.no_grad()
def inexact_parts(device: torch.device = _CPU) -> list[str]:
    """Returns the parts of a model in which some row's bits change with the batch; an empty list if exact numerics are exact
    here."""
    found = []
    for name, part in _parts(device).items():
        whole = part(slice(0, _ROWS))
        if not all(torch.equal(part(some), whole[some]) for some in _SOME):
            found.append(name)
    return found


def numerics_here(asked: str, device: torch.device = _CPU) -> str:
    """Describes the numerics on this device, as a run records them: `fast`, `exact`, or, for example, `exact, but for norms`."""
    inexact = inexact_parts(device) if asked == "exact" else []
    return f"{asked}, but for {', '.join(inexact)}" if inexact else asked


def _parts(device: torch.device) -> dict[str, Callable[[slice], Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    x_ND, heads_NHC, factors = draw(_ROWS, 96), draw(_ROWS, 6, 20), draw(96)
    wide, narrow, expert, head = draw(70, 96), draw(4, 96), draw(1, 96, 24), draw(4096, 96) / 10
    angles, tokens = draw(_ROWS, 1, 10), torch.arange(_ROWS, device=device)
    weights_NK, row_NK = (
        torch.rand(_ROWS, 3, generator=generator).to(device),
        torch.randint(_ROWS, (_ROWS, 3), generator=generator).to(device),
    )
    layer, ops = AttentionLayer(0, 0.2), ops_for(x_ND, exact=True)
    recurrent = RecurrentLayer(
        0, DeltaNet(key_heads=2, value_heads=4, key_dim=20, value_dim=10, conv_tokens=4), draw(120, 4)
    )

    def grouped(some: slice) -> Tensor:
        """Runs a product grouped by expert, with three equal experts: the first 30 rows, no row, and the other rows."""
        rows = x_ND[some]
        counts = [min(len(rows), 30), 0, max(len(rows) - 30, 0)]
        return ops.linear_by_group(rows, expert.expand(3, -1, -1), counts)

    def attention(some: slice) -> Tensor:
        """Runs attention over one sequence that is cut off after the last row asked for, and returns the rows asked for."""
        rows = heads_NHC[: some.stop]
        q, k, v = rows[:, :4], rows[:, 4:5], rows[:, 5:]
        packed = PackedAttention([len(rows)], x_ND.device, exact=True)
        return packed(layer, q, k, v)[some]

    def recurrence(some: slice) -> Tensor:
        """Runs a recurrent layer over one sequence that is cut off after the last row asked for, and returns the rows asked for."""
        rows = heads_NHC[: some.stop].flatten(1)
        spans = Spans([len(rows)], x_ND.device)
        return run(recurrent, spans, rows, -rows[:, :4].exp(), ops.sigmoid(rows[:, 4:8]), None, exact=True)[0][some]

    return {
        "products": lambda some: ops.linear(x_ND[some], wide),
        "narrow products": lambda some: ops.linear(x_ND[some], narrow),
        "products of experts": grouped,
        "sums over experts": lambda some: ops.combine(x_ND, weights_NK[some], row_NK[some]),
        "attention": attention,
        "recurrent layers": recurrence,
        "norms": lambda some: ops.rms_norm(x_ND[some], factors, 1e-6),
        "norms of heads": lambda some: ops.rms_norm(heads_NHC[some, :5], factors[:20], 1e-6),
        "rotary turns": lambda some: ops.rotate(heads_NHC[some, :5], angles[some].cos(), angles[some].sin()),
        "softmax": lambda some: x_ND[some, :48].softmax(-1),
        "sigmoid": lambda some: ops.sigmoid(heads_NHC[some]),
        "log-probabilities": lambda some: head_logprobs(x_ND[some], head, tokens[some], exact=True)[0],
    }
