"""Converts a run length in episodes (passes over the problems) to a number of steps.

OpenRLHF counts optimizer steps: pool x samples per prompt // train batch x episodes, with the batch in samples. A step here samples
`prompts_per_step` prompts and makes `updates` optimizer steps of them, so that a run has pool // prompts_per_step x episodes steps,
and `updates` times as many optimizer steps: the same number where prompts_per_step divides the pool.
"""

from __future__ import annotations

from nmoe.config.commands import RLConfig
from nmoe.envs.pools import build_pool
from nmoe.errors import UserError


def steps_of(episodes: float, problems: int, prompts_per_step: int) -> int:
    """Returns the number of steps that make `episodes` passes over a pool of `problems`, at least 1: `steps_of(20, 400, 16)` is
    500."""
    return max(1, int(problems // prompts_per_step * episodes))


def with_steps_of_episodes(config: RLConfig, problems: int | None = None) -> RLConfig:
    """Returns the configuration with `run.steps` in place of `run.episodes`, for a pool of `problems` (None: read and counted
    here). A configuration without episodes is returned unchanged.

    Raises UserError for a pool that cannot be read or is endless, and for a critic whose warm-up leaves no step for the policy.
    """
    episodes = config.run.episodes
    if episodes is None:
        return config
    environment = config.environment
    if problems is None:
        problems = build_pool(environment.env_id, environment.task_pool).size
    if problems is None:
        raise UserError(
            f"run.episodes = {episodes:g}: the task pool of {environment.env_id!r} has no end; give run.steps, or max_examples of "
            "the pool"
        )
    steps = steps_of(episodes, problems, config.batch.prompts_per_step)
    if config.critic is not None and config.critic.warmup_steps >= steps:
        raise UserError(
            f"critic.warmup_steps = {config.critic.warmup_steps}: leaves no step for the policy (run.episodes = {episodes:g} are "
            f"{steps} steps)"
        )
    return config.model_copy(update={"run": config.run.model_copy(update={"steps": steps, "episodes": None})})
