"""What one policy-gradient step samples: graded groups, of which those that teach nothing are replaced a bounded number of times
(dynamic sampling, DAPO, arXiv:2503.14476, section 3.2).

A group teaches nothing where its rewards are all alike, if samples are compared within groups; where its solve rate lies outside
`batch.solve_rate`, it is not what the run wants to train on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from nmoe.config.commands.rl import RLConfig
from nmoe.envs.environment import Environment
from nmoe.errors import InfrastructureError
from nmoe.rl.focus import Focus
from nmoe.rl.rewards import differs, solve_rate
from nmoe.rollout.collector import Collector, GradingError, RolloutSettings
from nmoe.rollout.recorder import ReplayRecorder
from nmoe.runs.directory import RunDirectory
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Failure, Group, TrainerState, Trajectory


@dataclass
class Rollouts:
    """What one step sampled: every group; those to train on, and why the others are not; and how long it took."""

    groups: list[Group] = field(default_factory=list)
    kept: list[Group] = field(default_factory=list)
    zero_variance: int = 0
    outside_solve_rate: int = 0
    surplus: int = 0
    rollout_s: float = 0.0
    grade_s: float = 0.0
    refills: int = 0
    left_out: int = 0
    focus: dict[str, float] = field(default_factory=dict)

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    def why_nothing(self) -> str:
        """Why there was nothing to train on."""
        if self.kept:
            return "every sample of the groups was cut at the token limit, and those are masked"
        if self.outside_solve_rate:
            return f"every one of {len(self.groups)} groups had rewards all alike or lies outside batch.solve_rate"
        return f"every one of {len(self.groups)} groups had rewards all alike"

    def metrics(self) -> dict[str, float]:
        """How many groups were sampled and dropped."""
        return {
            "groups": len(self.groups),
            "groups_zero_variance": self.zero_variance,
            "groups_outside_solve_rate": self.outside_solve_rate,
            "groups_surplus": self.surplus,
            "refills": self.refills,
            "problems_left_out": self.left_out,
            **self.focus,
        }


class RolloutSampler:
    """Takes problems from the environment's pool, has them sampled and graded, and records what failed."""

    def __init__(
        self,
        config: RLConfig,
        run: RunDirectory,
        tokenizer: Tokenizer,
        environment: Environment,
        collector: Collector,
        replays: ReplayRecorder,
    ) -> None:
        self._config, self._run, self._tokenizer = config, run, tokenizer
        self._environment, self._collector, self._replays = environment, collector, replays
        self.focus = Focus(config.run.seed) if config.batch.favour_unsolved else None
        self._token_limit = environment.token_limit(config.sampling.max_new_tokens)
        self._settings = RolloutSettings(
            samples=config.batch.group_size,
            max_new_tokens=config.sampling.max_new_tokens,
            temperature=config.sampling.temperature,
            top_p=config.sampling.top_p,
            top_k=config.sampling.top_k,
        )

    def sample(self, step: int) -> Rollouts:
        """Groups for one step. Those not to train on are replaced by fresh prompts, at most `max_refills` times.

        Raises GradingError with its sample saved, and InfrastructureError where every sample was lost."""
        config, pool, rollouts = self._config, self._environment.pool, Rollouts()
        passed_over = pool.passed_over
        settings = replace(self._settings, state=TrainerState(step - 1, config.run.steps))
        for refill in range(config.batch.max_refills + 1):
            missing = config.batch.prompts_per_step - len(rollouts.kept)
            if missing == 0:
                break
            wanted = math.ceil(missing * config.batch.oversampling)
            drawn = pool.draw(wanted) if self.focus is None else pool.draw(wanted, self.focus.admits)
            positions, problems = zip(*drawn, strict=True)
            try:
                collected = self._collector.collect(problems, settings, (config.run.seed, "train"), positions)
            except GradingError as error:
                self._record_failure(step, error.trajectory)
                self._replays.write(step, [error.trajectory])
                raise
            rollouts.groups += collected.groups
            for group in collected.groups:
                self._sort(group, rollouts)
            rollouts.rollout_s += collected.rollout_s
            rollouts.grade_s += collected.grade_s
            rollouts.refills = refill
        rollouts.left_out = pool.passed_over - passed_over
        if self.focus is not None:
            self.focus.observe(rollouts.groups)
            rollouts.focus = dict(self.focus.metrics())
        self._record_failures(step, rollouts.trajectories)
        return rollouts

    def _sort(self, group: Group, rollouts: Rollouts) -> None:
        """Keeps a group, or counts why it is not kept."""
        algorithm, batch = self._config.algorithm, self._config.batch
        lowest, highest = batch.solve_rate
        # Of a teacher any group has something to learn.
        compared = algorithm.in_groups and self._config.distillation is None
        if not group.trainable or (compared and not differs(group, algorithm, self._token_limit)):
            rollouts.zero_variance += 1
        elif not lowest <= solve_rate(group) <= highest:
            rollouts.outside_solve_rate += 1
        elif len(rollouts.kept) == batch.prompts_per_step:
            rollouts.surplus += 1
        else:
            rollouts.kept.append(group)

    def _record_failures(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """What the infrastructure lost, the first trajectory with each failure of its own or of a call, and the step's replay
        bundles. Raises InfrastructureError where everything was lost."""
        lost = [trajectory for trajectory in trajectories if not trajectory.trainable]
        seen: set[Failure] = {"ok"}
        for trajectory in trajectories:
            failures = {trajectory.grade.failure, *(event.failure for event in trajectory.tool_events)}
            if not trajectory.trainable or not failures <= seen:
                self._record_failure(step, trajectory)
            seen |= failures
        self._replays.write(step, trajectories)
        if len(lost) == len(trajectories):
            counts = Counter(trajectory.grade.failure for trajectory in lost)
            raise InfrastructureError(
                f"step {step}: every sample was lost to the infrastructure, none to the policy: "
                + ", ".join(f"{count} {name}" for name, count in counts.most_common())
                + f"; the reasons are in {self._run.path / 'failures.jsonl'}"
            )

    def _record_failure(self, step: int, trajectory: Trajectory) -> None:
        self._run.ledger.failure(trajectory.record(step, self._tokenizer.decode(trajectory.token_ids)))
