"""MBPP: a function described in a sentence, tested by assertions (Austin et al. 2021, arXiv:2108.07732)."""

from __future__ import annotations

import ast
import json

from nmoe.envs.tasks.records import Record, text, texts
from nmoe.envs.tasks.solution import SolutionTask
from nmoe.errors import UserError
from nmoe.grading.code.extract import definitions, methods, names_read
from nmoe.grading.code.verify import Tests
from nmoe.types import Metadata, Problem

_REQUEST = "{request}\n\nDefine {heads}. Answer with one ```python block."


class MbppTask(SolutionTask):
    """Records have `text` (or `prompt`), `code`, `test_list` and optionally `test_setup_code` (or `test_imports`), as in
    google-research-datasets/mbpp.

    The tests stay hidden. The request gives the signatures of the functions that they call, taken from `code`.
    """

    own_records = True
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
