"""Proof that what is timed is the same work: a hand-written dapo loss on plain tensors, against which both sides are held.

Dapo (Yu et al. 2025, arXiv:2503.14476, equation 8) is the clipped policy-gradient loss averaged over all completion tokens
of the batch. The reference runs transformers' model with its loop over experts and its matmul attention, padded, with full
logits: another path through the mathematics than either contestant takes.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from grpo_workload import ADVANTAGE_EPS, CLIP_EPS, MAX_GRAD_NORM, PAD_ID, GradedBatch, Workload, make_model, reward

# fp32, sums of thousands of terms in different orders; measured differences are near 1e-6
RELATIVE_TOLERANCE = 1e-4
LOSS_TOLERANCE = 1e-6


def reference_gradients(workload: Workload, batch: GradedBatch) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient by parameter name of the dapo loss at the initial weights, before clipping."""
    model = make_model(workload)
    if getattr(model.config, "num_experts_per_tok", 0):
        model.set_experts_implementation("eager")
    model.set_attn_implementation("eager")
    rows = [p + c for p, c in zip(batch.prompt_ids, batch.completion_ids, strict=True)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [PAD_ID] * (width - len(row)) for row in rows])
    present = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    sampled = present.clone()
    for row, prompt in enumerate(batch.prompt_ids):
        sampled[row, : len(prompt)] = 0

    logits = model(input_ids=ids, attention_mask=present).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    advantages = torch.tensor(batch.advantages)[:, None]
    ratio = (logprobs - logprobs.detach()).exp()  # 1 in value: the batch was sampled from these very weights
    surrogate = torch.min(ratio * advantages, ratio.clamp(1 - CLIP_EPS, 1 + CLIP_EPS) * advantages)
    mask = sampled[:, 1:]
    loss = -(surrogate * mask).sum() / mask.sum()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def total_norm(gradients: dict[str, torch.Tensor]) -> float:
    """Euclidean norm over all parameters together."""
    return torch.stack([g.double().norm() for g in gradients.values()]).norm().item()


def clipped(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients scaled to a total norm of at most MAX_GRAD_NORM, as torch's clip_grad_norm_ does it."""
    scale = min(1.0, MAX_GRAD_NORM / (total_norm(gradients) + 1e-6))
    return {name: g * scale for name, g in gradients.items()}


def check_batch(side: str, batch: GradedBatch, lengths: list[int]) -> None:
    """Raise unless the batch has the forced lengths and the advantages that its own tokens earn."""
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for row, prompt in enumerate(batch.prompt_ids):
        groups[tuple(prompt)].append(row)
    if sorted(map(len, batch.completion_ids)) != sorted(lengths):
        raise RuntimeError(f"{side} trained on other completion lengths than were forced")
    for rows in groups.values():
        rewards = torch.tensor([reward(batch.completion_ids[row]) for row in rows])
        expected = (rewards - rewards.mean()) / (rewards.std() + ADVANTAGE_EPS)
        found = torch.tensor([batch.advantages[row] for row in rows])
        # nmoe's constant beside the deviation is smaller than TRL's: at a deviation near 0.1 that is one part in a thousand
        if not torch.allclose(found, expected, rtol=1e-2, atol=1e-4):
            raise RuntimeError(
                f"{side} trained on advantages that its completions did not earn: {found} for {expected}"
            )


def check_loss(side: str, found: tuple[float, float], expected: tuple[float, float]) -> None:
    """Print loss and gradient norm of one side beside the reference's; raise where they differ."""
    print(
        f"parity {side:4s}: loss {found[0]:+.8f} (reference {expected[0]:+.8f}), "
        f"gradient norm {found[1]:.7f} (reference {expected[1]:.7f})",
        flush=True,
    )
    if abs(found[0] - expected[0]) > LOSS_TOLERANCE or abs(found[1] / expected[1] - 1) > RELATIVE_TOLERANCE:
        raise RuntimeError(f"{side} does not compute the reference loss; timing it would compare different work")


def check_gradients(side: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Print the relative distance between two sets of gradients; raise where it is more than rounding."""
    difference = {name: found[name] - expected[name] for name in expected}
    distance = total_norm(difference) / total_norm(expected)
    print(f"parity {side:4s}: gradients differ by {distance:.1e} of their norm", flush=True)
    if distance > RELATIVE_TOLERANCE:
        raise RuntimeError(f"{side} does not compute the reference gradient; timing it would compare different work")
