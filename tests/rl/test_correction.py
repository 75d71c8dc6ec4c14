"""Weights for the mismatch between sampler and learner, by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nmoe.rl.advantages import Correction, correction_weights

# Two sequences, interleaved. Ratios of the first: 0.4, 1, 2.5, 1 (geometric mean 1); of the second 1.1, 1.1.
RATIOS = [0.4, 1.1, 1.0, 2.5, 1.1, 1.0]
SEQUENCE = torch.tensor([0, 1, 0, 0, 1, 0])
BEHAVIOUR = torch.tensor([-0.5, -1.0, -1.5, -2.0, -2.5, -3.0])


def weigh(correction: Correction, **options) -> tuple[Tensor, dict[str, float]]:
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
    weights, statistics = weigh(correction, **options)
    assert weights.tolist() == pytest.approx(expected, rel=1e-5)
    assert weights.dtype == torch.float32
    assert not weights.requires_grad
    assert statistics["correction_clipped"] == pytest.approx(clipped / 6)
    assert statistics["correction_masked"] == pytest.approx(masked / 6)
    assert statistics["correction_mean"] == pytest.approx(sum(expected) / 6, rel=1e-5)
    effective = sum(RATIOS) ** 2 / sum(ratio**2 for ratio in RATIOS)
    assert statistics["correction_ess"] == pytest.approx(effective / 6, rel=1e-5)


@pytest.mark.parametrize("correction", ["none", "tis", "mask", "sequence_mask"])
def test_agreement_corrects_nothing(correction: Correction) -> None:
    weights, statistics = correction_weights(correction, BEHAVIOUR, BEHAVIOUR, SEQUENCE)
    assert weights.tolist() == [1.0] * 6
    assert statistics == {
        "correction_ess": pytest.approx(1.0),
        "correction_clipped": 0.0,
        "correction_masked": 0.0,
        "correction_mean": pytest.approx(1.0),
    }


@pytest.mark.parametrize("correction", ["none", "tis", "mask", "sequence_mask"])
def test_a_broken_sampler_gives_finite_weights(correction: Correction) -> None:
    behaviour = torch.tensor([-1e4, 0.0, -1.0])
    weights, statistics = correction_weights(correction, torch.tensor([0.0, -1e4, -1.0]), behaviour, torch.arange(3))
    assert weights.isfinite().all()
    assert all(math.isfinite(value) for value in statistics.values())
    assert statistics["correction_ess"] == pytest.approx(1 / 3, rel=1e-6)  # one token outweighs all
    empty, _ = correction_weights(correction, torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert empty.tolist() == []


TOKENS = st.lists(st.tuples(st.integers(0, 3), st.floats(-3, 3), st.floats(-3, 0)), min_size=1, max_size=20)


@settings(deadline=None)
@given(TOKENS, st.floats(1, 4), st.floats(0.1, 1), st.floats(1, 8))
def test_bounds_hold_and_sequences_stay_together(tokens, cap: float, low: float, high: float) -> None:
    sequence = torch.tensor([number for number, _, _ in tokens])
    log_ratios = torch.tensor([ratio for _, ratio, _ in tokens])
    behaviour = torch.tensor([logprob for _, _, logprob in tokens])

    def weighed(correction: Correction) -> Tensor:
        old = behaviour + log_ratios
        return correction_weights(correction, old, behaviour, sequence, cap, (low, high))[0]

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
