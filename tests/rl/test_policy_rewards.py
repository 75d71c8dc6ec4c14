"""Rewards of a policy's groups, efficiency and the penalty for length included."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from policy_cases import answer, group, rewarded, settings

from nmoe.config.tables.algorithm import AlgorithmSection
from nmoe.rl.group_rewards import efficiency_rewards, group_ids, joined, overlong_penalty
from nmoe.rl.rollouts import solve_rate
from nmoe.trajectory import Group, Trajectory

PLAIN = settings().algorithm


def differs(one: Group, algorithm: AlgorithmSection = PLAIN) -> bool:
    return rewarded([one], algorithm)[0].differs


def lost(trajectory: Trajectory) -> Trajectory:
    """The same, lost to the infrastructure."""
    return replace(trajectory, grade=replace(trajectory.grade, failure="engine_error"))


def test_the_score_alone() -> None:
    groups = [group(answer(1.0), lost(answer(0.0)), answer(0.25)), group(answer(0.5))]
    rewards_BR, weights_R = joined(rewarded(groups, PLAIN))
    assert rewards_BR.tolist() == [[1.0], [0.25], [0.5]]
    assert weights_R.tolist() == [1.0]
    assert group_ids(rewarded(groups, PLAIN)).tolist() == [0, 0, 1]


def test_length_is_added_to_the_score() -> None:
    # A limit of 8 with a buffer of 4: nothing up to 4 tokens, -0.5 at 6, -1 at 8.
    algorithm = settings(algorithm={"overlong_buffer": 4}).algorithm
    groups = [group(answer(1.0, [1] * 6), answer(0.0, [1] * 2), answer(1.0, [1] * 8))]
    rewards_BR, _ = joined(rewarded(groups, algorithm))
    assert rewards_BR[:, 0].tolist() == pytest.approx([1 - 0.5, 0.0, 1 - 1])


def efficient(right: float, unused: float, weight: float = 0.3) -> Trajectory:
    """A sample that left this share of its budget unused, graded as `Grader.grade` does."""
    components = {"correctness": right, "efficiency": unused if right == 1 else 0.0}
    weights = {"correctness": 1.0, "efficiency": weight}
    score = sum(weights[name] * value for name, value in components.items())
    return answer(score, correct=right, components=components, weights=weights)


def test_efficiency_is_paid_by_comparison_with_right_samples() -> None:
    # Of four right ones the best, two alike, and the worst. The shortest of all is wrong, and one is half right.
    one = group(*(efficient(*row) for row in [(1, 0.9), (1, 0.8), (1, 0.8), (1, 0.1), (0, 0.99), (0.5, 0.99)]))
    rewards_BR, weights_R = joined(rewarded([one], PLAIN))
    assert rewards_BR[:, 0].tolist() == pytest.approx([1.2625, 1.15, 1.15, 1.0375, 0.0, 0.5])
    assert weights_R.tolist() == [1.0]
    apart = settings(algorithm={"advantage": "grpo", "multi_reward": "gdpo"}).algorithm
    rewards_BR, weights_R = joined(rewarded([one], apart))
    assert weights_R.tolist() == pytest.approx([1.0, 0.3])
    assert rewards_BR[:, 1].tolist() == [0.875, 0.5, 0.5, 0.125, 0.0, 0.0]


def test_brevity_competes_with_brevity_alone() -> None:
    """Right samples have the same mean in any group: neither a problem nor being right with few others pays by length."""
    for lengths in ([0.9], [0.2, 0.2, 0.2], [0.9, 0.89], [0.99, 0.5, 0.1, 0.1]):
        rewards = efficiency_rewards(torch.tensor([*lengths, 0.0]), torch.tensor([True] * len(lengths) + [False]))
        assert rewards[:-1].mean() == pytest.approx(0.5)
        assert rewards[-1] == 0.0
    assert efficiency_rewards(torch.tensor([0.9, 0.0]), torch.tensor([False, False])).tolist() == [0.0, 0.0]


def test_a_problem_without_an_answer_has_no_efficiency() -> None:
    weights = {"format": 1.0, "efficiency": 1.0}
    open_ = group(*(answer(1.0, correct=0.0, components={"format": 1.0}, weights=weights) for _ in range(2)))
    assert joined(rewarded([open_], PLAIN))[0].tolist() == [[1.0], [1.0]]
    assert not differs(open_)


def test_gdpo_keeps_rewards_apart_and_knows_which_are_absent() -> None:
    algorithm = settings(algorithm={"advantage": "grpo", "multi_reward": "gdpo", "overlong_buffer": 4}).algorithm
    weights = {"format": 0.5, "correctness": 1.0, "reasoning": 0.0, "judge": 2.0}
    one = answer(
        1.0, [1] * 6, components={"format": 1.0, "correctness": 0.0, "reasoning": 1.0, "judge": 0.75}, weights=weights
    )
    two = answer(1.0, [1] * 2, components={"format": 0.0, "correctness": 1.0, "reasoning": 1.0}, weights=weights)
    rewards_BR, weights_R = joined(rewarded([group(one, two)], algorithm))
    assert weights_R.tolist() == [1.0, 0.5, 2.0, 1.0]  # correctness, format, judge, length
    assert rewards_BR[0].tolist() == [0.0, 1.0, 0.75, -0.5]
    assert rewards_BR[1].nan_to_num(-9).tolist() == [1.0, 0.0, -9, 0.0]


def test_a_group_teaches_where_judged_rewards_differ() -> None:
    assert differs(group(answer(1.0), answer(0.0)))
    assert not differs(group(answer(1.0), answer(1.0)))
    assert not differs(group(answer(1.0)))
    # A lost sample has a score of 0 that is no verdict: it makes no difference.
    assert not differs(group(answer(1.0), lost(answer(0.0)), answer(1.0)))
    assert not differs(group(answer(1.0), lost(answer(0.0))))


def test_a_group_teaches_by_length_by_steps_and_by_single_rewards() -> None:
    short, long = answer(1.0, [1]), answer(1.0, [1] * 5)
    assert not differs(group(short, long))
    assert differs(group(efficient(1, 0.9), efficient(1, 0.8)))
    assert not differs(group(efficient(1, 0.9, 0.0), efficient(1, 0.8, 0.0)))
    assert not differs(group(efficient(0, 0.9), efficient(0, 0.8))), "no wrong answer is paid for its length"
    steps = group(answer(1.0, steps=((0, 0.5), (1, 1.0))), answer(1.0))
    assert differs(steps)
    assert not differs(steps, settings(algorithm={"step_reward_coef": 0.0}).algorithm)
    more = group(answer(1.0, steps=((0, 1.0), (1, 1.0))), answer(1.0, steps=((0, 1.0),)))
    assert differs(more), "two good steps earn more than one"
    assert not differs(more, settings(algorithm={"step_baseline": "normalised"}).algorithm)
    assert not differs(group(answer(1.0, steps=((0, 0.0),)), answer(1.0)))
    weights = {"format": 1.0, "correctness": 1.0}
    same_sum = group(
        answer(1.0, components={"format": 1.0, "correctness": 0.0}, weights=weights),
        answer(1.0, components={"format": 0.0, "correctness": 1.0}, weights=weights),
    )
    assert not differs(same_sum)
    assert differs(same_sum, settings(algorithm={"advantage": "grpo", "multi_reward": "gdpo"}).algorithm)
    absent = group(*(answer(1.0, components={}, weights=weights) for _ in range(2)))
    assert not differs(absent, settings(algorithm={"advantage": "grpo", "multi_reward": "gdpo"}).algorithm)


def test_a_divergence_in_the_reward_makes_every_group_teach() -> None:
    divergence = settings(algorithm={"kl_coef": 0.1, "kl_in": "reward"}).algorithm
    assert differs(group(answer(1.0), answer(1.0)), divergence)
    assert not differs(group(answer(1.0)), divergence)
    in_the_loss = settings(algorithm={"kl_coef": 0.1}).algorithm
    assert not differs(group(answer(1.0), answer(1.0)), in_the_loss)


def test_solve_rate_is_of_what_was_judged() -> None:
    assert solve_rate(group(answer(1.0), answer(0.0), lost(answer(0.0)))) == 0.5
    assert solve_rate(group(lost(answer(1.0)))) is None
    assert torch.tensor(solve_rate(group(answer(0.2, correct=0.25)))) == 0.25


def test_overlong_penalty_by_hand() -> None:
    tokens = torch.tensor([0, 79, 80, 85, 90, 100, 120])
    expected = [0, 0, 0, -0.25, -0.5, -1, -1]
    assert overlong_penalty(tokens, max_tokens=100, buffer_tokens=20).tolist() == pytest.approx(expected)
