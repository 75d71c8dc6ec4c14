"""Majority vote over the samples of a problem: self-consistency (Wang et al. 2022, arXiv:2203.11171, section 2)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from nmoe.envs.tasks import TASKS
from nmoe.types import Group


def majorities(groups: Sequence[Group]) -> list[int]:
    """For each group the place of the first sample that gives the answer most samples give, of several such the one given first; 0
    where no sample answers. Two answers are one where the problem's task says so: `0.5`, `1/2` and `\\frac12` have three votes."""

    async def everything() -> list[int]:
        return list(await asyncio.gather(*map(_majority, groups)))

    return asyncio.run(everything())


async def _majority(group: Group) -> int:
    task, problem = TASKS[group.problem.task_type], group.problem
    votes: dict[int, int] = {}
    answers = [trajectory.grade.answer for trajectory in group.trajectories]
    for place, answer in enumerate(answers):
        if answer is None:
            continue
        for first in votes:
            known = answers[first]
            assert known is not None, "only an answer has votes"
            if await task.same(problem, known, answer):
                votes[first] += 1
                break
        else:
            votes[place] = 1
    return max(votes, key=votes.__getitem__) if votes else 0
