"""A task of fixing a generated module: one fault was planted in it, its tests show the fault, and hidden inputs judge the fix."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nmoe.envs.tasks.code_edit import CodeEditTask
from nmoe.envs.tasks.mutants import mutants
from nmoe.envs.tasks.task import Attempt, GeneratedTask, Posed
from nmoe.grading.code.verify import Case, ProgramLimits, verify_program
from nmoe.sandbox.api import Sandbox, SandboxFileError
from nmoe.types import Problem, Verdict

MODULE = "lib/module.py"
TESTS = "tests/__init__.py"
RUN_TESTS = "import tests"
PASSED = "passed"
_HIDDEN, _VISIBLE = 10, 3
_LIMITS = ProgramLimits(seconds=2.0, memory_mb=256)

# How a module begins, goes on with a value, and so is called.
_REDUCES = {
    "sum": ("0", "t += {}"),
    "product": ("1", "t *= {}"),
    "list": ("[]", "t = t + [{}]"),
    "last": ("0", "t = {}"),
    "count": ("0", "t += 1"),
}
_FILTERS = {
    "even": "x % 2 == 0",
    "odd": "x % 2 == 1",
    **{f"above_{k}": f"x > {k}" for k in range(1, 10)},
    **{f"below_{k}": f"x < {k}" for k in range(1, 10)},
    **{f"not_{k}": f"x != {k}" for k in range(1, 10)},
}
_CHANGES = {
    "squared": "x * x",
    **{f"times_{k}": f"x * {k}" for k in range(2, 6)},
    **{f"plus_{k}": f"x + {k}" for k in range(1, 10)},
    **{f"minus_{k}": f"x - {k}" for k in range(1, 10)},
}


@dataclass(frozen=True)
class Module:
    """A right module: `Module("sum_even_plus_3", "def sum_even_plus_3(xs):...")`. The name says what its function does."""

    name: str
    source: str


@dataclass(frozen=True)
class Fault:
    """A module with a planted fault, the kind of the fault, the tests that show it and those that judge the fix: arguments with
    what the right module returns."""

    module: Module
    kind: str
    source: str
    visible: tuple[tuple[list[int], Any], ...]
    hidden: tuple[tuple[list[int], Any], ...]

    @property
    def tests(self) -> str:
        """The file of the tests that the policy can run."""
        return (
            f"from lib.module import {self.module.name}\n\nfor xs, wanted in {list(self.visible)}:\n    try:\n"
            f"        found = {self.module.name}(xs)\n    except Exception as error:\n        found = error\n"
            f"    if found != wanted:\n        print(f'{{xs}}: {{found}}, not {{wanted}}')\n        break\n"
            f"else:\n    print('{PASSED}')\n"
        )


def new_module(rng: random.Random, functions: int) -> Module:
    """Draws a module of one function, or of two: the second one then tests or changes a value for the first."""
    reduce = rng.choice(list(_REDUCES))
    kept, changed = rng.choice([*_FILTERS, ""]), rng.choice([*_CHANGES, ""])
    if reduce == "count":
        changed = ""
    name = "_".join(filter(None, (reduce, kept, changed)))
    test, value = _FILTERS.get(kept, ""), _CHANGES.get(changed, "x")
    start, step = _REDUCES[reduce]
    helper = ""
    if functions > 1:
        called, body = rng.choice([("keep", test or "True"), ("change", value)])
        helper = f"def {called}(x):\n    return {body}\n\n"
        test, value = ("keep(x)", value) if called == "keep" else (test, "change(x)")
    lines = [f"if {test}:", f"    {step.format(value)}"] if test else [step.format(value)]
    loop = "".join(f"        {line}\n" for line in lines)
    return Module(name, f"{helper}def {name}(xs):\n    t = {start}\n    for x in xs:\n{loop}    return t\n")


def plant(rng: random.Random, module: Module) -> Fault | None:
    """Plants a fault that the module's tests show, of a kind drawn at random; None if none of three does."""
    hidden, shown = _inputs(rng, module.source, _HIDDEN), _inputs(rng, module.source, 4 * _VISIBLE)
    shown = [xs for xs in shown if xs not in hidden]
    kinds = mutants(module.source)
    right = results(module, module.source, hidden)
    cases = list(zip(shown, results(module, module.source, shown), strict=True))
    for _ in range(3):
        kind = rng.choice(list(kinds))
        source = rng.choice(kinds[kind]).applied(module.source)
        if results(module, source, hidden) == right:
            continue
        found = results(module, source, shown)
        failed = [case for case, one in zip(cases, found, strict=True) if one != case[1]]
        if failed:
            visible = [failed[0], *[case for case in cases if case is not failed[0]][: _VISIBLE - 1]]
            rng.shuffle(visible)
            return Fault(module, kind, source, tuple(visible), tuple(zip(hidden, right, strict=True)))
    return None


def _inputs(rng: random.Random, source: str, count: int) -> list[list[int]]:
    """Draws distinct arguments, among them the numbers around each constant of the module."""
    near = sorted({int(text) + step for text in re.findall(r"\d+", source) for step in (-1, 0, 1)})
    found: list[list[int]] = []
    while len(found) < count:
        xs = [
            rng.choice(near) if near and rng.random() < 0.5 else rng.randint(-9, 20) for _ in range(rng.randint(1, 4))
        ]
        if xs not in found:
            found.append(xs)
    return found


def results(module: Module, source: str, inputs: Sequence[list[int]]) -> list[Any]:
    """Returns what a version of a generated module returns for each argument, an exception as its text. No mutant of such a
    module runs on for ever: its loops are over lists that it does not change."""
    namespace: dict[str, Any] = {}
    exec(compile(source, MODULE, "exec"), namespace)
    found = []
    for xs in inputs:
        try:
            found.append(namespace[module.name](list(xs)))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


class CodeFixTask(CodeEditTask, GeneratedTask):
    """Fixing a fault that was planted in a small module: "Fix sum_even_plus_3." Modules have one function, from difficulty 2 on
    also two. All faults of a module, in all its forms, are in one split.

    Hidden inputs judge the module that the policy leaves: a fresh sandbox runs it on them, and its output is compared outside.
    The right module, the hidden inputs and the expected results are never in a sandbox of the policy's. A module that prints
    anything itself fails.
    """

    proven = True

    def pose_new(self, rng: random.Random, difficulty: int) -> Posed:
        fault = None
        while fault is None:
            fault = plant(rng, new_module(rng, rng.randint(1, min(difficulty, 2))))
        return posed(fault)

    def split_key(self, question: str) -> str:
        """Returns the name of the module, which says all that it does."""
        return question.removeprefix("Fix ").removesuffix(".")

    async def _judge(self, problem: Problem, attempt: Attempt, sandbox: Sandbox) -> Verdict:
        try:
            source = (await sandbox.read(MODULE)).decode()
        except UnicodeDecodeError:
            return Verdict.of(False, "tests", f"{MODULE} is no text")
        except SandboxFileError as error:
            if error.failure == "internal_error":
                raise
            return Verdict.of(False, "tests", f"{MODULE} cannot be read: {error}")
        if source.encode() == self.files(problem)[MODULE]:
            return Verdict.of(False, "tests", "nothing was changed")
        hidden = json.loads(str(problem.metadata["tests"]))
        case = Case(hidden["inputs"].encode(), hidden["results"].encode())
        return await verify_program(attempt.opens_sandboxes, source + hidden["run"], [case], _LIMITS)


def posed(fault: Fault) -> Posed:
    """Returns question, gold and metadata of a fault."""
    run = f"\nimport json, sys\nfor line in sys.stdin:\n    print({fault.module.name}(json.loads(line)))\n"
    inputs, wanted = ("".join(f"{one}\n" for one in some) for some in zip(*fault.hidden, strict=True))
    metadata = {
        "files": json.dumps({"lib/__init__.py": "", MODULE: fault.source, TESTS: fault.tests}),
        "tests": json.dumps({"run": run, "inputs": inputs, "results": wanted}),
        "protected": json.dumps([TESTS]),
        "subject": fault.kind,
    }
    return f"Fix {fault.module.name}.", json.dumps({MODULE: fault.module.source}), metadata
