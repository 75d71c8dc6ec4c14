"""What a rollout yields: a problem, the tokens sampled for it, and their grade; and the group that one prompt gave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nmoe.engine.api import Sample
from nmoe.rl.failures import INFRASTRUCTURE
from nmoe.rl.grading.grade import Grade
from nmoe.rl.problem import Problem


@dataclass(frozen=True)
class Trajectory:
    """One sample of one prompt. Tokens are the record; text is only ever decoded from them."""

    problem: Problem
    index: int
    seed: int
    prompt_ids: tuple[int, ...]
    sample: Sample
    grade: Grade

    @property
    def trainable(self) -> bool:
        """Whether what the policy wrote was judged at all: a failure of the infrastructure is no verdict on it."""
        return self.grade.failure not in INFRASTRUCTURE

    def record(self, step: int, text: str) -> dict[str, Any]:
        """A JSON-able line for samples/ and failures.jsonl, with everything needed to sample it again."""
        return {
            "step": step,
            "problem": self.problem.id,
            "question": self.problem.question,
            "gold": self.problem.gold,
            "index": self.index,
            "seed": self.seed,
            "prompt_ids": list(self.prompt_ids),
            "token_ids": self.sample.token_ids,
            "logprobs": self.sample.logprobs,
            "versions": self.sample.versions,
            "text": text,
            "finish_reason": self.sample.finish_reason,
            "failure": self.grade.failure,
            "reward": self.grade.score,
            "components": self.grade.components,
            "answer": self.grade.answer,
        }


@dataclass(frozen=True)
class Group:
    """The samples of one prompt, compared with one another."""

    problem: Problem
    trajectories: list[Trajectory]

    @property
    def trainable(self) -> list[Trajectory]:
        return [trajectory for trajectory in self.trajectories if trajectory.trainable]

    @property
    def informative(self) -> bool:
        """Whether rewards differ within the group: otherwise every advantage is zero and there is nothing to learn."""
        rewards = [trajectory.grade.score for trajectory in self.trainable]
        return len(rewards) > 1 and max(rewards) - min(rewards) > 1e-9
