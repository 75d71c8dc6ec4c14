"""Policy losses and their penalties: every branch's loss and gradient in closed form."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe.learner.objectives import (
    Outputs,
    Scored,
    cispo,
    clip,
    dppo,
    dro,
    entropy_bonus,
    gspo,
    reference_divergence,
    total,
    value_loss,
)
from nmoe.learner.objectives.divergence import KLEstimator, kl_estimate
from nmoe.learner.objectives.value import explained_variance

LOG = math.log
BASE = -1.25  # the log-probability that every token has now


def column(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def run(
    objective, raw: list[float], advantages: list[float], weights: list[float], old=None, reference=None, **columns
):
    """Loss, gradient with respect to the log-probabilities, and statistics, at these log ratios to the sampler and, where
    given, to the policy before the update and to the reference."""
    logprobs = torch.full((len(raw),), BASE, dtype=torch.float64, requires_grad=True)
    scored = Scored(
        weights_N=column(weights),
        advantages_N=column(advantages),
        behaviour_logprobs_N=BASE - column(raw),
        old_logprobs_N=None if old is None else BASE - column(old),
        reference_logprobs_N=None if reference is None else BASE - column(reference),
        **columns,
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
def test_each_branch_of_clip(raw: float, advantage: float, loss: float, gradient: float, clipped: int) -> None:
    value, grad, statistics = run(clip(0.2, 0.3), [raw], [advantage], [1.0])
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
    value, grad, _ = run(clip(0.2, 0.3, dual_clip=3.0), [raw], [advantage], [1.0])
    assert value == pytest.approx(loss, rel=1e-12)
    assert grad.tolist() == pytest.approx([gradient], rel=1e-12)


def test_tokens_add_up_by_their_weights() -> None:
    value, grad, statistics = run(clip(0.2, 0.3), [0.0, LOG(1.5), LOG(2)], [1, 1, -1], [0.5, 0.25, 0.125])
    assert value == pytest.approx(0.5 * -1 + 0.25 * -1.3 + 0.125 * 2)
    assert grad.tolist() == pytest.approx([-0.5, 0, 0.25])
    assert statistics["clipped"].tolist() == [0, 1, 0]


@pytest.mark.parametrize("objective", [clip(0.2, 0.3), gspo(0.2, 0.3), cispo(0.3)], ids=["clip", "gspo", "cispo"])
def test_the_ratio_is_to_the_learner_before_the_update_where_the_batch_has_it(objective) -> None:
    sequence = {"sequence_N": torch.tensor([0])}
    mine = run(objective, [LOG(5.0)], [1.0], [1.0], old=[LOG(1.1)], **sequence)
    without = run(objective, [LOG(1.1)], [1.0], [1.0], **sequence)
    assert mine[1].tolist() == pytest.approx([-1.1], rel=1e-12)
    assert mine[0] == pytest.approx(without[0], rel=1e-12)
    assert mine[2]["log_ratio"].tolist() == pytest.approx([LOG(1.1)])


def test_gspo_by_hand() -> None:
    # Sequence 0: ratios 2 and 1/2, geometric mean 1. Sequence 1: ratios 1.5 and 1.5, mean 1.5, clipped for A > 0 alone.
    raw = [LOG(2.0), LOG(1.5), LOG(0.5), LOG(1.5)]
    sequence = {"sequence_N": torch.tensor([0, 1, 0, 1])}
    value, grad, statistics = run(gspo(0.2, 0.3), raw, [2.0, 1.0, 2.0, 1.0], [0.25] * 4, **sequence)
    assert value == pytest.approx(0.25 * (-2 - 1.3 - 2 - 1.3))
    assert grad.tolist() == pytest.approx([-0.5, 0, -0.5, 0])  # s A w at every token: not the token's own ratio
    assert statistics["clipped"].tolist() == [0, 1, 0, 1]
    value, grad, _ = run(gspo(0.2, 0.3), raw, [2.0, -1.0, 2.0, -1.0], [0.25] * 4, **sequence)
    assert value == pytest.approx(0.25 * (-2 + 1.5 - 2 + 1.5))
    assert grad.tolist() == pytest.approx([-0.5, 0.375, -0.5, 0.375])


@pytest.mark.parametrize(
    ("raw", "advantage", "weight"),
    [(0.0, 2.0, 1.0), (LOG(1.2), 2.0, 1.2), (LOG(5.0), 2.0, 1.3), (LOG(5.0), -2.0, 1.3), (LOG(0.1), -2.0, 0.1)],
)
def test_cispo_bounds_the_weight_and_keeps_every_gradient(raw: float, advantage: float, weight: float) -> None:
    value, grad, statistics = run(cispo(0.3), [raw], [advantage], [0.5])
    assert value == pytest.approx(-0.5 * weight * advantage * BASE)
    assert grad.tolist() == pytest.approx([-0.5 * weight * advantage])
    assert statistics["clipped"].tolist() == [float(weight == 1.3)]


@pytest.mark.parametrize(("raw", "weight"), [(LOG(0.1), 0.6), (LOG(0.7), 0.7), (LOG(2.0), 1.3)])
def test_cispo_with_a_lower_bound(raw: float, weight: float) -> None:
    value, grad, statistics = run(cispo(0.3, 0.4), [raw], [-2.0], [0.5])
    assert value == pytest.approx(0.5 * weight * 2 * BASE)
    assert grad.tolist() == pytest.approx([0.5 * weight * 2])
    assert statistics["clipped"].tolist() == [float(weight != 0.7)]


def test_dro_by_hand() -> None:
    value, grad, _ = run(dro(0.4), [LOG(2.0), -1.0], [3.0, -2.0], [0.5, 1.0])
    assert value == pytest.approx(0.5 * (-3 * BASE + 0.2 * LOG(2.0) ** 2) + 2 * BASE + 0.2)
    assert grad.tolist() == pytest.approx([0.5 * (-3 + 0.4 * LOG(2.0)), 2 - 0.4])


NOW = math.exp(BASE)  # 0.2865


@pytest.mark.parametrize(
    ("before", "advantage", "masked"),
    [
        (NOW - 0.25, 1.0, True),  # grown by 0.25
        (NOW - 0.15, 1.0, False),
        (NOW - 0.25, -1.0, False),  # the region binds only where the update would go on leaving it
        (NOW + 0.25, -1.0, True),
        (NOW + 0.15, -1.0, False),
        (NOW + 0.25, 1.0, False),
        (NOW / 1.0e3, 1.0, True),
        (NOW + 0.25, 0.0, True),
    ],
)
def test_dppo_masks_by_probability(before: float, advantage: float, masked: bool) -> None:
    raw = BASE - LOG(before)
    value, grad, statistics = run(dppo(0.2, 0.2, drift_coef=0.0), [raw], [advantage], [0.5])
    surrogate = 0.0 if masked else -0.5 * math.exp(raw) * advantage
    assert value == pytest.approx(surrogate, rel=1e-9)
    assert grad.tolist() == pytest.approx([surrogate], rel=1e-9)
    assert statistics["clipped"].tolist() == [float(masked)]
    value, grad, _ = run(dppo(0.2, 0.2), [raw], [advantage], [0.5])
    assert value == pytest.approx(surrogate + 0.5e-3 * raw**2, rel=1e-9)
    assert grad.tolist() == pytest.approx([surrogate + 1e-3 * raw], rel=1e-9)


def test_a_large_ratio_of_a_rare_token_is_within_dppo_s_region() -> None:
    # From 1e-6 to 1e-5: a ratio of 10 and no distance. `clip` drops the token, DPPO does not.
    logprobs = torch.tensor([LOG(1e-5)], requires_grad=True)
    scored = Scored(torch.ones(1), torch.ones(1), torch.tensor([LOG(1e-6)]))
    assert dppo(0.2, 0.2)(Outputs(logprobs, torch.zeros(1)), scored)[1]["clipped"].item() == 0
    assert clip(0.2, 0.2)(Outputs(logprobs, torch.zeros(1)), scored)[1]["clipped"].item() == 1


def test_dppo_s_region_is_about_the_sampler() -> None:
    with_old = run(dppo(0.2, 0.2), [LOG(1.3)], [1.0], [1.0], old=[0.0])
    assert with_old[0] == run(dppo(0.2, 0.2), [LOG(1.3)], [1.0], [1.0])[0]


@pytest.mark.parametrize("weight", [0.0, 0.5, 2.0])
@pytest.mark.parametrize(
    "objective",
    [clip(0.2, 0.3), clip(0.2, 0.3, 3.0), gspo(0.2, 0.3), cispo(0.3)],
    ids=["clip", "dual_clip", "gspo", "cispo"],
)
def test_a_correction_s_weight_may_go_into_the_advantage(objective, weight: float) -> None:
    raw = [LOG(0.4), LOG(0.9), LOG(1.2), LOG(1.6), LOG(6.0), LOG(6.0), LOG(0.4)]
    advantages = [1.0, 2.0, -1.0, 0.5, -2.0, 1.0, -1.0]
    sequence = {"sequence_N": torch.arange(7)}
    plain = run(objective, raw, advantages, [1.0] * 7, **sequence)
    folded = run(objective, raw, [weight * a for a in advantages], [1.0] * 7, **sequence)
    assert folded[0] == pytest.approx(weight * plain[0])
    assert folded[1].tolist() == pytest.approx([weight * g for g in plain[1].tolist()])


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
    objective = total(clip(0.2, 0.3), reference_divergence(0.1, estimator, weighted=False))
    loss, grad, statistics = run(objective, [0.0], [2.0], [0.5], reference=[difference])
    assert loss == pytest.approx(0.5 * (-2 + 0.1 * value(difference)), abs=1e-12)
    assert grad.tolist() == pytest.approx([0.5 * (-2 + 0.1 * gradient(difference))], abs=1e-12)
    assert statistics["reference_kl"].tolist() == pytest.approx([value(difference)], abs=1e-12)
    assert set(statistics) == {"log_ratio", "clipped", "reference_kl"}


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        ("k1", lambda d: d, lambda d: d + 1),
        ("k2", lambda d: d * d / 2, lambda d: d),
        ("k3", lambda d: math.exp(-d) - 1 + d, lambda d: d),
    ],
)
@pytest.mark.parametrize("rho", [0.5, 1.0, 3.0])
def test_the_penalty_is_weighed_by_how_much_likelier_the_policy_is_than_the_sampler(
    estimator: KLEstimator, value, gradient, rho: float
) -> None:
    loss, grad, statistics = run(
        reference_divergence(0.1, estimator), [LOG(rho)] * 2, [0.0] * 2, [0.5] * 2, [0.3] * 2, [0.7, -0.4]
    )
    assert loss == pytest.approx(0.5 * 0.1 * rho * (value(0.7) + value(-0.4)))
    assert grad.tolist() == pytest.approx([0.5 * 0.1 * rho * gradient(d) for d in (0.7, -0.4)])
    assert statistics["reference_kl"].tolist() == pytest.approx([rho * value(d) for d in (0.7, -0.4)])


def test_penalty_is_clamped_too() -> None:
    loss, grad, _ = run(reference_divergence(1.0, weighted=False), [0.0], [0.0], [1.0], reference=[-50.0])
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


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_whose_gradient_an_estimator_has_as_a_loss(estimator: KLEstimator) -> None:
    p, q = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(-1).unbind()
    logits, dense = p.clone().requires_grad_(), p.clone().requires_grad_()
    scored = Scored(p.exp(), reference_logprobs_N=q)
    reference_divergence(1.0, estimator, weighted=False)(Outputs(logits.log_softmax(-1), p), scored)[0].backward()
    now = dense.log_softmax(-1)
    meant = {"k1": 0 * now.sum(), "k2": (now.exp() * (now - q)).sum(), "k3": (q.exp() * (q - now)).sum()}[estimator]
    meant.backward()
    torch.testing.assert_close(logits.grad, dense.grad, rtol=1e-9, atol=1e-12)


def test_entropy_bonus_by_hand() -> None:
    entropy = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    loss, _ = entropy_bonus(0.1)(Outputs(torch.zeros(2), entropy), Scored(column([0.25, 0.75])))
    loss.backward()
    assert loss.item() == pytest.approx(-0.1 * (0.25 * 0.5 + 0.75 * 2.0))
    assert entropy.grad.tolist() == pytest.approx([-0.025, -0.075])


@pytest.mark.parametrize(
    ("value", "old", "target", "error", "gradient", "clipped"),
    [
        (1.0, 1.0, 3.0, 4.0, -2.0, 0),
        (1.1, 1.0, 3.0, 1.9**2, -1.9, 0),  # within the range nothing changes
        (1.5, 1.0, 3.0, 1.8**2, 0.0, 1),  # ran ahead towards the target: held at 1.2
        (1.5, 1.0, 0.0, 1.5**2, 1.5, 0),  # went astray: the larger error is its own
        (0.5, 1.0, 0.0, 0.8**2, 0.0, 1),
    ],
)
def test_value_loss(value: float, old: float, target: float, error: float, gradient: float, clipped: int) -> None:
    head = torch.tensor([[value, 99.0]], dtype=torch.float64, requires_grad=True)
    scored = Scored(column([0.5]), returns_N=column([target]), old_values_N=column([old]))
    loss, statistics = value_loss(0.2, coef=0.1)(Outputs(torch.zeros(1), torch.zeros(1), head), scored)
    loss.backward()
    assert loss.item() == pytest.approx(0.1 / 2 * 0.5 * error)
    assert head.grad.tolist() == [pytest.approx([0.1 * 0.5 * gradient, 0.0])]
    assert statistics["value"].tolist() == [value]
    assert statistics["value_clipped"].tolist() == [clipped]
    unclipped, _ = value_loss()(Outputs(torch.zeros(1), torch.zeros(1), head), scored)
    assert unclipped.item() == pytest.approx(0.5 / 2 * (value - target) ** 2)


def test_explained_variance_by_hand() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0, 6.0])  # variance 3.5
    assert explained_variance(returns + 5, returns) == pytest.approx(1.0)  # a constant error is not variance
    assert explained_variance(torch.zeros(4), returns) == pytest.approx(0.0)
    assert explained_variance(torch.tensor([0.0, 0.0, 0.0, 4.0]), returns) == pytest.approx(1 - 0.5 / 3.5)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, torch.ones(4)) == 0.0
    assert explained_variance(torch.zeros(0), torch.zeros(0)) == 0.0


def test_a_missing_column_is_named() -> None:
    outputs, weights = Outputs(torch.zeros(1), torch.zeros(1)), torch.ones(1)
    for objective in (clip(0.2, 0.2), gspo(0.2, 0.2), cispo(0.2), dppo(0.2, 0.2)):
        with pytest.raises(ValueError, match="'advantages'"):
            objective(outputs, Scored(weights))
        with pytest.raises(ValueError, match="'behaviour_logprobs'"):
            objective(outputs, Scored(weights, weights))
    with pytest.raises(ValueError, match="'sequence'"):
        gspo(0.2, 0.2)(outputs, Scored(weights, weights, weights))
    with pytest.raises(ValueError, match="'reference_logprobs'"):
        reference_divergence(0.1)(outputs, Scored(weights, weights, weights))
    with pytest.raises(ValueError, match="'behaviour_logprobs'"):
        reference_divergence(0.1)(outputs, Scored(weights, reference_logprobs_N=weights))
    with pytest.raises(ValueError, match="'returns'"):
        value_loss()(outputs, Scored(weights))
    with pytest.raises(ValueError, match="a learner with a head"):
        value_loss()(outputs, Scored(weights, returns_N=weights))
    with pytest.raises(ValueError, match="'old_values'"):
        value_loss(0.2)(Outputs(torch.zeros(1), torch.zeros(1), torch.zeros(1, 1)), Scored(weights, returns_N=weights))
