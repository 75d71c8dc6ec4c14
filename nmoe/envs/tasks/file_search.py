"""Finding something in the files of a workspace: a name, a number, a path, a line."""

from __future__ import annotations

import json

from nmoe.envs.tasks.record_fields import Record, files, text
from nmoe.envs.tasks.task import AnswerForm, Attempt, QuestionTask, RecordTask, WorkspaceTask
from nmoe.errors import UserError
from nmoe.types import Metadata, Problem, Verdict


class FileSearchTask(QuestionTask, RecordTask, WorkspaceTask):
    """Records have `question`, `answer` and, unless the environment's [workspace] provides them, `files` (path -> content).

    Answers are compared as text, without white space and surrounding quotes or backticks.
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
    return " ".join(answer.split()).strip("`'\" ").removesuffix(".")
