"""The clipped policy gradient: every branch's loss and gradient in closed form."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe.learner.objectives import Outputs, Scored, policy_gradient
from nmoe.learner.objectives.policy_gradient import KLEstimator, kl_estimate

LOG = math.log


def run(objective, raw: list[float], advantages: list[float], weights: list[float], reference=None):
    """Loss, gradient with respect to the log-probabilities, and statistics, at these log ratios."""
    logprobs = torch.full((len(raw),), -1.25, dtype=torch.float64, requires_grad=True)
    scored = Scored(
        weights_N=torch.tensor(weights, dtype=torch.float64),
        advantages_N=torch.tensor(advantages, dtype=torch.float64),
        behaviour_logprobs_N=-1.25 - torch.tensor(raw, dtype=torch.float64),
        reference_logprobs_N=None if reference is None else -1.25 - torch.tensor(reference, dtype=torch.float64),
    )
    loss, statistics = objective(Outputs(logprobs, torch.zeros(len(raw))), scored)
    loss.backward()
    return loss.item(), logprobs.grad, statistics


@pytest.mark.parametrize(
    ("raw", "advantage", "loss", "gradient", "clipped"),
    [
        # d/d logp of -r A is -r A itself; a clipped term has none.
        (0.0, 1.0, -1.0, -1.0, 0),
        (0.0, -2.0, 2.0, 2.0, 0),
        (LOG(1.25), 2.0, -2.5, -2.5, 0),  # above 1 + clip_low, below 1 + clip_high: the bounds are two
        (LOG(1.5), 1.0, -1.3, 0.0, 1),
        (LOG(0.5), 1.0, -0.5, -0.5, 0),  # pessimism: a good token grown rare is not clipped
        (LOG(0.5), -1.0, 0.8, 0.0, 1),
        (LOG(0.75), -1.0, 0.8, 0.0, 1),
        (LOG(0.85), -1.0, 0.85, 0.85, 0),
        (LOG(1.5), -1.0, 1.5, 1.5, 0),  # a bad token grown likely is not clipped
        (LOG(5.0), 0.0, 0.0, 0.0, 0),
        (25.0, -1.0, math.exp(20), 0.0, 0),  # the log ratio is clamped at 20
        (19.0, -1.0, math.exp(19), math.exp(19), 0),
        (-25.0, 1.0, -math.exp(-20), 0.0, 0),
    ],
)
def test_each_branch(raw: float, advantage: float, loss: float, gradient: float, clipped: int) -> None:
    value, grad, statistics = run(policy_gradient(0.2, 0.3), [raw], [advantage], [1.0])
    assert value == pytest.approx(loss, rel=1e-12)
    assert grad.tolist() == pytest.approx([gradient], rel=1e-12)
    assert statistics["clipped"].tolist() == [clipped]
    assert statistics["log_ratio"].tolist() == pytest.approx([raw], abs=1e-12)  # as it was, not as clamped
    assert set(statistics) == {"log_ratio", "clipped"}


@pytest.mark.parametrize(
    ("raw", "advantage", "loss", "gradient"),
    [
        (LOG(5.0), -2.0, 6.0, 0.0),  # bounded by c = 3
        (LOG(2.0), -2.0, 4.0, 4.0),  # below the bound
        (LOG(0.5), -2.0, 1.6, 0.0),  # the ordinary clip stays
        (LOG(5.0), 2.0, -2.6, 0.0),  # only where the advantage is negative
        (25.0, -1.0, 3.0, 0.0),
    ],
)
def test_dual_clip(raw: float, advantage: float, loss: float, gradient: float) -> None:
    value, grad, _ = run(policy_gradient(0.2, 0.3, dual_clip=3.0), [raw], [advantage], [1.0])
    assert value == pytest.approx(loss, rel=1e-12)
    assert grad.tolist() == pytest.approx([gradient], rel=1e-12)


def test_tokens_add_up_by_their_weights() -> None:
    value, grad, statistics = run(policy_gradient(0.2, 0.3), [0.0, LOG(1.5), LOG(2)], [1, 1, -1], [0.5, 0.25, 0.125])
    assert value == pytest.approx(0.5 * -1 + 0.25 * -1.3 + 0.125 * 2)
    assert grad.tolist() == pytest.approx([-0.5, 0, 0.25])
    assert statistics["clipped"].tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        ("k1", lambda d: d, lambda d: 1.0),
        ("k2", lambda d: d * d / 2, lambda d: d),
        ("k3", lambda d: math.exp(-d) - 1 + d, lambda d: 1 - math.exp(-d)),
    ],
)
@pytest.mark.parametrize("difference", [0.5, -0.5, 0.0, 3.0])
def test_penalty_for_leaving_the_reference(estimator: KLEstimator, value, gradient, difference: float) -> None:
    objective = policy_gradient(0.2, 0.3, kl_coef=0.1, kl_estimator=estimator)
    loss, grad, statistics = run(objective, [0.0], [2.0], [0.5], reference=[difference])
    assert loss == pytest.approx(0.5 * (-2 + 0.1 * value(difference)), abs=1e-12)
    assert grad.tolist() == pytest.approx([0.5 * (-2 + 0.1 * gradient(difference))], abs=1e-12)
    assert statistics["reference_kl"].tolist() == pytest.approx([value(difference)], abs=1e-12)


def test_penalty_is_clamped_too() -> None:
    loss, grad, _ = run(policy_gradient(0.2, 0.3, kl_coef=1.0), [0.0], [0.0], [1.0], reference=[-50.0])
    assert loss == pytest.approx(math.exp(20) - 1 - 20)
    assert grad.tolist() == [0.0]


@settings(deadline=None)
@given(st.floats(-20, 20), st.floats(-20, 20))
def test_k3_is_never_negative_and_is_k2_near_zero(difference: float, small: float) -> None:
    assert kl_estimate(torch.tensor(difference, dtype=torch.float64), "k3").item() >= 0
    near = torch.tensor(small * 1e-4, dtype=torch.float64)
    assert kl_estimate(near, "k3").item() == pytest.approx(kl_estimate(near, "k2").item(), rel=2e-3, abs=1e-15)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_estimators_are_unbiased(estimator: KLEstimator) -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    expected = (p * kl_estimate((p / q).log(), estimator)).sum()
    assert expected.item() == pytest.approx((p * (p / q).log()).sum().item())


def test_a_missing_column_is_named() -> None:
    outputs, weights = Outputs(torch.zeros(1), torch.zeros(1)), torch.ones(1)
    with pytest.raises(ValueError, match="'advantages'"):
        policy_gradient(0.2, 0.2)(outputs, Scored(weights))
    with pytest.raises(ValueError, match="'behaviour_logprobs'"):
        policy_gradient(0.2, 0.2)(outputs, Scored(weights, weights))
    with pytest.raises(ValueError, match="'reference_logprobs'"):
        policy_gradient(0.2, 0.2, kl_coef=0.1)(outputs, Scored(weights, weights, weights))
