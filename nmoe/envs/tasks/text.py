"""Tasks whose answer is a text: compared with a gold text, found in files, or open and rated by [[rewards]] alone."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from typing import Any

from nmoe.envs.tasks.record_fields import Record, files, text
from nmoe.envs.tasks.task import AnswerForm, Attempt, QuestionTask, RecordTask, WorkspaceTask, group_metadata
from nmoe.errors import UserError
from nmoe.types import Metadata, Problem, Verdict

_AROUND = "`'\" "


class TextMatchTask(QuestionTask):
    """A question with a text as the answer: a name, a place, a word. It is compared as text, not as a number or formula.

    The answer is the whole final message.

    Case, the width of white space, compatibility forms of characters (Unicode NFKC) and a final full stop make no difference;
    everything else does.
    """

    answer_form: AnswerForm = "final"
    record_fields = ("level", "subject", "type")
    gold_types = (str, int, float)

    def pose(self, question: str, gold: str, record: Mapping[str, Any]) -> tuple[str, str, Metadata]:
        return question, gold, group_metadata(record)

    def check_gold(self, problem: Problem) -> None:
        if not plain(problem.gold):
            raise UserError(f"nothing is left of the gold answer {problem.gold!r} without white space and full stops")

    def example_answers(self, problem: Problem) -> tuple[str, str]:
        return problem.gold, f"not {problem.gold}"

    async def verify(self, problem: Problem, attempt: Attempt) -> Verdict:
        same = plain(attempt.answer) == plain(problem.gold)
        return Verdict.of(same, "exact", "the same text" if same else "another text")


def plain(text: str) -> str:
    """Normalises a text for comparison: case, white space, Unicode compatibility forms and final full stops."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).rstrip(". ")


class OpenTask(QuestionTask):
    """A prompt without a right answer: an essay, a translation, a conversation. Only `[[rewards]]` rate the answers.

    There is no verdict, and no component `correctness`. The answer is the whole final message.
    """

    answer_form: AnswerForm = "final"
    record_fields = ("level", "subject", "type")

    def pose(self, question: str, gold: str, record: Mapping[str, Any]) -> tuple[str, str, Metadata]:
        return question, gold, group_metadata(record)

    def check_gold(self, problem: Problem) -> None:
        return

    def example_answers(self, problem: Problem) -> tuple[str, str]:
        return "An answer.", "Another answer."

    async def verify(self, problem: Problem, attempt: Attempt) -> Verdict:
        raise AssertionError("a grade asks for no verdict where there is no gold")


class FileSearchTask(QuestionTask, RecordTask, WorkspaceTask):
    """Finding something in files: a name, a number, a path, a line.

    Records have `question`, `answer` and, unless the environment's [workspace] provides them, `files` (path -> content). Answers
    are compared as text; the width of white space, surrounding quotes or backticks and a final full stop make no difference.
    """

    answer_form: AnswerForm = "final"
    record_fields = ("question", "answer", "files")

    def read_record(self, record: Record) -> tuple[str, str, Metadata]:
        workspace = json.dumps(files(record, "files", default={}))
        return text(record, "question"), text(record, "answer"), {"files": workspace}

    def files(self, problem: Problem) -> dict[str, bytes]:
        return {path: content.encode() for path, content in json.loads(str(problem.metadata["files"])).items()}

    def check_gold(self, problem: Problem) -> None:
        if not _bare(problem.gold):
            raise UserError(f"nothing is left of the answer {problem.gold!r} without quotes and white space")

    def example_answers(self, problem: Problem) -> tuple[str, str]:
        return problem.gold, f"not {problem.gold}"

    async def verify(self, problem: Problem, attempt: Attempt) -> Verdict:
        same = _bare(attempt.answer) == _bare(problem.gold)
        return Verdict.of(same, "exact", "the same text" if same else "another text")


def _bare(answer: str) -> str:
    """Returns an answer without white space and quotes around it, and without a full stop before or after the closing quote."""
    return " ".join(answer.split()).strip(_AROUND).removesuffix(".").strip(_AROUND)
