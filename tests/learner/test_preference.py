"""Objectives over preference pairs: losses and gradients by hand, whole batches against TRL, and bad pairs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from nmoe.learner.objectives import Outputs, Scored
from nmoe.learner.objectives.base import pair_sides
from nmoe.learner.objectives.bradley_terry import bradley_terry
from nmoe.learner.objectives.dpo import PreferenceLoss, dpo

LOG = math.log

# Two pairs, their sequences in no order, of 2, 1, 1 and 3 tokens. Log ratios summed over each: -1, 0.5, 1 and 1.5.
SEQUENCES = (0, 0, 1, 2, 3, 3, 3)
RATIOS = (-0.25, -0.75, 0.5, 1.0, 0.25, 0.5, 0.75)
PAIRS = ((7, False), (2, True), (7, True), (2, False))
# What is left of them for pair 2, (sequences 1 and 3) and for pair 7 (sequences 2 and 0).
SUMS = (0.5 - 1.5, 1.0 + 1.0)
MEANS = (0.5 - 0.5, 1.0 + 0.5)


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def run(objective: Any) -> tuple[float, list[float]]:
    """Loss and its gradient with respect to the log-probabilities, over the two pairs above, weighted as half each."""
    logprobs_N = torch.full((7,), -1.5, dtype=torch.float64, requires_grad=True)
    tokens_B = [2, 1, 1, 3]
    scored = Scored(
        weights_N=torch.tensor([1 / (4 * tokens_B[s]) for s in SEQUENCES], dtype=torch.float64),
        reference_logprobs_N=-1.5 - torch.tensor(RATIOS, dtype=torch.float64),
        sequence_N=torch.tensor(SEQUENCES),
        pairs=PAIRS,
    )
    loss, statistics = objective(Outputs(logprobs_N, torch.zeros(7)), scored)
    loss.backward()
    assert statistics == {}
    assert logprobs_N.grad is not None
    return loss.item(), logprobs_N.grad.tolist()


def over_tokens(slopes: tuple[float, float], normalised: bool) -> list[float]:
    """The gradient of every token from dL/dh of both pairs, each of weight 1/2."""
    tokens_B, sign_B, pair_B = (2, 1, 1, 3), (-1, 1, 1, -1), (1, 0, 1, 0)
    return [0.5 * sign_B[s] * slopes[pair_B[s]] / (tokens_B[s] if normalised else 1) for s in SEQUENCES]


@pytest.mark.parametrize(
    ("loss", "beta", "smoothing", "losses", "slopes"),
    [
        # L = log(1 + exp(-b h)), dL/dh = -b sigma(-b h)
        ("sigmoid", 0.5, 0.0, [LOG(1 + math.exp(-0.5 * h)) for h in SUMS], [-0.5 * sigma(-0.5 * h) for h in SUMS]),
        # d/dh of (1 - s) log(1 + exp(-b h)) + s log(1 + exp(b h)) is b (sigma(b h) - (1 - s))
        (
            "sigmoid",
            0.5,
            0.25,
            [0.75 * LOG(1 + math.exp(-0.5 * h)) + 0.25 * LOG(1 + math.exp(0.5 * h)) for h in SUMS],
            [0.5 * (sigma(0.5 * h) - 0.75) for h in SUMS],
        ),
        ("sigmoid_norm", 2.0, 0.0, [LOG(2), LOG(1 + math.exp(-3.0))], [-2 * 0.5, -2 * sigma(-3.0)]),
        (
            "robust",
            0.5,
            0.25,
            [(0.75 * LOG(1 + math.exp(-0.5 * h)) - 0.25 * LOG(1 + math.exp(0.5 * h))) / 0.5 for h in SUMS],
            [0.5 * (-0.75 * sigma(-0.5 * h) - 0.25 * sigma(0.5 * h)) / 0.5 for h in SUMS],
        ),
        ("hinge", 0.25, 0.0, [1.25, 0.5], [-0.25, -0.25]),
        ("hinge", 0.75, 0.0, [1.75, 0.0], [-0.75, 0.0]),  # beyond the margin nothing pulls
        ("ipo", 0.25, 0.0, [(0.0 - 2) ** 2, (1.5 - 2) ** 2], [-4.0, -1.0]),  # 2 (h - 1 / (2 b))
    ],
)
def test_each_loss(
    loss: PreferenceLoss, beta: float, smoothing: float, losses: list[float], slopes: tuple[float, float]
) -> None:
    value, gradient = run(dpo(loss, beta, smoothing))
    assert value == pytest.approx(sum(losses) / 2, rel=1e-12)
    assert gradient == pytest.approx(over_tokens(slopes, loss in ("sigmoid_norm", "ipo")), rel=1e-12)


def test_the_preferred_sides_own_likelihood() -> None:
    plain, gradient = run(dpo("sigmoid", 0.5))
    value, with_sft = run(dpo("sigmoid", 0.5, sft_weight=0.4))
    assert value == pytest.approx(plain + 0.4 * 1.5)  # every token has -1.5, and so has their mean
    more = [after - before for before, after in zip(gradient, with_sft, strict=True)]
    # Sequences 1 and 2 are the preferred ones, of one token each; each pair weighs one half.
    assert more == pytest.approx([0, 0, -0.2, -0.2, 0, 0, 0], abs=1e-12)


def test_the_gradient_of_dpo_is_the_papers() -> None:
    """-b sigma(r- - r+) (grad log pi(y+) - grad log pi(y-)), with r = b log pi / pi_ref (arXiv:2305.18290, section 4)."""
    _, gradient = run(dpo("sigmoid", 0.5))
    for pair, (preferred, other) in enumerate(((1, 3), (2, 0))):
        weight = 0.5 * 0.5 * sigma(-0.5 * SUMS[pair])
        for token, sequence in enumerate(SEQUENCES):
            if sequence in (preferred, other):
                assert gradient[token] == pytest.approx(-weight if sequence == preferred else weight)


def rewards(objective: Any, rewards_B: list[float]) -> tuple[float, list[float], Any]:
    head_NK = torch.tensor(rewards_B, dtype=torch.float64).unsqueeze(-1).requires_grad_()
    nothing_N = torch.full((4,), torch.nan)
    scored = Scored(weights_N=torch.full((4,), 0.25, dtype=torch.float64), sequence_N=torch.arange(4), pairs=PAIRS)
    loss, statistics = objective(Outputs(nothing_N, nothing_N, head_NK), scored)
    loss.backward()
    assert head_NK.grad is not None
    return loss.item(), head_NK.grad.flatten().tolist(), statistics["reward"].tolist()


@pytest.mark.parametrize(("margin", "centering"), [(0.0, 0.0), (0.5, 0.0), (0.0, 0.1), (0.5, 0.1)])
def test_bradley_terry(margin: float, centering: float) -> None:
    value, gradient, reported = rewards(bradley_terry(margin, centering), [0.5, 2.0, -1.0, 3.0])
    # Pair 2 prefers 2 to 3, pair 7 -1 to 0.5.
    gaps, sums = (-1.0 - margin, -1.5 - margin), (5.0, -0.5)
    losses = [LOG(1 + math.exp(-gap)) + centering * total**2 for gap, total in zip(gaps, sums, strict=True)]
    assert value == pytest.approx(sum(losses) / 2, rel=1e-12)
    slopes = [-sigma(-gap) for gap in gaps]
    pulls = [2 * centering * total for total in sums]
    expected = [-slopes[1] + pulls[1], slopes[0] + pulls[0], slopes[1] + pulls[1], -slopes[0] + pulls[0]]
    assert gradient == pytest.approx([entry / 2 for entry in expected], rel=1e-12)
    assert reported == [0.5, 2.0, -1.0, 3.0]


def test_a_reward_is_read_once_in_a_sequence() -> None:
    scored = Scored(weights_N=torch.ones(3), sequence_N=torch.tensor([0, 0, 1]), pairs=((0, True), (0, False)))
    with pytest.raises(ValueError, match="at one position of every sequence"):
        bradley_terry()(Outputs(torch.zeros(3), torch.zeros(3), torch.zeros(3, 1)), scored)


@pytest.mark.parametrize(
    "pairs", [((0, True), (0, True)), ((0, True), (1, False)), ((0, True), (0, False), (0, False))]
)
def test_a_pair_has_two_sides(pairs: tuple[tuple[int, bool], ...]) -> None:
    with pytest.raises(ValueError, match="one preferred side and one other"):
        pair_sides(pairs)
