"""What a task is: it shows a problem to the policy and decides whether an attempt at it is correct."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from nmoe.rl.grading.verdict import Verdict
from nmoe.rl.problem import Problem
from nmoe.rl.tools.event import ToolEvent
from nmoe.text.harmony import Message

if TYPE_CHECKING:
    from nmoe.rl.sandbox.api import Sandbox


@dataclass(frozen=True)
class Attempt:
    """What a trajectory comes to: its answer and, where it used tools, the sandbox it worked in, still open, with the
    workspace as it was left, and every call."""

    answer: str
    sandbox: Sandbox | None = None
    tool_events: Sequence[ToolEvent] = ()


class Task(Protocol):
    """One kind of verifiable problem.

    `bare_final`: in a Harmony completion the final message, whole, is the answer. Otherwise a box or, in prose, the last
    number of the final message is (`nmoe.rl.grading.extraction`).
    """

    @property
    def bare_final(self) -> bool: ...

    def check_gold(self, problem: Problem) -> None:
        """Raises UserError for a gold answer that `verify` can not compare with; called when a pool loads."""

    def messages(self, problem: Problem) -> list[Message]:
        """The conversation shown to the policy; the environment puts its system message before it."""

    def example_answers(self, problem: Problem) -> tuple[str, str]:
        """A right answer and one that is wrong by little, as a policy would give them: `nmoe env check` grades both."""

    async def verify(self, problem: Problem, attempt: Attempt) -> Verdict:
        """Whether the attempt is right. Total: any answer, however long or strange, gets a verdict, and in bounded time. What it
        raises is a defect of the task and stops the run."""


class GeneratedTask(Task, Protocol):
    """A task that can make its own problems."""

    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        """A question and its gold answer; `difficulty` >= 1. Depends on nothing but the arguments."""

    def split_key(self, question: str) -> str:
        """What decides the split a question belongs to: questions that answer one another share it."""


class QuestionTask:
    """The conversation that all tasks here share: the question, as one user message."""

    def messages(self, problem: Problem) -> list[Message]:
        return [Message("user", problem.question)]

    def split_key(self, question: str) -> str:
        return question
