"""How fast a machine is at this project's kind of work: seconds for a fixed piece of plain torch, so that times from two
machines can be compared. `python benchmarks/calibration.py`

The work is a forward and a backward pass of a small decoder block and a vocabulary's head, in fp32, on one thread: products
of widths like the speedrun's, a softmax, and operations on single elements. Nothing of nmoe is in it, so that no change here
changes it.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch.nn import functional as F

ROUNDS = 7
PASSES = 8
TOKENS, WIDTH, HIDDEN, VOCABULARY, HEADS = 2048, 96, 256, 704, 4


def calibration_s() -> float:
    """Median CPU seconds of ROUNDS rounds of PASSES passes each, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        generator = torch.Generator().manual_seed(0)
        states_TD = torch.randn(TOKENS, WIDTH, generator=generator)
        shapes = [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN), (VOCABULARY, WIDTH)]
        weights = [(torch.randn(shape, generator=generator) / 10).requires_grad_() for shape in shapes]
        targets_T = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
        _work(states_TD, weights, targets_T)
        rounds = []
        for _ in range(ROUNDS):
            began = time.process_time()
            for _ in range(PASSES):
                _work(states_TD, weights, targets_T)
            rounds.append(time.process_time() - began)
        return statistics.median(rounds)
    finally:
        torch.set_num_threads(threads)


def _work(x_TD: torch.Tensor, weights: list[torch.Tensor], targets_T: torch.Tensor) -> None:
    mix, out, up, down, head = weights
    q, k, v = (
        part.view(-1, 64, HEADS, WIDTH // HEADS).transpose(1, 2) for part in F.linear(x_TD, mix).chunk(3, dim=-1)
    )
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x_TD = x_TD + F.linear(attended.transpose(1, 2).reshape(-1, WIDTH), out)
    x_TD = x_TD + F.linear(F.silu(F.linear(F.rms_norm(x_TD, (WIDTH,)), up)), down)
    F.cross_entropy(F.linear(x_TD, head), targets_T).backward()
    for weight in weights:
        weight.grad = None


if __name__ == "__main__":
    print(f"calibration: {calibration_s():.3f} CPU seconds (torch {torch.__version__})")
