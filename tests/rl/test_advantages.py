"""Advantage estimators: values by hand, and what must hold of any rewards."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nmoe.errors import UserError
from nmoe.rl.advantages import DrGrpo, Gdpo, Grpo, MaxRL, Rloo

# Three groups, interleaved and of unlike sizes: 7 has rewards 1, 0, 0.5; 3 has 2, 4; 9 stands alone.
REWARDS = torch.tensor([1.0, 2.0, 0.0, 9.0, 4.0, 0.5])
GROUPS = torch.tensor([7, 3, 7, 9, 3, 7])

grpo, dr_grpo, rloo, maxrl = (one().of_samples for one in (Grpo, DrGrpo, Rloo, MaxRL))
gdpo = Gdpo().of_rewards
ESTIMATORS = (grpo, dr_grpo, rloo, maxrl)


@pytest.mark.parametrize(
    ("estimate", "expected"),
    [
        (dr_grpo, [0.5, -1.0, -0.5, 0.0, 1.0, 0.0]),
        (grpo, [1.0, -1 / math.sqrt(2), -1.0, 0.0, 1 / math.sqrt(2), 0.0]),  # deviations 0.5 and sqrt(2)
        (rloo, [1 - 0.25, 2 - 4.0, 0 - 0.75, 0.0, 4 - 2.0, 0.5 - 0.5]),
    ],
)
def test_values_by_hand(estimate, expected: list[float]) -> None:
    advantages = estimate(REWARDS, GROUPS)
    assert advantages.tolist() == pytest.approx(expected, abs=5e-6)
    assert advantages.dtype == torch.float32


@pytest.mark.parametrize("estimate", ESTIMATORS)
def test_equal_rewards_have_no_advantage(estimate) -> None:
    # The mean of seven times 0.7 is not 0.7 in fp32; over a deviation of nearly nothing that would read as 0.06.
    assert estimate(torch.full((7,), 0.7), torch.zeros(7, dtype=torch.int64)).abs().max() < 1e-6


def test_no_samples_have_no_advantages() -> None:
    for estimate in ESTIMATORS:
        assert estimate(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


# Rewards as rubrics give them: sums of a few components, some alike.
GRADED = st.lists(st.tuples(st.integers(0, 4), st.integers(-8, 8).map(lambda n: n / 8)), min_size=1, max_size=30)


def columns(graded: list[tuple[int, float]]) -> tuple[Tensor, Tensor]:
    groups, rewards = zip(*graded, strict=True)
    return torch.tensor(rewards), torch.tensor(groups)


@settings(deadline=None)
@given(GRADED)
def test_dr_grpo_sums_to_nothing_in_every_group(graded: list[tuple[int, float]]) -> None:
    rewards, groups = columns(graded)
    advantages = dr_grpo(rewards, groups)
    for group in groups.unique():
        mine = groups == group
        assert advantages[mine].sum().item() == pytest.approx(0, abs=1e-5)
        # The order of rewards, and their distances, stay.
        assert (advantages[mine] - rewards[mine]).std(correction=0).item() == pytest.approx(0, abs=1e-6)


@settings(deadline=None)
@given(GRADED, st.floats(0.5, 10), st.floats(-5, 5))
def test_grpo_does_not_see_a_change_of_unit(graded: list[tuple[int, float]], scale: float, offset: float) -> None:
    rewards, groups = columns(graded)
    rewards = rewards.double()
    # Up to the 1e-6 beside the deviation, of which the least here is 1/8 over the root of a group's size.
    torch.testing.assert_close(grpo(rewards, groups), grpo(scale * rewards + offset, groups), rtol=0, atol=1e-3)


@settings(deadline=None)
@given(GRADED)
def test_grpo_has_unit_deviation_where_rewards_differ(graded: list[tuple[int, float]]) -> None:
    rewards, groups = columns(graded)
    advantages = grpo(rewards, groups)
    for group in groups.unique():
        mine = groups == group
        if rewards[mine].unique().numel() > 1:
            assert advantages[mine].std().item() == pytest.approx(1, abs=1e-3)
        else:
            assert advantages[mine].abs().max() < 1e-6


@settings(deadline=None)
@given(GRADED)
def test_rloo_is_dr_grpo_times_n_over_n_less_one(graded: list[tuple[int, float]]) -> None:
    rewards, groups = columns(graded)
    sizes = torch.tensor([(groups == group).sum().item() for group in groups], dtype=torch.float32)
    factors = torch.where(sizes > 1, sizes / (sizes - 1).clamp(min=1), 0.0)
    torch.testing.assert_close(rloo(rewards, groups), factors * dr_grpo(rewards, groups), rtol=1e-5, atol=1e-5)


@settings(deadline=None)
@given(GRADED, st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_matter(graded: list[tuple[int, float]], rng) -> None:
    order = list(range(len(graded)))
    rng.shuffle(order)
    rewards, groups = columns(graded)
    rewards = rewards - rewards.min()  # maxrl takes none below 0
    for estimate in ESTIMATORS:
        torch.testing.assert_close(
            estimate(rewards, groups)[order], estimate(rewards[order], groups[order]), rtol=0, atol=1e-6
        )


def test_maxrl_divides_by_the_success_rate() -> None:
    rewards, groups = (
        torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0]),
        torch.tensor([0] * 4 + [1] * 2 + [2] * 2 + [3]),
    )
    # Rates 1/4, 1, 0, 1: a success out of four counts 3, one among successes nothing, and none has nothing to say.
    expected = [3.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert maxrl(rewards, groups).tolist() == pytest.approx(expected, abs=2e-5)
    with pytest.raises(UserError, match=r"a reward is -0\.5"):
        maxrl(torch.tensor([1.0, -0.5]), torch.tensor([0, 0]))


def test_gdpo_by_hand() -> None:
    # Two groups of two; the second reward is a hundred times larger and must not count more for it.
    rewards = torch.tensor([[1.0, 0.0], [0.0, 100.0], [1.0, 100.0], [0.0, 0.0]])
    groups = torch.tensor([0, 0, 1, 1])
    h = 1 / math.sqrt(2)  # half a deviation of sqrt(2) / 2
    sums = [h - h, -h + h, h + h, -h - h]
    std = math.sqrt((2 * (2 * h) ** 2) / 3)
    assert gdpo(rewards, torch.ones(2), groups).tolist() == pytest.approx([s / std for s in sums], abs=1e-4)
    # GRPO on the sum sees two groups that are alike; here what is better in both counts more than what is better in one.
    assert grpo(rewards.sum(-1), groups).abs().tolist() == pytest.approx([h] * 4, abs=1e-4)
    weighted = [3 * h - h, -3 * h + h, 3 * h + h, -3 * h - h]
    std = torch.tensor(weighted).std().item()
    assert gdpo(rewards, torch.tensor([3.0, 1.0]), groups).tolist() == pytest.approx(
        [s / std for s in weighted], abs=1e-4
    )


def test_gdpo_leaves_absent_rewards_out() -> None:
    nan = math.nan
    rewards = torch.tensor([[1.0, 2.0], [0.0, nan], [nan, 4.0], [nan, nan]])
    h = 1 / math.sqrt(2)
    sums = torch.tensor([h - h, -h, h])
    expected = [*(sums / sums.std()).tolist(), 0.0]
    assert gdpo(rewards, torch.ones(2), torch.zeros(4, dtype=torch.int64)).tolist() == pytest.approx(expected, abs=1e-4)
    # A reward that one sample of a group alone has says nothing about it; the group of one neither.
    lonely = torch.tensor([[5.0, 1.0], [nan, 2.0], [7.0, 7.0]])
    advantages = gdpo(lonely, torch.ones(2), torch.tensor([0, 0, 1]))
    assert advantages.tolist() == pytest.approx([-1.0, 1.0, 0.0], abs=1e-4)
    for count in (0, 1):
        assert (
            gdpo(torch.ones(count, 2), torch.ones(2), torch.zeros(count, dtype=torch.int64)).tolist() == [0.0] * count
        )


@settings(deadline=None)
@given(GRADED, st.floats(0.5, 10), st.floats(-5, 5))
def test_gdpo_does_not_see_the_unit_of_any_reward(graded: list[tuple[int, float]], scale: float, offset: float) -> None:
    rewards, groups = columns(graded)
    both = torch.stack([rewards, rewards.square()], -1).double()
    changed = torch.stack([both[:, 0] * scale + offset, both[:, 1]], -1)
    weights = torch.tensor([0.7, 0.3])
    torch.testing.assert_close(gdpo(both, weights, groups), gdpo(changed, weights, groups), rtol=0, atol=1e-2)
    once = gdpo(both[:, :1], torch.ones(1), groups)
    if once.abs().max() > 0.1:  # with one reward it is GRPO, brought to unit deviation over the batch
        expected = grpo(rewards.double(), groups)
        torch.testing.assert_close(once, (expected - expected.mean()) / expected.std(), rtol=0, atol=1e-4)
