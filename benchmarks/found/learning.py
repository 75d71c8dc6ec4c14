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
    from nmoe.rl.advantages import Advantages
    from nmoe.rl.experience import policy_batch
    from nmoe.rl.group_rewards import GroupRewards
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
    rewards, estimate = GroupRewards(AlgorithmSection(), 8), Advantages(AlgorithmSection(), 8)
    for one, two in itertools.product(range(len(samples)), repeat=2):
        group = Group(problem, (samples[one], samples[two]))
        batch = policy_batch(group.trajectories, None, "token", 8)
        experience = estimate(batch, [rewards.of(group)])
        assert experience is not None
        batch = experience.batch
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


@check(
    18,
    "a probe out of the distribution that falls from 97% to 0% and stays there; and random orders of six equal evaluations",
    "ended; at most 5% of the orders ended",
)
def one_fall_that_stays() -> Result:
    """Of 100 problems, of which 60 are solved by chance at each of the six evaluations."""
    import random
    from types import SimpleNamespace

    from nmoe.eval.early_stopping import rates_of
    from nmoe.eval.probes import Probes

    def result(right: list[bool]) -> list[dict[str, Any]]:
        outcomes = {str(at): float(one) for at, one in enumerate(right)}
        mean = sum(right) / len(right)
        return [
            {
                "mode": "greedy_pass@1",
                "dataset": "ood",
                "value": mean,
                "outcomes": outcomes,
                "role": "out_of_distribution",
            }
        ]

    section = SimpleNamespace(fatal_drops=2, role="out_of_distribution", enough=None, patience=None)
    probe = SimpleNamespace(section=section, own=list)
    asked = Probes.__new__(Probes)
    asked._asked = [(probe, None)]  # type: ignore[list-item]
    assert rates_of(result([True])) == {"ood": 1.0}

    def ends(history: list[list[dict[str, Any]]]) -> bool:
        return any(asked.reason_to_end(history[:count]) for count in range(2, len(history) + 1))

    fall = ends([result([at < count for at in range(100)]) for count in (20, 97, 0, 0)])
    draw, ended = random.Random(0), 0
    for _ in range(200):
        fixed = [draw.random() < 0.5 for _ in range(40)]
        ended += ends([result(fixed + [draw.random() < 0.5 for _ in range(60)]) for _ in range(6)])
    return f"{'ended' if fall else 'went on'}; {ended / 200:.1%} of the orders ended", fall and ended <= 10


@check(
    18,
    "has_boxed at 80% and a rewarded wrong answer in a preset with pure exact match (numina_grpo): what the rules say",
    "format, reward_hacking (a bug)",
)
def rules_of_exact_match() -> Result:
    from pathlib import Path

    from nmoe.config.commands import RLConfig
    from nmoe.config.loader import load_run
    from nmoe.monitor.rules import monitor_of

    monitor = monitor_of(load_run(Path("numina_grpo"), RLConfig), 0, Path())
    row = {"reward_mean": 0.4, "advantage_std": 0.5, "correctness": 0.4, "format_ok": 0.95, "has_boxed": 0.8}
    alerts = [
        one
        for _ in range(6)
        for one in monitor.observe({**row, "high_reward_but_wrong": 0.01, "rewarded_but_wrong": 0.01})
    ]
    said = {alert.rule: "bug" in alert.message for alert in alerts}
    shown = ", ".join(f"{name}{' (a bug)' if bug else ''}" for name, bug in sorted(said.items()))
    return shown or "nothing", said == {"format": False, "reward_hacking": True}


@check(
    18,
    'rewards that are all alike under [monitor] first_steps = "stop"',
    "ended at step 10, where reward_stuck fires",
)
def first_steps_that_stop() -> Result:
    from pathlib import Path

    import nmoe
    from nmoe.errors import RunStoppedError

    def constant(completions: list[str], **columns: Any) -> list[float]:
        return [0.5] * len(completions)

    directory = tempfile.mkdtemp()
    try:
        nmoe.train_rl(
            {"hidden_size": 32, "layers": 1, "heads": 2, "context_tokens": 64},
            env=[{"prompt": "Sing."}, {"prompt": "Hum."}],
            rewards=[constant],
            config={
                "run": {"steps": 12, "name": "first", "directory": directory, "threads": 1},
                "batch": {"prompts_per_step": 2, "group_size": 4},
                "sampling.max_new_tokens": 4,
                "monitor": {"first_steps": "stop", "truncation": {"level": "off"}},
            },
        )
    except RunStoppedError as error:
        taken = len((Path(directory) / "first" / "metrics.jsonl").read_text().splitlines())
        return f"ended at step {taken}", taken == 10 and "reward_stuck" in str(error)
    return "went on", False
