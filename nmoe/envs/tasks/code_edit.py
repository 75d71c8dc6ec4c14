"""A task of editing code in a workspace so that hidden tests pass, which fail without the edit."""

from __future__ import annotations

import json
from collections.abc import Mapping

from nmoe.envs.tasks.record_fields import Record, files, text, texts
from nmoe.envs.tasks.task import AnswerForm, Attempt, QuestionTask, RecordTask, SandboxTask, WorkspaceTask
from nmoe.errors import UserError
from nmoe.grading.code.extract import definitions, fenced_blocks, methods
from nmoe.grading.code.verify import Tests, verify_in
from nmoe.sandbox.api import Sandbox, SandboxFileError, SandboxSetupError
from nmoe.types import Metadata, Problem, Verdict


class CodeEditTask(QuestionTask, RecordTask, WorkspaceTask, SandboxTask):
    """Verifies an edit of a workspace with hidden tests.

    Records have `problem`, the workspace's `files`, the hidden `tests` (both path -> content), a `solution` (the files that it
    changes) and optionally `protected` paths, which are restored before the tests run. The tests see protected modules in
    their original form: these are loaded in the tests' process, not in the solution's.

    With tools, the final workspace of the trajectory is judged. Without tools, the answer changes files by fenced blocks that
    have the path behind the opening fence (```` ```python calc.py ````) and contain the whole new content.
    """

    answer_form: AnswerForm = "final"
    record_fields = ("problem", "files", "tests", "solution", "protected")
    proven = False
    """Whether the tests are known to fail without an edit."""

    def read_record(self, record: Record) -> tuple[str, str, Metadata]:
        workspace, solution = files(record, "files"), files(record, "solution")
        metadata = {
            "files": json.dumps(workspace),
            "tests": json.dumps(files(record, "tests")),
            "protected": json.dumps(texts(record, "protected", default=())),
        }
        return text(record, "problem"), json.dumps(solution), metadata

    def check_gold(self, problem: Problem) -> None:
        workspace = self.files(problem)
        if absent := [path for path in json.loads(str(problem.metadata["protected"])) if path not in workspace]:
            raise UserError(f"field 'protected' names {', '.join(absent)}, which 'files' does not have")
        if not self._tests(problem).modules:
            raise UserError("field 'files' has no Python module that tests could import")
        if not json.loads(problem.gold):
            raise UserError("field 'solution' changes nothing")

    def example_answers(self, problem: Problem) -> tuple[str, str]:
        workspace, solution = self.files(problem), json.loads(problem.gold)
        return _blocks(solution), _blocks({path: workspace.get(path, b"").decode() for path in solution})

    def files(self, problem: Problem) -> dict[str, bytes]:
        return {path: content.encode() for path, content in json.loads(str(problem.metadata["files"])).items()}

    async def verify(self, problem: Problem, attempt: Attempt) -> Verdict:
        try:
            return await self._verify(problem, attempt)
        except (SandboxSetupError, SandboxFileError) as error:
            return Verdict("error", 0.0, "tests", str(error))

    async def _verify(self, problem: Problem, attempt: Attempt) -> Verdict:
        if attempt.sandbox is not None:
            verdict = await self._judge(problem, attempt, attempt.sandbox)
        else:
            changes = _changes(attempt.answer)
            if not changes:
                return Verdict.of(False, "tests", "no file was changed")
            verdict = await self._judge_changes(problem, attempt, changes)
        if verdict.outcome != "correct" or self.proven:
            return verdict
        untouched = await self._judge_changes(problem, attempt, {})
        if untouched.outcome == "correct":
            return Verdict.of(False, "tests", "the tests pass without any change, so that they prove nothing")
        return verdict if untouched.outcome == "incorrect" else untouched

    async def _judge_changes(self, problem: Problem, attempt: Attempt, changes: Mapping[str, bytes]) -> Verdict:
        """Judges the changes in a fresh copy of the workspace."""
        async with await attempt.opens_sandboxes.open() as sandbox:
            for path, content in self.files(problem).items():
                await sandbox.write(path, content)
            for path, content in changes.items():
                try:
                    await sandbox.write(path, content)
                except SandboxFileError as error:
                    return _unwritten(path, error)
            return await self._judge(problem, attempt, sandbox)

    async def _judge(self, problem: Problem, attempt: Attempt, sandbox: Sandbox) -> Verdict:
        for path, content in self._protected(problem).items():
            try:
                # First remove a directory or a link of that path.
                await sandbox.run(["rm", "-rf", "--", path], cwd="/workspace")
                await sandbox.write(path, content)
            except SandboxFileError as error:
                return _unwritten(path, error)
        return await verify_in(attempt.opens_sandboxes, sandbox, self._tests(problem), None)

    def _tests(self, problem: Problem) -> Tests:
        tests: dict[str, str] = json.loads(str(problem.metadata["tests"]))
        workspace, solution = json.loads(str(problem.metadata["files"])), json.loads(problem.gold)
        code = [text for path, text in (*workspace.items(), *solution.items()) if path.endswith(".py")]
        paths = [*workspace, *solution]
        modules = {path.partition("/")[0].removesuffix(".py") for path in paths if path.endswith(".py")}
        return Tests(
            "files",
            tuple(tests.values()),
            methods=tuple(sorted({name for text in code for name in (*methods(text), *definitions(text))})),
            modules=tuple(sorted(modules)),
            protected=self._protected(problem),
        )

    def _protected(self, problem: Problem) -> dict[str, bytes]:
        workspace = self.files(problem)
        return {path: workspace[path] for path in json.loads(str(problem.metadata["protected"]))}


def _unwritten(path: str, error: SandboxFileError) -> Verdict:
    """Returns an incorrect verdict for a path that cannot be written because of the policy's changes to the workspace.

    Raises the error if the sandbox itself was lost.
    """
    if error.failure == "internal_error":
        raise error
    return Verdict.of(False, "tests", f"{path} cannot be written: {error}")


def _changes(answer: str) -> dict[str, bytes]:
    """Returns path and content of each file in the answer's fenced blocks; the path is the last word behind the opening fence."""
    named = ((info.split(), content) for info, content in fenced_blocks(answer))
    # A text may contain lone surrogates, which UTF-8 cannot encode.
    return {words[-1]: content.encode("utf-8", "replace") for words, content in named if words}


def _blocks(changed: Mapping[str, str]) -> str:
    """Renders an answer that changes these files, as fenced blocks whose fences are longer than any in the contents."""
    longest = max(
        (len(line) - len(line.lstrip("`")) for text in changed.values() for line in text.split("\n")), default=0
    )
    fence = "`" * max(3, longest + 1)
    return "\n".join(f"{fence}{path}\n{content.rstrip(chr(10))}\n{fence}" for path, content in changed.items())
