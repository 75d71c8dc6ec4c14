"""Plays given answers in an environment, as a policy would give them: for `nmoe env certify`, without an engine."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from nmoe.envs.attacks.texts import Form
from nmoe.envs.environment import Environment
from nmoe.envs.tasks import TASKS
from nmoe.envs.tasks.conversation import ConversationTask
from nmoe.envs.tasks.live import LiveTask
from nmoe.envs.tasks.task import SandboxTask, WorkspaceTask
from nmoe.envs.tools.session import ToolSession
from nmoe.sandbox.api import OpensSandboxes
from nmoe.types import INFRASTRUCTURE, Exchange, Grade, Problem, Turn, single_turn

# Turns of a conversation in which one answer is given again and again.
_MOST_TURNS = 8
# After this time a grader hangs.
GRADE_S = 60.0
NOTHING_SAID = "I do not know."


@dataclass(frozen=True)
class Played:
    """An answer after grading: its grade, or the exception that the task raised, and the seconds that grading took."""

    grade: Grade | None
    raised: str
    seconds: float

    @property
    def right(self) -> bool:
        """Whether the answer was graded correct."""
        return self.grade is not None and self.grade.verdict is not None and self.grade.verdict.outcome == "correct"

    @property
    def answered(self) -> bool:
        """Whether a grader was asked, and gave a verdict or raised."""
        return self.grade is None or self.grade.verdict is not None

    @property
    def lost(self) -> bool:
        """Whether the infrastructure failed, so that a run would mask the sample."""
        return self.grade is not None and self.grade.failure in INFRASTRUCTURE

    @property
    def score(self) -> float:
        return 0.0 if self.grade is None or self.grade.verdict is None else self.grade.verdict.score

    @property
    def said(self) -> str:
        """The verdict in words."""
        if self.grade is None:
            return self.raised
        verdict = self.grade.verdict
        if verdict is None:
            return f"not compared ({self.grade.failure})"
        return f"{verdict.outcome}, score {verdict.score:g} ({verdict.layer}: {verdict.reason})"


class Player:
    """Plays answers in an environment. `sandboxes` verifies code and holds workspaces."""

    def __init__(self, environment: Environment, sandboxes: OpensSandboxes | None) -> None:
        self._environment, self._sandboxes = environment, sandboxes

    async def play(self, problem: Problem, text: str, form: Form) -> Played:
        """Grades a text as the answer to a problem. A conversation is given it in every turn."""
        began = time.perf_counter()
        try:
            async with asyncio.timeout(GRADE_S):
                grade = await self._grade(problem, text, form)
        except TimeoutError:
            return Played(None, f"no verdict within {GRADE_S:g} s", time.perf_counter() - began)
        except Exception as error:  # of the task, which may be the user's
            return Played(None, f"raised {type(error).__name__}: {error}", time.perf_counter() - began)
        return Played(grade, "", time.perf_counter() - began)

    async def _grade(self, problem: Problem, text: str, form: Form) -> Grade:
        environment, task = self._environment, TASKS[problem.task_type]
        ids = self._ids(problem, text, form)
        turns = single_turn(ids)
        exchanges: list[Exchange] = []
        if isinstance(task, LiveTask):
            live = task.begin(environment.budget.wall_s)
            try:
                problem = await live.open(problem, 0)
                while (said := environment.to_answer(problem, turns, exchanges)) is not None:
                    exchanges.append(await live.step(said, len(turns) - 1))
                    if exchanges[-1].user is None or len(turns) == _MOST_TURNS:
                        break
                    turns = (*turns, *single_turn(ids))
            finally:
                await live.close()
        elif isinstance(task, ConversationTask):
            while (exchange := environment.respond(problem, 0, 0, turns, exchanges)) is not None:
                exchanges.append(exchange)
                if exchange.user is None or len(turns) == _MOST_TURNS:
                    break
                turns = (*turns, *single_turn(ids))
        return await self._graded(problem, turns, exchanges, text if form == "script" else None)

    async def _graded(
        self, problem: Problem, turns: tuple[Turn, ...], exchanges: list[Exchange], script: str | None
    ) -> Grade:
        task = TASKS[problem.task_type]
        wants = isinstance(task, SandboxTask) or script is not None
        files = task.files(problem) if script is not None and isinstance(task, WorkspaceTask) else None
        access = self._environment.access if script is not None else None
        async with ToolSession(self._sandboxes if wants else None, files=files, access=access) as session:
            if script is not None:
                await (await session.sandbox()).bash(script)
            tokens = sum(len(turn.sample.token_ids) for turn in turns)
            return await self._environment.grader.grade(
                problem, turns, tokens, session=session, exchanges=tuple(exchanges)
            )

    def _ids(self, problem: Problem, text: str, form: Form) -> list[int]:
        grader, renderer = self._environment.grader, self._environment.renderer
        if form == "answer":
            return grader.answer_ids(problem, text)
        if form == "message":
            return renderer.completion_ids("The answer follows." if renderer.has_reasoning else "", text)
        return renderer.completion_ids(text if form == "reasoning" else "", NOTHING_SAID)
