"""The collector: sends problems to the engine as concurrent coroutines and grades what comes back, group by group."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from nmoe.engine.api import Engine, Request, Sampling
from nmoe.rl.environment import Environment
from nmoe.rl.problem import Problem
from nmoe.rl.rollout.trajectory import Group, Trajectory
from nmoe.rl.turn import Turn


class GradingError(Exception):
    """A grader raised, on the trajectory whose turns this holds. The run stops; an exception never becomes reward 0."""

    def __init__(self, problem: Problem, turns: Sequence[Turn]) -> None:
        super().__init__(f"grading a sample of problem {problem.id} raised an exception")
        self.problem = problem
        self.turns = turns


@dataclass(frozen=True)
class RolloutSettings:
    """How a batch of problems is sampled: `samples` per problem, at most `max_new_tokens` each."""

    samples: int
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass
class Collected:
    """Groups in the order of their problems. Grading runs while the engine samples on, so that `grade_s` is part of
    `rollout_s`, both in seconds."""

    groups: list[Group]
    rollout_s: float
    grade_s: float


def request_seed(*key: str | int) -> int:
    """A 64-bit seed that is a pure function of its key, such as (run seed, "train", step, round, place in the batch)."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little")


class Collector:
    """Samples and grades problems of one environment with one engine."""

    def __init__(self, engine: Engine, environment: Environment, context_tokens: int) -> None:
        self._engine = engine
        self._environment = environment
        self._context_tokens = context_tokens
        self._grade_s = 0.0

    def collect(self, problems: Sequence[Problem], settings: RolloutSettings, key: tuple[str | int, ...]) -> Collected:
        """Groups for all problems. `key` names the batch: seeds derive from it and a problem's place, nothing else.

        Raises UserError for a prompt that does not fit the context, GradingError where a grader raises.
        """
        began, self._grade_s = time.perf_counter(), 0.0
        groups = self._engine.run(self._collect(problems, settings, key))
        return Collected(groups, time.perf_counter() - began, self._grade_s)

    async def _collect(
        self, problems: Sequence[Problem], settings: RolloutSettings, key: tuple[str | int, ...]
    ) -> list[Group]:
        return await asyncio.gather(
            *(
                self._group(problem, settings, request_seed(*key, place), f"{key}/{place}")
                for place, problem in enumerate(problems)
            )
        )

    async def _group(self, problem: Problem, settings: RolloutSettings, seed: int, request_id: str) -> Group:
        prompt_ids = self._environment.check_prompt(problem, self._context_tokens, settings.max_new_tokens)
        sampling = Sampling(
            max_new_tokens=self._environment.token_limit(settings.max_new_tokens),
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            stop_ids=self._environment.stop_ids,
            seed=seed,
        )
        trajectories: dict[int, Trajectory] = {}
        async for index, sample in self._engine.samples(Request(prompt_ids, settings.samples, sampling, request_id)):
            began = time.perf_counter()
            turns = (Turn((), sample),)
            try:
                grade = await self._environment.grade(problem, turns, settings.max_new_tokens)
            except Exception as error:
                raise GradingError(problem, turns) from error
            self._grade_s += time.perf_counter() - began
            trajectories[index] = Trajectory(
                problem, index, prompt_ids, turns, grade, sampling, environment=self._environment.identity
            )
        return Group(problem, [trajectories[index] for index in range(settings.samples)])
