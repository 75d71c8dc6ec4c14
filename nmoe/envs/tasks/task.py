"""What a task is: it shows a problem to the policy and decides whether an attempt at it is correct."""

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
    """What a trajectory comes to: its answer and, where it used tools, the sandbox it worked in, still open, with the
    workspace as it was left, and every call; `exchanges` where its task converses."""

    answer: str
    sandbox: Sandbox | None = None
    tool_events: Sequence[ToolEvent] = ()
    sandboxes: OpensSandboxes | None = None
    exchanges: Sequence[Exchange] = ()

    @property
    def opens_sandboxes(self) -> OpensSandboxes:
        """Where a verifier gets sandboxes of its own, for a task with `needs_sandbox`."""
        assert self.sandboxes is not None, "whoever grades a task that needs sandboxes gives it where to open them"
        return self.sandboxes


class Task(Protocol):
    """One kind of verifiable problem.

    `bare_final`: in a Harmony completion the final message, whole, is the answer. Otherwise a box or, in prose, the last
    number of the final message is (`nmoe.grading.extraction`).
    """

    @property
    def bare_final(self) -> bool: ...

    @property
    def needs_sandbox(self) -> bool:
        """Whether `verify` opens sandboxes."""

    def files(self, problem: Problem) -> Mapping[str, bytes]:
        """What the problem adds to the workspace of a trajectory: path -> content."""

    def read_record(self, record: Mapping[str, Any]) -> tuple[str, str, Metadata] | None:
        """Question, gold and metadata of a record in a form of the task's own; None where the settings name the fields and
        `pose` has the rest. Raises UserError for a record that is none."""

    @property
    def has_gold(self) -> bool:
        """Whether there is a right answer, which `verify` compares with."""

    @property
    def own_records(self) -> bool:
        """Whether `read_record` reads the task's records, by `record_fields` alone."""

    @property
    def record_fields(self) -> tuple[str, ...]:
        """The fields of a record, besides those of question and gold, that are looked at where they are there."""

    @property
    def gold_types(self) -> tuple[type, ...]:
        """The types that a record's gold may have."""

    def pose(self, question: str, gold: str, record: Mapping[str, Any]) -> tuple[str, str, Metadata]:
        """Question, gold and metadata of the problem that a dataset's record is; raises UserError for a record that is none."""

    def check_gold(self, problem: Problem) -> None:
        """Raises UserError for a gold answer that `verify` cannot compare with; called when a pool loads."""

    def messages(self, problem: Problem) -> list[Message]:
        """The conversation shown to the policy; the environment puts its system message before it."""

    def example_answers(self, problem: Problem) -> tuple[str, str]:
        """A right answer and one that is wrong by little, as a policy would give them: `nmoe env check` grades both."""

    async def verify(self, problem: Problem, attempt: Attempt) -> Verdict:
        """Whether the attempt is right. Total: any answer, however long or strange, gets a verdict, and in bounded time. What it
        raises is a defect of the task and stops the run."""

    async def same(self, problem: Problem, one: str, other: str) -> bool:
        """Whether two answers to a problem are one, right or wrong, as a vote among samples counts them. Total, as `verify`;
        raises InfrastructureError where a comparison was lost, which is no verdict."""


class GeneratedTask(Task, Protocol):
    """A task that can make its own problems."""

    def generate(self, rng: random.Random, difficulty: int) -> tuple[str, str]:
        """A question and its gold answer; `difficulty` >= 1. Depends on nothing but the arguments."""

    def split_key(self, question: str) -> str:
        """What decides the split a question belongs to: questions that answer one another share it."""


class QuestionTask:
    """What most tasks share: the question is one user message, and a record is no more than its question and gold."""

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

    def split_key(self, question: str) -> str:
        return question

    async def same(self, problem: Problem, one: str, other: str) -> bool:
        return one.strip() == other.strip()


def group_metadata(record: Mapping[str, Any]) -> dict[str, str | int | float]:
    """The groups that a record names: {"level": "Level 5", "subject": "Algebra"}. MATH calls the subject `type`."""
    named = {key: record[key] for key in GROUPS if isinstance(record.get(key), str | int)}
    if "subject" not in named and isinstance(record.get("type"), str):
        named["subject"] = record["type"]
    return named
