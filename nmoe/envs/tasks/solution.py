"""Tasks whose answer is code, tested in sandboxes (`nmoe.grading.code.verify`): HumanEval, MBPP, and their base."""

from __future__ import annotations

import ast
import json
from abc import abstractmethod

from nmoe.envs.tasks.record_fields import Record, text, texts
from nmoe.envs.tasks.task import AnswerForm, Attempt, QuestionTask, RecordTask, SandboxTask
from nmoe.errors import UserError
from nmoe.grading.code.extract import MAX_CODE_CHARS, after, code_of, definitions, methods, names_read
from nmoe.grading.code.verify import Tests, verify_solution
from nmoe.sandbox.api import OpensSandboxes, SandboxSetupError
from nmoe.types import Metadata, Problem, Verdict


class SolutionTask(QuestionTask, SandboxTask):
    """Verifies code with tests. The gold is a whole solution; the tests and what they need are in the problem's metadata."""

    answer_form: AnswerForm = "final"

    @abstractmethod
    def tests(self, problem: Problem, code: str) -> Tests:
        """Returns the tests of `code` for the judge. Raises UserError for tests that cannot be run."""

    def program(self, problem: Problem, code: str) -> str:
        """Returns the program that is run as the solution, given the code of the answer."""
        return code

    def check_gold(self, problem: Problem) -> None:
        tests = self.tests(problem, problem.gold)
        if absent := [name for name in tests.names if name not in definitions(problem.gold)]:
            raise UserError(f"the gold solution does not define {', '.join(absent)}")

    def example_answers(self, problem: Problem) -> tuple[str, str]:
        nothing = "\n".join(f"def {name}(*arguments):\n    pass" for name in self.tests(problem, problem.gold).names)
        return f"```python\n{problem.gold}\n```", f"```python\n{nothing}\n```"

    async def verify(self, problem: Problem, attempt: Attempt) -> Verdict:
        code = code_of(attempt.answer)
        if not code.strip():
            return Verdict.of(False, "tests", "no code")
        if len(code) > MAX_CODE_CHARS:
            return Verdict.of(False, "tests", f"{len(code)} characters of code, more than {MAX_CODE_CHARS}")
        try:
            return await self.verified(attempt.opens_sandboxes, problem, code)
        except SandboxSetupError as error:
            return Verdict("error", 0.0, "tests", str(error))

    async def verified(self, opens: OpensSandboxes, problem: Problem, code: str) -> Verdict:
        """Runs the tests of an answer's code. Raises SandboxSetupError."""
        return await verify_solution(opens, self.tests(problem, code), self.program(problem, code))


_COMPLETE = (
    "Complete this Python function. Answer with the whole function in one ```python block.\n\n```python\n{prompt}\n```"
)
# Completes a prompt that ends in a function's head without a docstring.
_BODY = "\n    pass\n"


class HumanEvalTask(SolutionTask, RecordTask):
    """HumanEval: a function to complete, tested by `check(candidate)` (Chen et al. 2021, arXiv:2107.03374).

    Records have `task_id`, `prompt`, `canonical_solution`, `entry_point` and `test`, as in openai/openai_humaneval.
    """

    record_fields = ("task_id", "prompt", "canonical_solution", "entry_point", "test")

    def read_record(self, record: Record) -> tuple[str, str, Metadata]:
        prompt = text(record, "prompt")
        metadata = {
            "task_id": text(record, "task_id"),
            "prompt": prompt,
            "entry_point": text(record, "entry_point"),
            "test": text(record, "test"),
        }
        return _COMPLETE.format(prompt=prompt.strip("\n")), prompt + text(record, "canonical_solution"), metadata

    def tests(self, problem: Problem, code: str) -> Tests:
        prompt, test, entry_point = (str(problem.metadata[name]) for name in ("prompt", "test", "entry_point"))
        if "check" not in definitions(test):
            raise UserError("field 'test' does not define check(candidate)")
        return Tests("check", (test,), setup=prompt + _BODY, names=(entry_point,), methods=methods(problem.gold))

    def program(self, problem: Problem, code: str) -> str:
        """Joins the prompt's imports and helpers with the answer, which is the whole function or the rest of the prompt's."""
        prompt = str(problem.metadata["prompt"])
        whole = str(problem.metadata["entry_point"]) in definitions(code)
        return after(f"{prompt}{_BODY}", code) if whole else prompt + code


_REQUEST = "{request}\n\nDefine {heads}. Answer with one ```python block."


class MbppTask(SolutionTask, RecordTask):
    """MBPP: a function described in a sentence, tested by assertions (Austin et al. 2021, arXiv:2108.07732).

    Records have `text` (or `prompt`), `code`, `test_list` and optionally `test_setup_code` (or `test_imports`), as in
    google-research-datasets/mbpp.

    The tests stay hidden. The request gives the signatures of the functions that they call, taken from `code`.
    """

    record_fields = ("text", "prompt", "code", "test_list", "test_setup_code", "test_imports")

    def read_record(self, record: Record) -> tuple[str, str, Metadata]:
        code = text(record, "code")
        setup = text(record, "test_setup_code", default="") or "\n".join(texts(record, "test_imports", default=()))
        tests = texts(record, "test_list")
        names = _tested(code, [setup, *tests])
        request = _REQUEST.format(
            request=text(record, "text", "prompt").strip(), heads=" and ".join(_heads(code, names))
        )
        metadata = {"tests": json.dumps(tests), "setup": setup, "names": json.dumps(names)}
        return request, code, metadata

    def tests(self, problem: Problem, code: str) -> Tests:
        known = problem.metadata
        tests, names = json.loads(str(known["tests"])), json.loads(str(known["names"]))
        return Tests("asserts", tuple(tests), str(known["setup"]), tuple(names), methods(problem.gold))


def _tested(code: str, tests: list[str]) -> list[str]:
    """Returns the names that the gold code defines and the tests use."""
    try:
        read = set().union(*map(names_read, tests))
    except (SyntaxError, ValueError) as error:
        raise UserError(f"field 'test_list' is no Python: {error}") from None
    names = [name for name in definitions(code) if name in read]
    if not names:
        raise UserError("nothing that 'code' defines is named in 'test_list'")
    return names


def _heads(code: str, names: list[str]) -> list[str]:
    """Returns the signatures of functions, such as `add(a, b)`, and the bare names of classes."""
    heads = []
    for node in ast.parse(code).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in names:
            heads.append(f"`{node.name}({ast.unparse(node.args)})`")
        elif isinstance(node, ast.ClassDef) and node.name in names:
            heads.append(f"the class `{node.name}`")
    return heads
