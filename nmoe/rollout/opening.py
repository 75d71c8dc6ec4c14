"""Opens the episodes of a group whose environment runs beside the policy: one for each sample, all asked the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from nmoe.envs.environment import Environment
from nmoe.envs.tasks import TASKS
from nmoe.envs.tasks.live import EnvironmentLostError, Live, LiveTask
from nmoe.envs.tasks.own import TaskError
from nmoe.runs.waiting import all_or_none
from nmoe.types import Problem

Opened = Live | EnvironmentLostError | None
"""The episode of a sample, why it could not be opened, or None without episodes of the task."""


@asynccontextmanager
async def opened(
    environment: Environment, problem: Problem, samples: int, seed: int
) -> AsyncIterator[tuple[Problem, list[Opened]]]:
    """Opens an episode for each sample, with one seed, and yields the problem as they ask it. At the end, the ones that are
    still open are closed, all at once.

    Where none could be opened, the problem is as it was. Raises TaskError if an episode cannot be opened by its own mistake, or if
    two ask different questions: the rewards of a group are compared.
    """
    task = TASKS[problem.task_type]
    if not isinstance(task, LiveTask):
        yield problem, [None] * samples
        return
    begun: list[Live] = []
    try:

        async def one() -> tuple[Problem | None, Opened]:
            live = task.begin(environment.budget.wall_s)
            begun.append(live)
            try:
                return await live.open(problem, seed), live
            except EnvironmentLostError as error:
                return None, error

        asked = await all_or_none([one() for _ in range(samples)])
        questions = [question for question, _ in asked if question is not None]
        for question in questions:
            if question != questions[0]:
                raise TaskError(
                    f"task {problem.task_type}: two episodes, opened with the same record and the seed {seed}, ask differently: "
                    f"{questions[0].question!r} and {question.question!r}; a group's samples answer one question"
                )
        yield questions[0] if questions else problem, [live for _, live in asked]
    finally:
        await asyncio.gather(*map(_released, begun))


async def _released(live: Live) -> None:
    """Closes an episode that was not closed in its time. The error that ended the group counts, not one of closing."""
    with suppress(Exception):
        await live.close()
