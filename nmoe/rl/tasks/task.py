"""What a task is: it shows a problem to the policy and decides whether an answer is correct."""

from __future__ import annotations

import random
from typing import Protocol

from nmoe.rl.problem import Problem
from nmoe.text.harmony import Message


class Task(Protocol):
    """One kind of verifiable problem.

    `bare_final`: in a Harmony completion the final message, whole, is the answer. Otherwise a box or, in prose, the last
    number of the final message is (`nmoe.rl.grading.extraction`).
    """

    @property
    def bare_final(self) -> bool: ...

    def check_gold(self, problem: Problem) -> None:
        """Raises UserError for a gold answer that `correct` can not compare with; called when a pool loads."""

    def messages(self, problem: Problem) -> list[Message]:
        """The conversation shown to the policy; the environment puts its system message before it."""

    def correct(self, problem: Problem, answer: str) -> bool:
        """Whether the answer is right. Total: any string, however long or strange, gets a verdict, and quickly."""


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
