"""The outcome of a problem in an evaluation: which of its sampled answers are right, and which is the majority's answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nmoe.envs.pools.pool import stable_hash
from nmoe.envs.tasks import TASKS
from nmoe.runs.waiting import wait_for
from nmoe.trajectory import Group, Trajectory
from nmoe.types import Problem


@dataclass(frozen=True)
class Outcome:
    """The outcome of one problem: `Outcome("5f2c01d9a7b3e846", "gsm8k", (), correct=(True, False, True), voted=0)`.

    key: identifies the question, equally in every run and process.
    source: the name of the problem's data set or task.
    groups: labels such as "level=Level 5".
    correct: whether each sample is right.
    voted: the index of a sample with the majority's answer.
    scores: the scorer's score of each sample, if there is a scorer.
    failures: how each sample ended, "ok" or a class of failure.
    """

    key: str
    source: str
    groups: tuple[str, ...]
    correct: tuple[bool, ...]
    voted: int
    scores: tuple[float, ...] = ()
    failures: tuple[str, ...] = ()


def outcomes_of(groups: Sequence[Group]) -> list[Outcome]:
    """Returns the outcome of each graded group, in order."""
    voted = majorities(groups) if groups and len(groups[0].trajectories) > 1 else [0] * len(groups)
    return [
        Outcome(
            key_of(group.problem),
            group.problem.source,
            tuple(group.problem.groups),
            tuple(map(is_correct, group.trajectories)),
            vote,
            failures=tuple(trajectory.grade.failure for trajectory in group.trajectories),
        )
        for group, vote in zip(groups, voted, strict=True)
    ]


def answers_of(group: Group) -> dict[str, Any]:
    """Returns a problem with its sampled answers, as a JSON record."""
    return {
        "id": group.problem.id,
        "question": group.problem.question,
        "gold": group.problem.gold,
        "answers": [trajectory.grade.answer for trajectory in group.trajectories],
        "failures": [trajectory.grade.failure for trajectory in group.trajectories],
    }


def is_correct(trajectory: Trajectory) -> bool:
    """Returns whether the grader judged the answer of the trajectory correct."""
    return trajectory.grade.extras["correctness"] == 1


def identity_of(problem: Problem) -> tuple[object, ...]:
    """Returns a tuple that is equal for two problems if and only if they are the same problem.

    It contains the conversation before the question, and the initial state of an episode, because equal questions can
    differ in either. The text is not normalised: questions that differ only in case may have different answers.
    """
    return problem.task_type, problem.question, problem.metadata.get("state"), *problem.history


def key_of(problem: Problem) -> str:
    """Returns the identity of a problem as 16 hexadecimal digits, the same in every process."""
    return f"{stable_hash(*identity_of(problem)):016x}"


def majorities(groups: Sequence[Group]) -> list[int]:
    r"""Returns for each group the index of the first sample with the most frequent answer (the majority vote).

    The method is self-consistency (Wang et al. 2022, arXiv:2203.11171, section 2). Of equally frequent answers, the
    first given wins; without any answer the index is 0. The problem's task decides which answers are equal: `0.5`,
    `1/2` and `\frac12` are three votes for one.
    """

    async def everything() -> list[int]:
        return list(await asyncio.gather(*map(_majority, groups)))

    return wait_for(everything())


async def _majority(group: Group) -> int:
    task, problem = TASKS[group.problem.task_type], group.problem
    votes: dict[int, int] = {}
    answers = [trajectory.grade.answer for trajectory in group.trajectories]
    for index, answer in enumerate(answers):
        if answer is None:
            continue
        for first in votes:
            known = answers[first]
            assert known is not None, "only an answer has votes"
            if await task.same(problem, known, answer):
                votes[first] += 1
                break
        else:
            votes[index] = 1
    return max(votes, key=votes.__getitem__) if votes else 0
