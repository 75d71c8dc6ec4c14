"""The gated delta rule in torch: token by token, which defines it, and in chunks, the same function with sums in another order.

For each head, with decay `a_t` in (0, 1), strength `b_t` in (0, 1) and a memory M of C x U numbers (Yang et al. 2024,
arXiv:2412.06464, eq. 10):

    M_t = a_t M_(t-1) + k_t (b_t (v_t - a_t M_(t-1)^T k_t))^T        o_t = M_t^T q_t

A token of decay 1 and strength 0 leaves the memory as it is, to the bit: such tokens pad sequences at their ends.
"""

# Shapes: B sequences of L tokens, H heads, C key width, U value width, N chunks of X tokens.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens of a chunk. 4 sequences of 512 tokens, 8 heads of 64, forward and backward on one core: 230 ms in chunks of 16, 142 of 32,
# 154 of 64 (as in transformers), 1.1 s token by token. Smaller chunks round less: 64 differs from decoding by twice as much as 16.
CHUNK = 32


def scan(
    q_BLHC: Tensor, k_BLHC: Tensor, v_BLHU: Tensor, decay_BLH: Tensor, beta_BLH: Tensor, memory_BHCU: Tensor
) -> tuple[Tensor, Tensor]:
    """Runs the delta rule token by token: returns each token's output, `[B, L, H, U]`, and the memory after the last token.
    `decay_BLH` is the logarithm of the decay. A sequence's results have the same bits wherever it is cut and in any batch, because
    every sum is over an axis of one sequence."""
    out, kept_LBH11 = [], decay_BLH.exp().transpose(0, 1)[..., None, None]
    steps = (x.transpose(0, 1) for x in (q_BLHC, k_BLHC, v_BLHU, beta_BLH))
    for q_BHC, k_BHC, v_BHU, beta_BH, kept_BH11 in zip(*steps, kept_LBH11, strict=True):
        memory_BHCU = memory_BHCU * kept_BH11
        k_BHC1 = k_BHC.unsqueeze(-1)
        change_BHU = (v_BHU - (memory_BHCU * k_BHC1).sum(-2)) * beta_BH.unsqueeze(-1)
        memory_BHCU = memory_BHCU + k_BHC1 * change_BHU.unsqueeze(-2)
        out.append((memory_BHCU * q_BHC.unsqueeze(-1)).sum(-2))
    return torch.stack(out, 1), memory_BHCU


def by_chunks(
    q_BLHC: Tensor, k_BLHC: Tensor, v_BLHU: Tensor, decay_BLH: Tensor, beta_BLH: Tensor, memory_BHCU: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes `scan` with one product for all tokens of a chunk: within it, the tokens' changes of the memory are the solution of
    a triangular system (arXiv:2412.06464, section 3.3)."""
    length = q_BLHC.shape[1]
    size = min(CHUNK, length)
    q, k, v, decay, beta = (_chunks(x, size) for x in (q_BLHC, k_BLHC, v_BLHU, decay_BLH, beta_BLH))
    past_BHNX = decay.cumsum(-1)
    later_XX = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    kept_BHNXX = (past_BHNX.unsqueeze(-1) - past_BHNX.unsqueeze(-2)).masked_fill(later_XX, float("-inf")).exp()
    weak_BHNXC, whole_BHNX1 = k * beta.unsqueeze(-1), past_BHNX.exp().unsqueeze(-1)
    system_BHNXX = (weak_BHNXC @ k.mT) * kept_BHNXX
    sides = torch.cat([v * beta.unsqueeze(-1), weak_BHNXC * whole_BHNX1], -1)
    solved = torch.linalg.solve_triangular(system_BHNXX, sides, upper=False, unitriangular=True)
    values_BHNXU, reads_BHNXC = solved.split([v.shape[-1], k.shape[-1]], -1)
    among_BHNXX = (q @ k.mT) * kept_BHNXX
    q, k = q * whole_BHNX1, k * (past_BHNX[..., -1:] - past_BHNX).exp().unsqueeze(-1)
    left_BHN11 = past_BHNX[..., -1].exp()[..., None, None]
    out = []
    for n in range(q.shape[2]):
        change_BHXU = values_BHNXU[:, :, n] - reads_BHNXC[:, :, n] @ memory_BHCU
        out.append(q[:, :, n] @ memory_BHCU + among_BHNXX[:, :, n] @ change_BHXU)
        memory_BHCU = memory_BHCU * left_BHN11[:, :, n] + k[:, :, n].mT @ change_BHXU
    return torch.cat(out, 2).transpose(1, 2)[:, :length], memory_BHCU


def _chunks(x_BLH: Tensor, size: int) -> Tensor:
    """Cuts `[B, L, H, ...]` into chunks, `[B, H, N, X, ...]`, the last one padded with zeros."""
    x_BHL = x_BLH.transpose(1, 2)
    missing = -x_BHL.shape[2] % size
    filled = F.pad(x_BHL, (*[0, 0] * (x_BHL.dim() - 3), 0, missing))
    return filled.unflatten(2, (-1, size))
