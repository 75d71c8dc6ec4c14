"""Advantages of a policy step, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from policy_cases import LIMIT, answer, branched, group, rewarded, settings
from torch import Tensor

from nmoe.learner.batch import Batch
from nmoe.rl.advantages import Advantages
from nmoe.rl.experience import policy_batch
from nmoe.trajectory import Group

# Prompts of two tokens: positions are [x, t1, t2] for an answer of two tokens, of which the last two are scored.
GROUPS = [group(answer(1.0), answer(0.0, [7])), group(answer(1.0), answer(1.0), answer(0.0))]


def advantages_by(batch: Batch, groups: list[Group], **sections: Any) -> tuple[Batch, Tensor]:
    config = settings(**sections)
    experience = Advantages(config.algorithm, LIMIT, config.critic)(batch, rewarded(groups, config.algorithm))
    assert experience is not None
    return experience.batch, experience.advantages


def advantages(
    groups: list[Group], columns: dict[str, list[float]] | None = None, **sections: Any
) -> tuple[Batch, list[float]]:
    trajectories = [trajectory for one in groups for trajectory in one.trajectories]
    batch = policy_batch(trajectories, None, "token", LIMIT)
    given = {name: batch.column(torch.tensor(values)) for name, values in (columns or {}).items()}
    batch, figures = advantages_by(replace(batch, **given), groups, **sections)
    assert batch.advantages_T is not None
    return batch, figures.tolist()


def scored(batch: Batch, column: str = "advantages_T") -> list[float]:
    return getattr(batch, column)[batch.scored_T].tolist()


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        ("dr_grpo", [1 / 2, -1 / 2, 1 / 3, 1 / 3, -2 / 3]),
        ("grpo", [0.5**0.5, -(0.5**0.5), 1 / 3**0.5, 1 / 3**0.5, -2 / 3**0.5]),
        ("rloo", [1.0, -1.0, 0.5, 0.5, -1.0]),
        ("maxrl", [1.0, -1.0, 0.5, 0.5, -1.0]),
    ],
)
def test_estimators_over_samples(advantage: str, expected: list[float]) -> None:
    batch, figures = advantages(GROUPS, algorithm={"advantage": advantage})
    assert figures == pytest.approx(expected, abs=1e-5)
    a, b, c, d, e = expected
    assert scored(batch) == pytest.approx([a, a, b, c, c, d, d, e, e], abs=1e-5)


def test_the_divergence_is_taken_off_the_rewards_of_samples() -> None:
    # log pi - log ref of the first answer's tokens: -1 + 2 and -1 + 1.5; nothing for the others.
    _, figures = advantages(
        GROUPS[:1], {"reference_logprobs_T": [-2.0, -1.5, -1.0]}, algorithm={"kl_coef": 0.1, "kl_in": "reward"}
    )
    reward = 1 - 0.1 * 1.5
    assert figures == pytest.approx([reward / 2, -reward / 2])


def test_reinforce_pp_is_whitened_over_tokens_with_the_divergence_of_later_ones() -> None:
    batch, figures = advantages(
        GROUPS[:1],
        {"reference_logprobs_T": [-2.0, -1.5, -1.0]},
        algorithm={"advantage": "reinforce_pp", "kl_coef": 0.1, "kl_in": "reward"},
    )
    returns = torch.tensor([1 - 0.15, 1 - 0.05, 0.0])
    expected = (returns - returns.mean()) / returns.std(correction=0)
    assert scored(batch) == pytest.approx(expected.tolist(), abs=1e-4)
    assert figures == scored(batch)


def test_gae_against_the_critics_values() -> None:
    # gamma 0.5, lambda 0.5; of the first answer V = 0.2, 0.6 and r = 0, 1; of the second V = 0.4 and r = 0.
    batch, figures = advantages(
        GROUPS[:1],
        {"old_values_T": [0.2, 0.6, 0.4]},
        algorithm={"advantage": "gae"},
        critic={"gamma": 0.5, "trace_decay": 0.5},
    )
    last = 1 - 0.6
    raw = [0.5 * 0.6 - 0.2 + 0.25 * last, last, -0.4]
    assert figures == pytest.approx(raw)
    assert scored(batch, "returns_T") == pytest.approx([raw[0] + 0.2, 1.0, 0.0])
    whitened = torch.tensor(raw)
    assert scored(batch) == pytest.approx(
        ((whitened - whitened.mean()) / whitened.std(correction=0)).tolist(), abs=1e-4
    )


STEPS = [group(answer(1.0, steps=((0, 0.0), (1, 1.0))), answer(0.0, [7], steps=((0, 0.5),)))]


def test_steps_of_an_answer_by_process_supervision() -> None:
    # Returns to go 1, 1 and 0.5; the totals of the other samples are 0.5 and 1.
    batch, figures = advantages(STEPS, algorithm={"step_reward_coef": 0.3})
    assert scored(batch) == pytest.approx([0.5 + 0.3 * (1 - 0.5), 0.5 + 0.3 * (1 - 0.5), -0.5 + 0.3 * (0.5 - 1)])
    assert figures == scored(batch)
    # Normalised, step rewards 0, 1 and 0.5: mean 0.5, deviation 0.5, so -1, 1 and 0.
    batch, _ = advantages(STEPS, algorithm={"step_reward_coef": 0.3, "step_baseline": "normalised"})
    assert scored(batch) == pytest.approx([0.5 + 0.3 * (-1 + 1), 0.5 + 0.3, -0.5], abs=1e-5)


def test_steps_of_an_answer_are_rewards_of_its_tokens_under_gae() -> None:
    batch, figures = advantages(
        STEPS,
        {"old_values_T": [0.0, 0.0, 0.0]},
        algorithm={"advantage": "gae", "step_reward_coef": 0.5},
        critic={"trace_decay": 1.0},
    )
    assert figures == pytest.approx([1.5, 1.5, 0.25])
    assert scored(batch, "returns_T") == pytest.approx([1.5, 1.5, 0.25])


def test_rewards_of_one_step_by_several_verifiers_add_up() -> None:
    both = answer(1.0, steps=((0, 0.5), (1, 1.0), (0, 0.25), (1, 0.75)))
    batch, _ = advantages(
        [group(both, answer(0.0, [7]))],
        {"old_values_T": [0.0, 0.0, 0.0]},
        algorithm={"advantage": "gae"},
        critic={"trace_decay": 1.0},
    )
    assert scored(batch, "returns_T") == pytest.approx([1 + 0.75 + 1.75, 1 + 1.75, 0.0])


def test_a_step_that_ends_where_nothing_was_sampled_is_an_error() -> None:
    with pytest.raises((AssertionError, IndexError)):
        advantages([group(answer(1.0, steps=((5, 1.0),)), answer(0.0))])


# The first sample has branches of the tokens [7, 2] and [3].
BRANCHED = [group(branched(1.0, [7, 2], [3]), answer(0.0, [7]))]


def test_branches_share_the_advantage_of_their_sample() -> None:
    batch, figures = advantages(BRANCHED)
    assert (batch.lengths, figures) == ((3, 2, 2), [0.5, -0.5])
    assert scored(batch) == [0.5, 0.5, 0.5, -0.5]


def test_the_divergence_of_all_branches_is_taken_off_their_samples_reward() -> None:
    _, figures = advantages(
        BRANCHED, {"reference_logprobs_T": [-2.0, -1.5, -4.0, -1.0]}, algorithm={"kl_coef": 0.1, "kl_in": "reward"}
    )
    reward = 1 - 0.1 * (1 + 0.5 + 3)
    assert figures == pytest.approx([reward / 2, -reward / 2])


def test_estimators_over_tokens_see_the_reward_at_the_end_of_each_branch() -> None:
    batch, _ = advantages(BRANCHED, algorithm={"advantage": "reinforce_pp"})
    a, b, c, d = scored(batch)
    assert a == b == c > d


# The second branch's only token is the fifth after the first prompt: [7, 2], the prompt [5, 8], [3].
TURNS = [group(branched(0.0, [7, 2], [3], steps=((1, 0.25), (4, 1.0))), answer(0.0, [7]))]


def test_a_reward_of_a_later_turn_is_a_return_of_the_earlier_ones() -> None:
    batch, _ = advantages(TURNS, algorithm={"advantage": "reinforce_pp"})
    first, second, third, other = scored(batch)
    # Returns 1.25, 1.25, 1 and 0, whitened.
    assert first == second
    assert (third - first) / (first - other) == pytest.approx(-0.25 / 1.25, rel=1e-4)
    batch, _ = advantages(TURNS)
    assert scored(batch) == [1.25, 1.25, 1.0, -1.25], "the other's total is 0, and the others' 1.25"


def test_values_lead_from_one_branch_to_the_next() -> None:
    """gamma 0.5, lambda 0.5; V = 0.2, 0.6 in the first branch, 0.4 in the second, whose reward is 2 at its only token."""
    batch, figures = advantages(
        [group(branched(2.0, [7, 2], [3]), answer(0.0, [7]))],
        {"old_values_T": [0.2, 0.6, 0.4, 0.0]},
        algorithm={"advantage": "gae"},
        critic={"gamma": 0.5, "trace_decay": 0.5},
    )
    third = 2 - 0.4
    second = 0.5 * 0.4 - 0.6 + 0.25 * third
    first = 0.5 * 0.6 - 0.2 + 0.25 * second
    assert figures == pytest.approx([first, second, third, 0.0], abs=1e-6)
    assert scored(batch, "returns_T") == pytest.approx([first + 0.2, second + 0.6, 2.0, 0.0])
