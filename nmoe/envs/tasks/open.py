"""Prompts without a right answer: an essay, a translation, a conversation. Only `[[rewards]]` rate the answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nmoe.envs.tasks.task import Attempt, QuestionTask, group_metadata
from nmoe.types import Metadata, Problem, Verdict


class OpenTask(QuestionTask):
    """A task without a gold answer: there is no verdict, and no component `correctness`. The answer is the whole final message."""

    bare_final = True
    has_gold = False
    record_fields = ("level", "subject", "type")

    def pose(self, question: str, gold: str, record: Mapping[str, Any]) -> tuple[str, str, Metadata]:
        return question, gold, group_metadata(record)

    def check_gold(self, problem: Problem) -> None:
        return

    def example_answers(self, problem: Problem) -> tuple[str, str]:
        return "An answer.", "Another answer."

    async def verify(self, problem: Problem, attempt: Attempt) -> Verdict:
        raise AssertionError("a grade asks for no verdict where there is no gold")
