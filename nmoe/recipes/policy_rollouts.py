"""What one policy-gradient step samples: graded groups, of which those that teach nothing are replaced a bounded number of times
(dynamic sampling, DAPO, arXiv:2503.14476, section 3.2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from nmoe.config.run import RLConfig
from nmoe.errors import InfrastructureError
from nmoe.rl.environment import Environment
from nmoe.rl.failures import Failure
from nmoe.rl.rollout.collector import Collector, GradingError, RolloutSettings
from nmoe.rl.rollout.recorder import ReplayRecorder
from nmoe.rl.rollout.trajectory import Group, Trajectory
from nmoe.rl.trainer_state import TrainerState
from nmoe.runs.directory import RunDirectory
from nmoe.text.tokenizer import Tokenizer


@dataclass
class Rollouts:
    """What one step sampled: every group, those worth training on, and how long it took."""

    groups: list[Group] = field(default_factory=list)
    kept: list[Group] = field(default_factory=list)
    rollout_s: float = 0.0
    grade_s: float = 0.0
    refills: int = 0
    left_out: int = 0

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    def metrics(self) -> dict[str, float]:
        """How many groups were sampled and dropped."""
        return {
            "groups": len(self.groups),
            "groups_zero_variance": len(self.groups) - len(self.kept),
            "refills": self.refills,
            "problems_left_out": self.left_out,
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
        self._settings = RolloutSettings(
            samples=config.batch.group_size,
            max_new_tokens=config.sampling.max_new_tokens,
            temperature=config.sampling.temperature,
            top_p=config.sampling.top_p,
            top_k=config.sampling.top_k,
        )

    def sample(self, step: int) -> Rollouts:
        """Groups for one step. Those without variance are replaced by fresh prompts, at most `max_refills` times.

        Raises GradingError with its sample saved, and InfrastructureError where every sample was lost."""
        config, pool, rollouts = self._config, self._environment.pool, Rollouts()
        passed_over = pool.passed_over
        settings = replace(self._settings, state=TrainerState(step - 1, config.run.steps))
        for refill in range(config.batch.max_refills + 1):
            missing = config.batch.prompts_per_step - len(rollouts.kept)
            if missing == 0:
                break
            try:
                collected = self._collector.collect(
                    pool.take(missing), settings, (config.run.seed, "train", step, refill)
                )
            except GradingError as error:
                self._record_failure(step, error.trajectory)
                self._replays.write(step, [error.trajectory])
                raise
            rollouts.groups += collected.groups
            rollouts.kept += [group for group in collected.groups if group.informative]
            rollouts.rollout_s += collected.rollout_s
            rollouts.grade_s += collected.grade_s
            rollouts.refills = refill
        rollouts.left_out = pool.passed_over - passed_over
        self._record_failures(step, rollouts.trajectories)
        return rollouts

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
