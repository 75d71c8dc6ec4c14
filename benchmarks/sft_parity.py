"""Proof that what is timed is the same work: loss and gradient norm of a hand-written cross-entropy on plain tensors.

The reference runs transformers' model with its loop over experts and its matmul attention, and takes log-softmax of the full
logits: another path through the mathematics than any contestant takes.
"""

from __future__ import annotations

import torch
from sft_workload import Case, Step

# fp32, sums of thousands of terms in different orders; measured differences are near 1e-7 of a loss and 1e-6 of a norm
LOSS_TOLERANCE = 2e-6
NORM_TOLERANCE = 1e-4


def reference(case: Case) -> tuple[float, float]:
    """Loss and norm of its gradient at the initial weights, over the tokens of step 0."""
    model = case.make_model()
    if "moe" in case.name:
        model.set_experts_implementation("eager")
    model.set_attn_implementation("eager")
    ids = torch.tensor(case.rows(0))
    logprobs = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    loss = -logprobs.gather(-1, ids[:, 1:, None]).sum() / case.predicted
    loss.backward()
    norm = torch.stack([parameter.grad.double().norm() for parameter in model.parameters()]).norm()
    return loss.item(), norm.item()


def check(side: str, first: Step, expected: tuple[float, float]) -> None:
    """Print loss and gradient norm of one side's first step beside the reference's; raise where they differ."""
    found = first.loss, first.gradient_norm
    print(
        f"parity {side:4s}: loss {found[0]:.7f} (reference {expected[0]:.7f}), "
        f"gradient norm {found[1]:.7f} (reference {expected[1]:.7f})",
        flush=True,
    )
    if abs(found[0] / expected[0] - 1) > LOSS_TOLERANCE or abs(found[1] / expected[1] - 1) > NORM_TOLERANCE:
        raise RuntimeError(f"{side} does not compute the reference loss; timing it would compare different work")
