"""Checks of found faults: what a run learns from, and the figures that describe it."""

from __future__ import annotations

import itertools
import json
import tempfile
from typing import Any

from found import Result, check


@check(
    15,
    "the gradient of step rewards by default, where the policy chooses how many steps it takes",
    "1.00 of the exact one, +0.344",
)
def more_good_steps() -> Result:
    """Before each of up to four steps the policy may stop; each earns 0 or 1 by a fair coin. Exact, over all groups of two."""
    import torch

    from nmoe.config.tables.algorithm import AlgorithmSection
    from nmoe.rl.experience import policy_batch
    from nmoe.rl.train import with_advantages
    from nmoe.trajectory import Group, Trajectory
    from nmoe.types import Grade, Problem, Sample, Sampling, Turn

    problem, sampling = Problem("p", "sort", "q", "a", "s"), Sampling(8)
    samples, chances, slopes = list[Trajectory](), list[float](), list[list[float]]()
    for steps in range(1, 5):
        for coins in itertools.product((0.0, 1.0), repeat=steps):
            # The first step is given. A token says whether another one comes; after the fourth there is no choice.
            tokens = steps if steps < 4 else 3
            sample = Sample([7] * (tokens + 1), [-1.0] * (tokens + 1), [0] * (tokens + 1), "stop")
            rewards = tuple(enumerate(coins))
            grade = Grade(0.0, {}, "ok", {"correctness": 0.0}, "", step_rewards=rewards)
            samples.append(Trajectory(problem, 0, (5, 6), (Turn((), sample),), grade, sampling))
            # Of the logit of "another step", at a chance of one half; the token of the first step is no choice.
            slopes.append([0.0] + [0.5] * (steps - 1) + [-0.5] * (steps < 4))
            chances.append(0.5 ** (steps + tokens))
    exact = sum(0.5 * number * 0.5 ** (number - 1) * 0.25 for number in range(1, 4))
    found = 0.0
    for one, two in itertools.product(range(len(samples)), repeat=2):
        group = Group(problem, (samples[one], samples[two]))
        batch = policy_batch(group.trajectories, None, "token", 8)
        batch, _ = with_advantages(batch, [group], AlgorithmSection(), 8)
        assert batch.advantages_T is not None
        slope = torch.tensor([*slopes[one], *slopes[two]])
        found += chances[one] * chances[two] * float((batch.advantages_T[batch.scored_T] * slope).sum()) / 2
    return f"{found / exact:.2f} of it, {found:+.3f}", abs(found / exact - 1) < 1e-3


@check(
    16,
    "a reward that returns None for two of four samples without a gold",
    "mean 1.5 over two samples, share masked 0.5",
)
def none_is_not_zero() -> Result:
    import nmoe

    def some(completions: list[str], **columns: Any) -> list[float | None]:
        return [None if index % 3 == 0 else float(index) for index in range(len(completions))]

    run = nmoe.train_rl(
        {"hidden_size": 32, "layers": 1, "heads": 2, "context_tokens": 64},
        env=[{"prompt": "Sing."}, {"prompt": "Hum."}],
        rewards=[some],
        config={
            "run": {"steps": 1, "name": "none", "directory": tempfile.mkdtemp()},
            "batch": {"prompts_per_step": 1, "group_size": 4},
            "sampling.max_new_tokens": 8,
        },
    )
    row = run.metrics[-1]
    mean, masked = row["reward_mean"], row["grader_error_rate"]
    return f"mean {mean}, share masked {masked}", (mean, masked) == (1.5, 0.5)


@check(
    17,
    "a learning rate 100 times too high, one update a step (the default): which of the rules kl, clip and ratios fire in six steps",
    "clip, kl, ratios; spikes.jsonl has lines",
)
def one_update_a_step() -> Result:
    import nmoe

    def vowels(completions: list[str], **columns: Any) -> list[float]:
        return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in completions]

    run = nmoe.train_rl(
        {"hidden_size": 32, "layers": 1, "heads": 2, "context_tokens": 64},
        env=[{"prompt": text} for text in ("Sing.", "Hum.", "Call.", "Sigh.")],
        rewards=[vowels],
        config={
            "run": {"steps": 6, "name": "fast", "directory": tempfile.mkdtemp(), "threads": 1},
            "batch": {"prompts_per_step": 4, "group_size": 8},
            "optimizer": {"learning_rate": 0.3, "warmup_steps": 0},
            "sampling.max_new_tokens": 16,
        },
    )
    names = {"kl", "clip", "ratios"}
    alerts, spikes = run.path / "alerts.jsonl", run.path / "spikes.jsonl"
    lines = alerts.read_text().splitlines() if alerts.exists() else []
    fired = sorted({json.loads(line).get("rule") for line in lines} & names)
    many = len(spikes.read_text().splitlines()) if spikes.exists() else 0
    return f"{', '.join(fired) or 'none'}; {many} spikes", set(fired) == names and many > 0
