"""The task protocol: a task poses a problem to the policy and decides whether an attempt at it is correct."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from nmoe.types import GROUPS, Exchange, Message, Metadata, Problem, ToolEvent, Verdict

if TYPE_CHECKING:
    from nmoe.sandbox.api import OpensSandboxes, Sandbox


@dataclass(frozen=True)
class Attempt:
    """The result of a trajectory, as a task verifies it: the answer, and all calls if it used tools.

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
        """Opens the verifier's own sandboxes, for a task with `needs_sandbox`."""
        assert self.sandboxes is not None, "whoever grades a task that needs sandboxes gives it where to open them"
        return self.sandboxes


class TaskProtocol(Protocol):
    """One kind of verifiable problem, as environments, pools and graders know it. `nmoe.Task` is the short form for users.

    With `bare_final`, the answer of a Harmony completion is the whole final message. Otherwise it is the box in the final
    message or, in prose, its last number (`nmoe.grading.extraction`). With `bare_text`, plain text without a box is an answer as a
    whole; otherwise its last number is.
    """

    @property
    def bare_final(self) -> bool: ...

    @property
    def bare_text(self) -> bool: ...

    @property
    def needs_sandbox(self) -> bool:
        """Whether `verify` opens sandboxes."""

    def files(self, problem: Problem) -> Mapping[str, bytes]:
        """Returns the files that the problem adds to the workspace of a trajectory: path -> content."""

    def read_record(self, record: Mapping[str, Any]) -> tuple[str, str, Metadata] | None:
        """Reads question, gold and metadata from a record in the task's own form; raises UserError for an invalid record.

        Returns None if the settings name the fields and `pose` does the rest.
        """

    @property
    def has_gold(self) -> bool:
        """Whether answers are right or wrong, as `verify` says."""

    @property
    def knows_answers(self) -> bool:
        """Whether `example_answers` has a right answer and a wrong one, so that the gold can be graded before a run starts."""

    def knows_answer(self, problem: Problem) -> bool:
        """Whether it has them for this problem: some records have tests and no solution."""

    @property
    def own_records(self) -> bool:
        """Whether `read_record` reads the task's records, by `record_fields` alone."""

    @property
    def record_fields(self) -> tuple[str, ...]:
        """The optional fields that are read from a record besides question and gold."""

    @property
    def gold_types(self) -> tuple[type, ...]:
        """The permitted types of a record's gold."""

    def pose(self, question: str, gold: str, record: Mapping[str, Any]) -> tuple[str, str, Metadata]:
        """Returns question, gold and metadata of a dataset's record; raises UserError for an invalid record."""

    def check_gold(self, problem: Problem) -> None:
        """Raises UserError for a gold answer that `verify` cannot compare with; called when a pool loads."""

    def messages(self, problem: Problem) -> list[Message]:
        """Returns the conversation shown to the policy, to which the environment adds its system message."""

    def example_answers(self, problem: Problem) -> tuple[str, str]:
        """Returns a right answer and a slightly wrong one, in the policy's form; `nmoe env check` grades both."""

    async def verify(self, problem: Problem, attempt: Attempt) -> Verdict:
        """Decides whether the attempt is right. Any answer, however long or strange, gets a verdict in bounded time.

        An exception is a bug in the task and stops the run.
        """

    async def same(self, problem: Problem, one: str, other: str) -> bool:
        """Whether two answers to a problem, right or wrong, count as equal in a vote among samples.

        Accepts any answers, as `verify`. Raises InfrastructureError if a comparison was lost, which is not a verdict.
        """


class GeneratedTask(TaskProtocol, Protocol):
    """A task that can generate its own problems."""

    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        """Generates a question and its gold answer; `difficulty` >= 1. Depends only on the arguments."""

    def split_key(self, question: str) -> str:
        """Returns the key that decides a question's split: questions that reveal one another's answers share it."""


class QuestionTask:
    """The base of most tasks: the question is one user message, and a record has only a question and a gold answer."""

    bare_text = False
    knows_answers = True
    needs_sandbox = False
    has_gold = True
    own_records = False
    record_fields: tuple[str, ...] = ()
    gold_types: tuple[type, ...] = (str,)

    def pose(self, question: str, gold: str, record: Mapping[str, Any]) -> tuple[str, str, Metadata]:
        return question, gold, {}

    def read_record(self, record: Mapping[str, Any]) -> tuple[str, str, Metadata] | None:
        return None

    def files(self, problem: Problem) -> Mapping[str, bytes]:
        return {}

    def messages(self, problem: Problem) -> list[Message]:
        return [Message("user", problem.question)]

    def knows_answer(self, problem: Problem) -> bool:
        return self.knows_answers

    def split_key(self, question: str) -> str:
        return question

    async def same(self, problem: Problem, one: str, other: str) -> bool:
        return one.strip() == other.strip()


def group_metadata(record: Mapping[str, Any]) -> dict[str, str | int | float]:
    """Returns the groups that a record names: {"level": "Level 5", "subject": "Algebra"}. MATH calls the subject `type`."""
    named = {key: record[key] for key in GROUPS if isinstance(record.get(key), str | int)}
    if "subject" not in named and isinstance(record.get("type"), str):
        named["subject"] = record["type"]
    return named
