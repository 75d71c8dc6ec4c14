"""HumanEval: a function to complete, tested by `check(candidate)` (Chen et al. 2021, arXiv:2107.03374)."""

from __future__ import annotations

from nmoe.envs.tasks.records import Record, text
from nmoe.envs.tasks.solution import SolutionTask
from nmoe.errors import UserError
from nmoe.grading.code.extract import after, definitions, methods
from nmoe.grading.code.verify import Tests
from nmoe.types import Metadata, Problem

_REQUEST = (
    "Complete this Python function. Answer with the whole function in one ```python block.\n\n```python\n{prompt}\n```"
)
# Completes a prompt that ends in a function's head without a docstring.
_BODY = "\n    pass\n"


class HumanEvalTask(SolutionTask):
    """Records have `task_id`, `prompt`, `canonical_solution`, `entry_point` and `test`, as in openai/openai_humaneval."""

    own_records = True
    record_fields = ("task_id", "prompt", "canonical_solution", "entry_point", "test")

    def read_record(self, record: Record) -> tuple[str, str, Metadata]:
        prompt = text(record, "prompt")
        metadata = {
            "task_id": text(record, "task_id"),
            "prompt": prompt,
            "entry_point": text(record, "entry_point"),
            "test": text(record, "test"),
        }
        return _REQUEST.format(prompt=prompt.strip("\n")), prompt + text(record, "canonical_solution"), metadata

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
