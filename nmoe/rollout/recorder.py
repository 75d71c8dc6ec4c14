"""Records the failed trajectories of a run, and selects those that become replay bundles: a random fraction, and the first few of
each failure class per step."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nmoe.envs.environment import Environment
from nmoe.envs.pools.pool import stable_hash
from nmoe.errors import InfrastructureError
from nmoe.rollout.bundle import write_bundle
from nmoe.runs.directory import RunDirectory
from nmoe.runs.storage import step_name, whole_directory
from nmoe.text.tokenizer import Tokenizer
from nmoe.trajectory import Trajectory
from nmoe.types import Failure

TOKENIZER = "tokenizer"
SAMPLED = "sampled"


class ReplayRecorder:
    """Writes replay bundles of a run's trajectories to its directory `replay/`.

    Per step, the first `per_failure` trajectories with each failure are kept. Any other trajectory is kept if a hash of seed, step,
    problem and sample falls below `sample_rate`, so that a resumed run picks the same ones.
    """

    def __init__(
        self,
        directory: Path,
        environment: Environment,
        tokenizer: Tokenizer,
        *,
        seed: int,
        sample_rate: float,
        per_failure: int,
        sandbox: Mapping[str, Any] | None = None,
    ) -> None:
        """`sandbox` says where tools ran: {"settings": the table [sandbox], "in_force": the output of `Sandboxes.describe()`}."""
        self._directory = directory
        self._environment = environment
        self._tokenizer = tokenizer
        self._seed = seed
        self._sample_rate = sample_rate
        self._per_failure = per_failure
        self._sandbox = sandbox

    def write(self, step: int, trajectories: Iterable[Trajectory]) -> list[Path]:
        """Writes bundles of the selected trajectories of a step and returns their paths. Raises StorageError."""
        return [self._write(step, trajectory, reason) for trajectory, reason in self._picked(step, trajectories)]

    def keep(self, step: int, trajectory: Trajectory, reason: str) -> Path:
        """Writes the bundle of one trajectory, marked with the caller's reason, and returns its path. Raises StorageError."""
        return self._write(step, trajectory, reason)

    def sampled(self, step: int, trajectory: Trajectory) -> bool:
        """Whether a hash selects this trajectory for the random fraction that is kept."""
        key = ("replay", self._seed, step, trajectory.problem.id, trajectory.index)
        return stable_hash(*key) < self._sample_rate * 2**64

    def _picked(self, step: int, trajectories: Iterable[Trajectory]) -> Iterator[tuple[Trajectory, str]]:
        kept: Counter[str] = Counter()
        for trajectory in trajectories:
            failure = trajectory.grade.failure
            if failure != "ok" and kept[failure] < self._per_failure:
                kept[failure] += 1
                yield trajectory, failure
            elif self.sampled(step, trajectory):
                yield trajectory, SAMPLED

    def _write(self, step: int, trajectory: Trajectory, reason: str) -> Path:
        problem = re.sub(r"[^\w.=+-]", "_", trajectory.problem.id)
        # A small pool may yield a problem twice in one step; its groups differ in their seeds.
        name = f"{step_name(step)}-{reason}-{problem}-{trajectory.index}-{trajectory.seed & 0xFFFF:04x}"
        path = self._directory / name
        record = trajectory.record(step, self._tokenizer.decode(trajectory.token_ids))
        content = {
            "reason": reason,
            "trajectory": record,
            "transcript": [self._environment.renderer.transcript(turn.said_ids) for turn in trajectory.turns],
            "settings": self._environment.settings.model_dump(mode="json"),
            "tokenizer": self._tokenizer.fingerprint,
            "sandbox": None if self._sandbox is None else dict(self._sandbox),
        }
        self._save_tokenizer()
        write_bundle(path, content, trajectory.routes)
        return path

    def _save_tokenizer(self) -> None:
        directory = self._directory / TOKENIZER
        if not directory.exists():
            with whole_directory(directory, "choose another --run.directory") as partial:
                self._tokenizer.save(partial)


class FailureRecords:
    """Records the failed trajectories of a run in failures.jsonl, and writes replay bundles."""

    def __init__(self, run: RunDirectory, tokenizer: Tokenizer, replays: ReplayRecorder) -> None:
        self._run, self._tokenizer, self._replays = run, tokenizer, replays

    def write(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Records every trajectory lost to the infrastructure, and the first one with each other failure (of its grade or of a tool
        call); writes the step's replay bundles, too.
        """
        seen: set[Failure] = {"ok"}
        for trajectory in trajectories:
            failures = {trajectory.grade.failure, *(event.failure for event in trajectory.tool_events)}
            if not trajectory.trainable or not failures <= seen:
                self._run.ledger.failure(trajectory.record(step, self._tokenizer.decode(trajectory.token_ids)))
            seen |= failures
        self._replays.write(step, trajectories)

    def refuse_total_loss(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Raises InfrastructureError if every trajectory of the step was lost to the infrastructure."""
        if any(trajectory.trainable for trajectory in trajectories):
            return
        counts = Counter(trajectory.grade.failure for trajectory in trajectories)
        reasons = Counter(trajectory.grade.reason for trajectory in trajectories if trajectory.grade.reason)
        why = "".join(f" ({reason})" for reason, _ in reasons.most_common(1))
        raise InfrastructureError(
            f"step {step}: every sample was lost to the infrastructure, none to the policy: "
            + ", ".join(f"{count} {name}" for name, count in counts.most_common())
            + f"{why}; the reasons are in {self._run.path / 'failures.jsonl'}"
        )
