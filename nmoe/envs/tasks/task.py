"""The base classes of tasks: a task asks the policy a question and decides whether an attempt at it is correct."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from nmoe.types import GROUPS, Exchange, Message, Metadata, Problem, ToolEvent, Verdict

if TYPE_CHECKING:
    from nmoe.sandbox.api import OpensSandboxes, Sandbox

Posed = tuple[str, str, Metadata]
"""Question, gold and metadata of a problem."""


@dataclass(frozen=True)
class Attempt:
    """The result of a trajectory, as a task verifies it: the policy's answer and, if it used tools, its calls with their results.

    `sandbox` is the one that the tools worked in, still open, with the workspace as the policy left it. `exchanges` are a
    conversation task's responses.
    """

    answer: str
    sandbox: Sandbox | None = None
    tool_events: Sequence[ToolEvent] = ()
    sandboxes: OpensSandboxes | None = None
    exchanges: Sequence[Exchange] = ()

    @property
    def opens_sandboxes(self) -> OpensSandboxes:
        """The factory of further sandboxes for the verifier of a `SandboxTask`."""
        assert self.sandboxes is not None, "an attempt at a SandboxTask has `sandboxes`"
        return self.sandboxes


AnswerForm = Literal["boxed", "final", "whole"]
"""Where the answer of a completion stands.

boxed   in the last box or, without one, in the last number of the text; a final message that is not prose is the answer as a whole
final   the whole final message; in plain text, which has none, as `boxed`
whole   the whole final message and, in plain text without a box, the whole text
"""


class QuestionTask(ABC):
    """The base of all tasks: the question is one user message, and an answer is right or wrong.

    `nmoe.Task` is the short form for users. A task with more abilities has one of the classes below as a base, too.
    """

    answer_form: AnswerForm
    record_fields: tuple[str, ...] = ()
    """Optional fields that are read from a record besides question and gold."""
    gold_types: tuple[type, ...] = (str,)
    """Permitted types of a record's gold."""
    one_answer: bool = True
    """Whether a problem has one right answer, in one form or another. Where it has several, an answer that differs from the gold
    may be right."""
    reads_message: bool = False
    """Whether the answer is looked for among the words of a message, so that words around it are no part of it."""

    def pose(self, question: str, gold: str, record: Mapping[str, Any]) -> Posed:
        """Returns question, gold and metadata of a dataset's record. Raises UserError for an invalid record."""
        return question, gold, {}

    @abstractmethod
    def check_gold(self, problem: Problem) -> None:
        """Raises UserError for a gold answer with which `verify` cannot compare answers; called for every record's problem when a
        pool loads.
        """

    def messages(self, problem: Problem) -> list[Message]:
        """Returns the conversation shown to the policy, to which the environment adds its system message."""
        return [Message("user", problem.question)]

    @abstractmethod
    def example_answers(self, problem: Problem) -> tuple[str, str]:
        """Returns a right answer and a slightly wrong answer, in the form that a policy would write; `nmoe env check` grades
        both.
        """

    def has_one_answer(self, problem: Problem) -> bool:
        """Returns whether this problem has one right answer."""
        return self.one_answer

    def knows_answer(self, problem: Problem) -> bool:
        """Returns whether the first of `example_answers` is right: some records have tests and no solution."""
        return True

    @abstractmethod
    async def verify(self, problem: Problem, attempt: Attempt) -> Verdict:
        """Decides whether the attempt is right. Any answer, however long or strange, gets a verdict in bounded time.

        An exception is a bug in the task and stops the run.
        """

    async def same(self, problem: Problem, one: str, other: str) -> bool:
        """Returns whether two answers to a problem, right or wrong, count as equal in a vote among samples.

        Accepts any answers, as `verify`. Raises InfrastructureError if a comparison was lost, which is not a verdict.
        """
        return one.strip() == other.strip()


class GeneratedTask:
    """A task that generates problems: it defines `generate` or, for problems with metadata, `pose_new`."""

    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        """Generates a question and its gold answer; `difficulty` >= 1. Depends only on the arguments."""
        raise NotImplementedError

    def pose_new(self, rng: random.Random, difficulty: int) -> Posed:
        """Generates a question, its gold answer and metadata. Depends only on the arguments."""
        return (*self.generate(rng, difficulty), {})

    def split_key(self, question: str) -> str:
        """Returns the key whose hash decides a question's split; questions that reveal each other's answers must have the same
        key.
        """
        return question


class RecordTask(ABC):
    """A task whose dataset records have a special form: `read_record` converts them, reading the fields in `record_fields`."""

    @abstractmethod
    def read_record(self, record: Mapping[str, Any]) -> Posed:
        """Returns question, gold and metadata of a record. Raises UserError for an invalid record."""


class WorkspaceTask(ABC):
    """A task whose problems bring files for the workspace of a trajectory."""

    @abstractmethod
    def files(self, problem: Problem) -> Mapping[str, bytes]:
        """Returns the files of a problem: path -> content."""


class SandboxTask:
    """A task whose `verify` opens sandboxes (`Attempt.opens_sandboxes`)."""


def group_metadata(record: Mapping[str, Any]) -> dict[str, str | int | float]:
    """Returns the fields of a record by which metrics are grouped: {"level": "Level 5", "subject": "Algebra"}. MATH calls the
    subject `type`.
    """
    named = {key: record[key] for key in GROUPS if isinstance(record.get(key), str | int)}
    if "subject" not in named and isinstance(record.get("type"), str):
        named["subject"] = record["type"]
    return named
