"""Small groups of trajectories and the settings of a policy gradient, for the tests of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from nmoe.config.commands import RLConfig
from nmoe.config.tables.algorithm import AlgorithmSection
from nmoe.rl.advantages import Advantages
from nmoe.rl.experience import Experience
from nmoe.rl.group_rewards import GroupRewards, RewardedGroup, judged
from nmoe.rl.update import PolicyUpdate
from nmoe.trajectory import Group, Trajectory
from nmoe.types import Grade, Problem, Sample, Sampling, Turn

LIMIT = 8


def settings(**sections: dict[str, Any]) -> RLConfig:
    """A run's settings with these sections' keys; a micro-batch holds everything unless they say otherwise."""
    pool = {"type": "generated", "task_type": "sort", "difficulty": [4, 4]}
    tables: dict[str, Any] = {
        "run": {"steps": 10},
        "model": {"path": "base"},
        "environment": {"env_id": "sort", "task_pool": pool},
        "sampling": {"max_new_tokens": LIMIT},
        "optimizer": {"learning_rate": 1e-3},
    }
    return RLConfig.model_validate({**tables, **{name: tables.get(name, {}) | keys for name, keys in sections.items()}})


def answer(
    reward: float,
    tokens: Sequence[int] = (7, 2),
    logprobs: Sequence[float] | None = None,
    *,
    prompt: tuple[int, ...] = (5, 6),
    correct: float | None = None,
    cut: bool = False,
    components: dict[str, float] | None = None,
    weights: dict[str, float] | None = None,
    steps: tuple[tuple[int, float], ...] = (),
) -> Trajectory:
    """One graded sample; correct where its reward is positive, unless `correct` says otherwise."""
    sample = Sample(
        list(tokens), list(logprobs or [-1.0] * len(tokens)), [0] * len(tokens), "length" if cut else "stop"
    )
    extras = {"correctness": float(reward > 0) if correct is None else correct}
    grade = Grade(reward, components or {}, "ok", extras, "", weights=weights or {}, step_rewards=steps)
    return Trajectory(Problem("p", "sort", "q", "a", "s"), 0, prompt, (Turn((), sample),), grade, Sampling(LIMIT))


def branched(reward: float, *turns: Sequence[int], steps: tuple[tuple[int, float], ...] = ()) -> Trajectory:
    """One graded sample whose turns are branches, each with a prompt of two tokens of its own."""
    whole = answer(reward, turns[0], steps=steps)
    later = [Turn((5, place), answer(0.0, ids).turns[0].sample, "prompt") for place, ids in enumerate(turns[1:], 8)]
    return replace(whole, turns=(*whole.turns, *later))


def group(*trajectories: Trajectory) -> Group:
    return Group(trajectories[0].problem, trajectories)


def rewarded(groups: Sequence[Group], algorithm: AlgorithmSection) -> list[RewardedGroup]:
    rewards = GroupRewards(algorithm, LIMIT)
    return [rewards.of(one) for one in groups]


def experience_of(update: PolicyUpdate, groups: Sequence[Group], config: RLConfig) -> Experience | None:
    """What a step trains on, of these groups."""
    rewards = rewarded(groups, config.algorithm)
    advantages = Advantages(config.algorithm, config.sampling.max_new_tokens, config.critic)
    return advantages(update.batch(judged(rewards)), rewards)


def random_groups(groups: int, samples: int, seed: int = 0, vocabulary: int = 48) -> list[Group]:
    """Groups of answers of 1 to 8 random tokens, of which the first is right and the others are by chance."""
    generator = torch.Generator().manual_seed(seed)

    def one(place: int, prompt: tuple[int, ...]) -> Trajectory:
        length = int(torch.randint(1, LIMIT + 1, (1,), generator=generator))
        tokens = torch.randint(vocabulary, (length,), generator=generator).tolist()
        logprobs = (-4.0 + 0.3 * torch.randn(length, generator=generator)).tolist()
        right = place == 0 or (place > 1 and bool(torch.randint(2, (1,), generator=generator)))
        return answer(float(right), tokens, logprobs, prompt=prompt, cut=length == LIMIT)

    prompts = [tuple(torch.randint(vocabulary, (3,), generator=generator).tolist()) for _ in range(groups)]
    return [group(*(one(place, prompt) for place in range(samples))) for prompt in prompts]
