"""Tasks whose answer is code, tested in sandboxes (`nmoe.grading.code.verify`): HumanEval, MBPP, and programs of contests."""

from __future__ import annotations

import ast
import json
from abc import abstractmethod
from typing import Any

from nmoe.envs.tasks.contest import FIELDS, Contest, contest_of, memory_mb_of, seconds_of, tolerance_of
from nmoe.envs.tasks.record_fields import Record, text, texts
from nmoe.envs.tasks.task import AnswerForm, Attempt, QuestionTask, RecordTask, SandboxTask
from nmoe.errors import UserError
from nmoe.grading.code.extract import MAX_CODE_CHARS, after, code_of, definitions, methods, variables_in
from nmoe.grading.code.verify import Case, ProgramLimits, Tests, verify_program, verify_solution
from nmoe.sandbox.api import OpensSandboxes, SandboxSetupError
from nmoe.types import Metadata, Problem, Verdict


class SolutionTask(QuestionTask, SandboxTask):
    """The base of tasks whose answer is code, verified with tests. The gold is a whole solution; the problem's metadata holds the
    tests and their inputs.
    """

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
        """Returns the prompt's imports and helpers before an answer that is the whole function; otherwise the prompt, continued by
        the answer.
        """
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
        read = set().union(*map(variables_in, tests))
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


_QUESTIONS = ("question", "question_content", "problem", "description", "prompt")
_SOLUTIONS = ("solutions", "gold_standard_solution", "solution", "canonical_solution")
_PROGRAM = (
    "{question}\n\nWrite a Python program that reads the input from standard input and prints the answer. Answer with the whole "
    "program in one ```python block."
)
_FUNCTION = "{question}\n\nWrite the Python function `{function}`. Answer with the whole code in one ```python block."
_STARTER = (
    "{question}\n\nComplete this code. Answer with the whole code in one ```python block.\n\n```python\n{starter}\n```"
)
# The heads of functions in these datasets name types such as List without an import.
_IMPORTS = (
    "from typing import *\nimport bisect, collections, functools, heapq, itertools, math, random, re, string, sys\n"
    + "".join(
        f"from {name} import *\n" for name in ("collections", "functools", "itertools", "heapq", "bisect", "math")
    )
    + "from builtins import pow\n"
)
# Time limits are for compiled languages.
_SLOWER, _LEAST_S, _MOST_S = 2.0, 4.0, 20.0
_LEAST_MB, _MOST_MB = 512, 2048
# How many of a record's solutions are looked at for one in Python 3.
_LOOKED_AT = 20
# JSON has no tuples, and its keys are texts.
_SAME = """
def _plain(x):
    if type(x) in (list, tuple):
        return [_plain(one) for one in x]
    if type(x) is dict:
        return {str(key): _plain(one) for key, one in x.items()}
    return x
def _same(x, y, tolerance):
    if type(x) is list and type(y) is list:
        return len(x) == len(y) and all(_same(a, b, tolerance) for a, b in zip(x, y))
    if tolerance and type(x) in (int, float) and type(y) in (int, float):
        return abs(x - y) <= tolerance * max(1.0, abs(y))
    return (type(x) is bool) == (type(y) is bool) and x == y
def _is_one_of(x, wanted, tolerance):
    return any(_same(x, _plain(one), tolerance) for one in wanted)
nan, inf = float("nan"), float("inf")
"""


class ProgramTask(SolutionTask, RecordTask):
    """Programs of contests: tested by standard input and output, or a function by calls (APPS, Hendrycks et al. 2021,
    arXiv:2105.09938; TACO, arXiv:2312.14852; LiveCodeBench, arXiv:2403.07974).

    Records have a question and tests in one of the forms of `nmoe.envs.tasks.contest`, and most have solutions, of which the
    first in Python 3 is the gold. A record without one is not checked before a run.
    """

    record_fields = (*_QUESTIONS, *_SOLUTIONS, "starter_code", "difficulty", *FIELDS)

    def read_record(self, record: Record) -> tuple[str, str, Metadata]:
        contest = contest_of(record)
        question = _question(record)
        starter = text(record, "starter_code", default="").strip()
        if starter and contest.function:
            request = _STARTER.format(question=question, starter=starter)
        else:
            request = (_FUNCTION if contest.function else _PROGRAM).format(question=question, function=contest.function)
        seconds, memory, tolerance = seconds_of(record), memory_mb_of(record), tolerance_of(record)
        metadata: dict[str, str | int | float] = {
            "inputs": json.dumps(contest.inputs),
            "outputs": json.dumps(contest.outputs),
            "function": contest.function,
            "left_out": contest.left_out,
            "seconds": min(_MOST_S, max(_LEAST_S, _SLOWER * (seconds or 0.0))),
            "memory_mb": int(min(_MOST_MB, max(_LEAST_MB, memory or 0.0))),
        }
        if contest.listed:
            metadata["listed"] = 1
        if tolerance is not None:
            metadata["tolerance"] = tolerance
        if isinstance(record.get("difficulty"), str | int):
            metadata["level"] = str(record["difficulty"])
        return request, _gold(record), metadata

    def knows_answer(self, problem: Problem) -> bool:
        return bool(problem.gold)

    def check_gold(self, problem: Problem) -> None:
        return

    def example_answers(self, problem: Problem) -> tuple[str, str]:
        function = str(problem.metadata["function"])
        nothing = f"def {function}(*arguments):\n    pass" if function else "print()"
        return f"```python\n{problem.gold}\n```", f"```python\n{nothing}\n```"

    async def verified(self, opens: OpensSandboxes, problem: Problem, code: str) -> Verdict:
        contest = _contest(problem)
        if contest.function:
            return await super().verified(opens, problem, code)
        known = problem.metadata
        tolerance = float(known["tolerance"]) if "tolerance" in known else None
        limits = ProgramLimits(float(known["seconds"]), int(known["memory_mb"]), tolerance)
        tests = [Case(i.encode(), o.encode()) for i, o in zip(contest.inputs, contest.outputs, strict=True)]
        return await verify_program(opens, code, tests, limits)

    def tests(self, problem: Problem, code: str) -> Tests:
        """Returns tests that call the function, or the method if the answer defines a class Solution."""
        contest, tolerance = _contest(problem), problem.metadata.get("tolerance")
        of_class = "Solution" in definitions(code)
        called = f"Solution().{contest.function}" if of_class else contest.function
        asserts = [
            f"assert _is_one_of(_plain({called}(*{given!r})), {right!r}, {tolerance!r})"
            for given, right in zip(contest.inputs, _right_results(contest), strict=True)
        ]
        name = "Solution" if of_class else contest.function
        return Tests("asserts", tuple(asserts), setup=_SAME, names=(name,), methods=(contest.function,))

    def program(self, problem: Problem, code: str) -> str:
        return after(_IMPORTS, code)


def _right_results(contest: Contest) -> list[list[Any]]:
    """Returns, for each call, the results that count as right."""
    return [[wanted, *wanted] if contest.listed else [wanted] for wanted in contest.outputs]


def _contest(problem: Problem) -> Contest:
    known = problem.metadata
    inputs, outputs = (tuple(json.loads(str(known[name]))) for name in ("inputs", "outputs"))
    return Contest(inputs, outputs, str(known["function"]), listed="listed" in known)


def _question(record: Record) -> str:
    """Returns the text of the question: a text field, or the last message of a conversation. Raises UserError without one."""
    for name in _QUESTIONS:
        value: Any = record.get(name)
        if isinstance(value, list) and value and isinstance(value[-1], dict):
            value = value[-1].get("content")
        if isinstance(value, str) and value.strip():
            return value.strip()
    raise UserError(f"no text in the fields {', '.join(_QUESTIONS)}; the fields are {', '.join(record)}")


def _gold(record: Record) -> str:
    """Returns the first of the record's solutions in Python 3, among the first 20 of each field; empty if there is none."""
    for name in _SOLUTIONS:
        found: Any = record.get(name)
        if isinstance(found, str) and found.lstrip().startswith("["):
            try:
                found = json.loads(found)
            except ValueError:
                continue
        if isinstance(found, dict):  # CodeContests: {"language": [3], "solution": ["..."]}, where 3 is Python 3
            pairs = zip(found.get("language") or [], found.get("solution") or [], strict=False)
            found = [code for language, code in pairs if language in (3, "PYTHON3", "python3", "python")]
        for code in [found] if isinstance(found, str) else (found or [])[:_LOOKED_AT]:
            if isinstance(code, str) and code.strip() and _is_python(code := code_of(code)):
                return code
    return ""


def _is_python(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
