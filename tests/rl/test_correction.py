"""The weights that correct sampler against learner, by hand, and the objective that they weigh."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from policy_cases import settings
from torch import Tensor

from nmoe.learner.objectives import Outputs, Scored, clip, entropy_bonus, total
from nmoe.rl.correction import Correction, Weights, correction_weights, with_correction

# Two sequences, interleaved. Ratios of the first: 0.4, 1, 2.5, 1 (geometric mean 1); of the second 1.1, 1.1.
RATIOS = [0.4, 1.1, 1.0, 2.5, 1.1, 1.0]
SEQUENCE = torch.tensor([0, 1, 0, 0, 1, 0])
BEHAVIOUR = torch.tensor([-0.5, -1.0, -1.5, -2.0, -2.5, -3.0])


def weigh(correction: Correction, **options) -> Weights:
    return correction_weights(correction, BEHAVIOUR + torch.tensor(RATIOS).log(), BEHAVIOUR, SEQUENCE, **options)


@pytest.mark.parametrize(
    ("correction", "options", "expected", "clipped", "masked"),
    [
        ("none", {}, [1, 1, 1, 1, 1, 1], 0, 0),
        ("tis", {}, [0.4, 1.1, 1, 2, 1.1, 1], 1, 0),
        ("tis", {"cap": 1.05}, [0.4, 1.05, 1, 1.05, 1.05, 1], 3, 0),
        ("mask", {}, [0, 1.1, 1, 0, 1.1, 1], 0, 2),
        ("mask", {"window": (0.3, 1.05)}, [0.4, 0, 1, 0, 0, 1], 0, 3),
        ("sequence_mask", {}, [0.4, 0, 1, 2, 0, 1], 1, 2),
        ("sequence_mask", {"window": (0.9, 1.2)}, [0.4, 1.1, 1, 2, 1.1, 1], 1, 0),
    ],
)
def test_weights_by_hand(correction: Correction, options, expected: list[float], clipped: int, masked: int) -> None:
    weights = weigh(correction, **options)
    assert weights.weights_N.tolist() == pytest.approx(expected, rel=1e-5)
    weighed_N = weights.weigh(-torch.ones(6))
    assert weighed_N.tolist() == pytest.approx([-one for one in expected], rel=1e-5)
    assert weighed_N.dtype == torch.float32
    statistics = weights.metrics()
    assert statistics["correction_clipped"] == pytest.approx(clipped / 6)
    assert statistics["correction_masked"] == pytest.approx(masked / 6)
    assert statistics["correction_mean"] == pytest.approx(sum(expected) / 6, rel=1e-5)
    effective = sum(RATIOS) ** 2 / sum(ratio**2 for ratio in RATIOS)
    assert statistics["correction_ess"] == pytest.approx(effective / 6, rel=1e-5)


@pytest.mark.parametrize("correction", ["none", "tis", "mask", "sequence_mask"])
def test_agreement_corrects_nothing(correction: Correction) -> None:
    weights = correction_weights(correction, BEHAVIOUR, BEHAVIOUR, SEQUENCE)
    assert weights.weights_N.tolist() == [1.0] * 6
    assert weights.metrics() == {
        "correction_ess": pytest.approx(1.0),
        "correction_clipped": 0.0,
        "correction_masked": 0.0,
        "correction_mean": pytest.approx(1.0),
    }


@pytest.mark.parametrize("correction", ["none", "tis", "mask", "sequence_mask"])
def test_a_broken_sampler_gives_finite_weights(correction: Correction) -> None:
    behaviour = torch.tensor([-1e4, 0.0, -1.0])
    weights = correction_weights(correction, torch.tensor([0.0, -1e4, -1.0]), behaviour, torch.arange(3))
    assert weights.weights_N.isfinite().all()
    statistics = weights.metrics()
    assert all(math.isfinite(value) for value in statistics.values())
    assert statistics["correction_ess"] == pytest.approx(1 / 3, rel=1e-6)  # one token outweighs all
    empty = correction_weights(correction, torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert empty.weights_N.tolist() == []


TOKENS = st.lists(st.tuples(st.integers(0, 3), st.floats(-3, 3), st.floats(-3, 0)), min_size=1, max_size=20)


@hypothesis_settings(deadline=None)
@given(TOKENS, st.floats(1, 4), st.floats(0.1, 1), st.floats(1, 8))
def test_bounds_hold_and_sequences_stay_together(tokens, cap: float, low: float, high: float) -> None:
    sequence = torch.tensor([number for number, _, _ in tokens])
    log_ratios = torch.tensor([ratio for _, ratio, _ in tokens])
    behaviour = torch.tensor([logprob for _, _, logprob in tokens])

    def weighed(correction: Correction) -> Tensor:
        old = behaviour + log_ratios
        return correction_weights(correction, old, behaviour, sequence, cap, (low, high)).weigh(torch.ones(len(tokens)))

    ratios = log_ratios.exp()
    assert (weighed("tis") <= cap * (1 + 1e-6)).all()
    torch.testing.assert_close(weighed("tis"), ratios.clamp(max=cap), rtol=1e-5, atol=0)
    masked = weighed("mask")
    inside = (ratios > low * (1 + 1e-5)) & (ratios < high * (1 - 1e-5))
    torch.testing.assert_close(masked[inside], ratios[inside], rtol=1e-5, atol=0)
    assert masked[(ratios < low * (1 - 1e-5)) | (ratios > high * (1 + 1e-5))].eq(0).all()
    by_sequence = weighed("sequence_mask")
    for number in sequence.unique():
        mine = sequence == number
        mean = log_ratios[mine].mean().exp().item()
        if not (math.isclose(mean, low, rel_tol=1e-5) or math.isclose(mean, high, rel_tol=1e-5)):
            expected = ratios[mine].clamp(max=cap) if low <= mean <= high else torch.zeros(int(mine.sum()))
            torch.testing.assert_close(by_sequence[mine], expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("correction", ["tis", "mask", "sequence_mask"])
def test_a_pass_without_old_logprobs_is_corrected_as_one_with_its_own(correction: Correction) -> None:
    old_N = BEHAVIOUR + torch.tensor(RATIOS).log()
    advantages_N = torch.tensor([1.0, -1.0, 2.0, -0.5, 1.0, 0.25])
    plain = total(clip(0.2, 0.3), entropy_bonus(0.1))

    def gradient(objective, scored: Scored) -> tuple[Tensor, Tensor, Tensor]:
        logprobs_N, entropy_N = old_N.clone().requires_grad_(), torch.ones(6).requires_grad_()
        loss, statistics = objective(Outputs(logprobs_N, entropy_N), scored)
        return *torch.autograd.grad(loss, (logprobs_N, entropy_N)), statistics["log_ratio"]

    base = {"weights_N": torch.full((6,), 1 / 6), "behaviour_logprobs_N": BEHAVIOUR, "sequence_N": SEQUENCE}
    weighed = with_correction(plain, settings(algorithm={"correction": correction}).algorithm)
    found = gradient(weighed, Scored(**base, advantages_N=advantages_N))
    assert all(
        map(torch.equal, found, gradient(weighed, Scored(**base, advantages_N=advantages_N, old_logprobs_N=old_N)))
    )
    # At ratio 1 nothing is clipped: the gradient of a token's loss is minus its advantage, times both weights.
    factors_N = weigh(correction).weights_N.float()
    torch.testing.assert_close(found[0], -advantages_N * factors_N / 6)
    torch.testing.assert_close(found[1], torch.full((6,), -0.1 / 6))
    assert found[2].tolist() == [0.0] * 6
    assert with_correction(plain, settings(algorithm={"correction": "none"}).algorithm) is plain
