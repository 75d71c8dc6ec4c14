"""Advantages per token: recursions by hand, and against sums written out."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nmoe.learner.objectives import Outputs, Scored, clip
from nmoe.rl.advantages import DrGrpo, Gae, ReinforcePP, divergence_rewards, process_supervision, whiten
from nmoe.rl.group_rewards import terminal_rewards
from nmoe.rl.teacher import teacher_advantages

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
