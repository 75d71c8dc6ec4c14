"""The base of tasks whose answer is code, which is tested in sandboxes (`nmoe.grading.code.verify`)."""

from __future__ import annotations

from abc import abstractmethod

from nmoe.envs.tasks.task import Attempt, QuestionTask
from nmoe.errors import UserError
from nmoe.grading.code.extract import MAX_CODE_CHARS, code_of, definitions
from nmoe.grading.code.verify import Tests, verify_solution
from nmoe.sandbox.api import OpensSandboxes, SandboxSetupError
from nmoe.types import Problem, Verdict


class SolutionTask(QuestionTask):
    """Verifies code with tests. The gold is a whole solution; the tests and what they need are in the problem's metadata."""

    bare_final = True
    needs_sandbox = True

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
