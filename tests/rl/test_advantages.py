"""Advantage estimators, of groups and of tokens: values by hand, and what must hold of any rewards."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nmoe.errors import UserError
from nmoe.learner.objectives import Outputs, Scored, clip
from nmoe.rl.advantages import (
    DrGrpo,
    Gae,
    Gdpo,
    Grpo,
    MaxRL,
    ReinforcePP,
    Rloo,
    divergence_rewards,
    process_supervision,
    whiten,
)
from nmoe.rl.group_rewards import terminal_rewards
from nmoe.rl.teacher import teacher_advantages

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


reinforce_pp = ReinforcePP().of_tokens


def discounted_returns(rewards: Tensor, scored: Tensor, lengths: Sequence[int], gamma: float = 1.0) -> Tensor:
    """GAE without a critic, at lambda 1."""
    return Gae(gamma, 1.0).of_tokens(rewards, torch.zeros_like(rewards), scored, lengths)[0]


# Two sequences: a prompt of two, three tokens with a tool's answer between the second and the third; a prompt of one and one token;
# and a third one in which nothing is scored.
LENGTHS = (6, 2, 1)
SCORED = torch.tensor([0, 0, 1, 1, 0, 1, 0, 1, 0]).bool()


def test_gae_by_hand() -> None:
    rewards = torch.tensor([9.0, 9, 0.0, 0.5, 9, 1.0, 9, 2.0, 9])  # what stands at unscored positions is not read
    values = torch.tensor([7.0, 7, 0.2, 0.4, 7, 0.6, 7, 0.5, 7])
    gamma, decay = 0.9, 0.8
    last = 1.0 - 0.6
    middle = 0.5 + gamma * 0.6 - 0.4 + gamma * decay * last
    first = 0.0 + gamma * 0.4 - 0.2 + gamma * decay * middle
    advantages, returns = Gae(gamma, decay).of_tokens(rewards, values, SCORED, LENGTHS)
    assert advantages.tolist() == pytest.approx([0, 0, first, middle, 0, last, 0, 1.5, 0])
    assert returns.tolist() == pytest.approx([0, 0, first + 0.2, middle + 0.4, 0, 1.0, 0, 2.0, 0])


TRACES = st.lists(
    st.lists(st.tuples(st.booleans(), st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=7),
    min_size=1,
    max_size=4,
)


@settings(deadline=None)
@given(TRACES, st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_sum_of_discounted_errors(traces, gamma: float, decay: float) -> None:
    lengths = [len(trace) for trace in traces]
    scored = torch.tensor([is_scored for trace in traces for is_scored, _, _ in trace])
    rewards = torch.tensor([reward for trace in traces for _, reward, _ in trace])
    values = torch.tensor([value for trace in traces for _, _, value in trace])
    expected = []
    for trace in traces:
        steps = [(reward, value) for is_scored, reward, value in trace if is_scored]
        after = [value for _, value in [*steps[1:], (0.0, 0.0)]][: len(steps)]
        errors = [reward + gamma * later - value for (reward, value), later in zip(steps, after, strict=True)]
        sums = iter(sum((gamma * decay) ** k * error for k, error in enumerate(errors[t:])) for t in range(len(errors)))
        expected += [next(sums) if is_scored else 0.0 for is_scored, _, _ in trace]
    advantages, returns = Gae(gamma, decay).of_tokens(rewards, values, scored, lengths)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(returns, torch.where(scored, advantages + values, 0.0))


def test_a_perfect_critic_leaves_no_advantage() -> None:
    rewards = terminal_rewards(torch.tensor([3.0, -1.0, 5.0]), SCORED, LENGTHS)
    values = torch.tensor([0.0, 0, 3, 3, 0, 3, 0, -1, 0])
    advantages, returns = Gae(1.0, 0.5).of_tokens(rewards, values, SCORED, LENGTHS)
    assert advantages.abs().max() == 0
    assert returns.tolist() == values.tolist()


def test_terminal_rewards_stand_at_the_last_scored_position() -> None:
    assert terminal_rewards(torch.tensor([3.0, -1.0, 5.0]), SCORED, LENGTHS).tolist() == [0, 0, 0, 0, 0, 3, 0, -1, 0]
    ended = torch.tensor([0, 1, 1, 0, 0, 0, 1, 0, 0]).bool()
    assert terminal_rewards(torch.tensor([3.0, -1.0, 5.0]), ended, LENGTHS).tolist() == [0, 0, 3, 0, 0, 0, -1, 0, 0]


def test_discounted_returns_by_hand() -> None:
    rewards = terminal_rewards(torch.tensor([4.0, 3.0, 0.0]), SCORED, LENGTHS)
    assert discounted_returns(rewards, SCORED, LENGTHS, 0.5).tolist() == pytest.approx([0, 0, 1, 2, 0, 4, 0, 3, 0])
    assert discounted_returns(rewards, SCORED, LENGTHS).tolist() == pytest.approx([0, 0, 4, 4, 0, 4, 0, 3, 0])


def test_reinforce_pp_by_hand() -> None:
    # Scores 1 and 0; the divergence takes 0.1 from the last token of the first sequence and gives 0.2 to its first.
    logprobs, reference = torch.zeros(9), torch.tensor([0.0, 0, 0.2, 0, 0, -0.1, 0, 0, 0])
    penalty = divergence_rewards(logprobs, reference, SCORED, coef=1.0)
    assert penalty.tolist() == pytest.approx([0, 0, 0.2, 0, 0, -0.1, 0, 0, 0])
    rewards = terminal_rewards(torch.tensor([1.0, 0.0, 0.0]), SCORED, LENGTHS) + penalty
    returns = [1.1, 0.9, 0.9, 0.0]
    mean = sum(returns) / 4
    std = math.sqrt(sum((x - mean) ** 2 for x in returns) / 4)
    first, second, third, other = ((x - mean) / std for x in returns)
    advantages = reinforce_pp(rewards, SCORED, LENGTHS)
    assert advantages.tolist() == pytest.approx([0, 0, first, second, 0, third, 0, other, 0], abs=1e-4)


def test_reinforce_pp_with_the_group_s_mean_as_baseline() -> None:
    scored = torch.ones(4, dtype=torch.bool)
    rewards = DrGrpo().of_samples(torch.tensor([1.0, 0.0, 5.0, 3.0]), torch.tensor([0, 0, 1, 1]))  # 0.5, -0.5, 1, -1
    advantages = reinforce_pp(terminal_rewards(rewards, scored, (1,) * 4), scored, (1,) * 4)
    std = math.sqrt((0.25 + 0.25 + 1 + 1) / 4)
    assert advantages.tolist() == pytest.approx([0.5 / std, -0.5 / std, 1 / std, -1 / std], abs=1e-4)


def test_divergence_rewards_add_up_for_a_sample() -> None:
    logprobs, reference = torch.arange(9) / 10, torch.zeros(9)
    penalty = divergence_rewards(logprobs, reference, SCORED, coef=2.0)
    sums = [float(part.sum()) for part in penalty.split(LENGTHS)]
    assert sums == pytest.approx([-2 * (0.2 + 0.3 + 0.5), -1.4, 0.0])
    k2 = divergence_rewards(logprobs, reference, SCORED, coef=2.0, estimator="k2")
    assert k2[7].item() == pytest.approx(-0.49)
    assert divergence_rewards(logprobs + 90, reference, SCORED, 1.0)[2] == -20  # clamped as elsewhere


# One group of three: steps of 1 and 0 that end at the second and third token, one step of 0.5, and a sample without a step.
STEPS = torch.tensor([math.nan, math.nan, math.nan, 1.0, math.nan, 0.0, math.nan, 0.5, math.nan])
TOGETHER, APART = torch.zeros(3, dtype=torch.int64), torch.arange(3)


def test_returns_to_go_of_steps_by_hand() -> None:
    assert process_supervision(STEPS, TOGETHER, SCORED, LENGTHS).tolist() == [0, 0, 1, 1, 0, 0, 0, 0.5, 0]
    # The others' totals: (0.5 + 0) / 2 for the first sample, (1 + 0) / 2 for the second.
    advantages = process_supervision(STEPS, TOGETHER, SCORED, LENGTHS, "leave_one_out")
    assert advantages.tolist() == [0, 0, 0.75, 0.75, 0, -0.25, 0, 0.0, 0]
    assert not process_supervision(STEPS, APART, SCORED, LENGTHS, "leave_one_out").any(), "nothing to compare with"
    # Two branches of one sample: the second's step is a return of the first, too.
    joined = process_supervision(STEPS, TOGETHER[:2], SCORED, (8, 1), "leave_one_out")
    assert joined.tolist() == [0, 0, 1.5, 1.5, 0, 0.5, 0, 0.5, 0]


def test_normalised_steps_by_hand() -> None:
    advantages = process_supervision(STEPS, TOGETHER, SCORED, LENGTHS, "normalised")
    one, zero = (1 - 0.5) / 0.5, (0 - 0.5) / 0.5  # mean and deviation of 1, 0, 0.5 are 0.5 and 0.5
    expected = [0, 0, one + zero, one + zero, 0, zero, 0, 0.0, 0]
    assert advantages.tolist() == pytest.approx(expected, abs=1e-5)
    # Groups of their own: the second one's only step has nothing to be compared with.
    advantages = process_supervision(STEPS, APART, SCORED, LENGTHS, "normalised")
    h = 1 / math.sqrt(2)
    assert advantages.tolist() == pytest.approx([0, 0, 0, 0, 0, -h, 0, 0, 0], abs=1e-5)


def test_a_step_may_end_on_a_token_that_is_not_scored() -> None:
    steps = torch.tensor([math.nan, math.nan, math.nan, math.nan, 1.0, math.nan, math.nan, 0.0, math.nan])
    advantages = process_supervision(steps, TOGETHER, SCORED, LENGTHS, "normalised")
    h = 1 / math.sqrt(2)
    assert advantages.tolist() == pytest.approx([0, 0, h, h, 0, 0, 0, -h, 0], abs=1e-5)
    assert process_supervision(steps, TOGETHER, SCORED, LENGTHS).tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 0]


def test_whitening_takes_scored_tokens_alone() -> None:
    values = torch.tensor([100.0, 100, 1, 2, 100, 3, 100, 6, 100])
    std = math.sqrt((4 + 1 + 0 + 9) / 4)
    expected = [0, 0, -2 / std, -1 / std, 0, 0, 0, 3 / std, 0]
    assert whiten(values, SCORED).tolist() == pytest.approx(expected, abs=1e-5)
    assert whiten(torch.full((9,), 0.1), SCORED).abs().max() < 1e-6
    assert whiten(values, torch.zeros(9, dtype=torch.bool)).tolist() == [0] * 9


def test_a_teacher_s_advantages_have_the_gradient_of_the_reverse_divergence() -> None:
    """Over all tokens of a state, weighed by the policy that drew them, through the loss that is trained with."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 5, generator=generator, dtype=torch.float64).unbind()
    logits, dense = (student.clone().requires_grad_() for _ in range(2))
    policy = student.log_softmax(-1)
    advantages = teacher_advantages(policy, teacher.log_softmax(-1), torch.ones(5, dtype=torch.bool), coef=0.3)
    assert advantages.tolist() == pytest.approx((0.3 * (teacher.log_softmax(-1) - policy)).tolist())
    outputs = Outputs(logits.log_softmax(-1), torch.zeros(5))
    loss, _ = clip(0.2, 0.2)(outputs, Scored(policy.exp(), advantages, policy))
    loss.backward()
    divergence = (dense.softmax(-1) * (dense.log_softmax(-1) - teacher.log_softmax(-1))).sum()
    (0.3 * divergence).backward()
    torch.testing.assert_close(logits.grad, dense.grad, rtol=1e-9, atol=1e-12)


def test_a_divergence_as_reward_has_the_gradient_of_that_of_whole_sequences() -> None:
    """All sequences of three tokens of two, each with its probability: returns of k1 rewards, through the loss, against the
    divergence written out."""
    sequences = list(itertools.product(range(2), repeat=3))
    states = {prefix: i for i, prefix in enumerate(p for n in range(3) for p in itertools.product(range(2), repeat=n))}
    rows = torch.tensor([states[s[:t]] for s in sequences for t in range(3)])
    tokens = torch.tensor(sequences).flatten()
    generator = torch.Generator().manual_seed(0)
    policy, reference = torch.randn(2, len(states), 2, generator=generator, dtype=torch.float64).unbind()
    logits, dense = (policy.clone().requires_grad_() for _ in range(2))
    logprobs, behind = (table.log_softmax(-1)[rows, tokens] for table in (logits, reference))
    scored, lengths = torch.ones(len(tokens), dtype=torch.bool), (3,) * len(sequences)
    penalty = divergence_rewards(logprobs.detach(), behind, scored, coef=0.3)
    returns = discounted_returns(penalty, scored, lengths)
    chances = logprobs.detach().view(-1, 3).sum(-1).exp().repeat_interleave(3)
    clip(0.2, 0.2)(Outputs(logprobs, logprobs), Scored(chances, returns.double(), logprobs.detach()))[0].backward()
    whole = dense.log_softmax(-1)[rows, tokens].view(-1, 3).sum(-1)
    (0.3 * (whole.exp() * (whole - behind.view(-1, 3).sum(-1))).sum()).backward()
    torch.testing.assert_close(logits.grad, dense.grad, rtol=1e-5, atol=1e-7)  # returns are fp32
