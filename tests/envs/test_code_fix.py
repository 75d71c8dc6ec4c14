"""Planted faults: the generator, the operators, and what the grader pays and does not."""

from __future__ import annotations

import ast
import asyncio
import json
import random
import re
from collections.abc import Iterator

import pytest

from nmoe.config.tables.rollout import SandboxSettings
from nmoe.envs.environment import Environment
from nmoe.envs.pools.generated import split_of
from nmoe.envs.tasks import TASKS, Attempt
from nmoe.envs.tasks.code_fix import (
    MODULE,
    PASSED,
    RUN_TESTS,
    TESTS,
    CodeFixTask,
    Fault,
    Module,
    new_module,
    plant,
    posed,
    results,
)
from nmoe.envs.tasks.mutants import KINDS, mutants
from nmoe.sandbox.api import Limits, SandboxSetupError
from nmoe.sandbox.sandboxes import Sandboxes
from nmoe.speedrun.fixes import FixDocuments, edit_between, run_tests, texts
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Problem, Verdict

SOURCE = "def f(xs):\n    t = 0\n    for x in xs:\n        if x > 3:\n            t += x\n    return t\n"


def faults(count: int) -> list[Fault]:
    found = (plant(rng, new_module(rng, 1 + seed % 2)) for seed in range(count) for rng in [random.Random(seed)])
    return [fault for fault in found if fault is not None]


def problem_of(fault: Fault) -> Problem:
    question, gold, metadata = posed(fault)
    return Problem("demo/0", "code_fix", question, gold, "demo", metadata)


def test_every_operator_has_its_faults() -> None:
    found = {kind: [one.applied(SOURCE) for one in some] for kind, some in mutants(SOURCE).items()}
    assert list(found) != []
    assert set(found) == set(KINDS)
    assert found["operator"] == [SOURCE.replace("+=", "-="), SOURCE.replace("+=", "*=")]
    assert found["comparison"] == [SOURCE.replace(">", "<")]
    assert found["boundary"] == [SOURCE.replace(">", ">=")]
    assert set(found["off by one"]) == {
        SOURCE.replace(*one) for one in (("3", "2"), ("3", "4"), ("0", "1"), ("0", "-1"))
    }
    assert SOURCE.replace("3", "9") in found["constant"]
    assert SOURCE.replace("3", "4") not in found["constant"]
    assert SOURCE.replace("if x", "if t") in found["name"]
    assert found["deleted line"] == [SOURCE.replace("    t = 0\n", ""), SOURCE.replace("    return t\n", "")]
    assert found["indentation"] == [SOURCE.replace("    return t", "        return t")]


def test_a_fault_is_one_that_tests_show() -> None:
    """Also: the original is in nothing that the policy sees, and the tests that judge are others than those that it sees."""
    some = faults(150)
    assert len(some) > 120
    assert {fault.kind for fault in some} == set(KINDS)
    for fault in some:
        right, wrong = fault.module.source, fault.source
        assert ast.unparse(ast.parse(right)) + "\n" == right
        for cases in (fault.visible, fault.hidden):
            inputs, wanted = (list(part) for part in zip(*cases, strict=True))
            assert results(fault.module, right, inputs) == wanted
            assert results(fault.module, wrong, inputs) != wanted
        assert run_tests(fault, right) == f"{PASSED}\n" != run_tests(fault, wrong)
        assert not {str(xs) for xs, _ in fault.visible} & {str(xs) for xs, _ in fault.hidden}
        seen = {**json.loads(str(problem_of(fault).metadata["files"])), "question": problem_of(fault).question}
        missing = set(right.splitlines()) - set(wrong.splitlines())
        assert not any(line.strip() in text for line in missing for text in (seen[TESTS], seen["question"]))


def test_problems_are_a_function_of_the_draw_and_modules_of_one_split() -> None:
    task = TASKS["code_fix"]
    assert isinstance(task, CodeFixTask)
    assert task.pose_new(random.Random(3), 2) == task.pose_new(random.Random(3), 2)
    one, two = (
        plant(random.Random(seed), Module("sum_above_3", SOURCE.replace("f(", "sum_above_3("))) for seed in (1, 6)
    )
    assert one is not None
    assert two is not None
    assert one.source != two.source
    assert split_of("code_fix", posed(one)[0]) == split_of("code_fix", posed(two)[0])
    functions = {new_module(random.Random(seed), 2).source.count("def ") for seed in range(9)}
    assert functions == {2}
    assert {new_module(random.Random(seed), 1).source.count("def ") for seed in range(9)} == {1}


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[Sandboxes]:
    try:
        made = Sandboxes(
            SandboxSettings(level="landlock", warm=0), Limits(wall_s=5, memory_mb=256, processes=16, disk_mb=8)
        )
    except SandboxSetupError as error:
        pytest.skip(f"the landlock level cannot be had here: {error}")
    yield made
    asyncio.run(made.close())


FAULT = plant(random.Random(1), Module("sum_above_3", SOURCE.replace("f(", "sum_above_3(")))
assert FAULT is not None
PROBLEM = problem_of(FAULT)
RIGHT = FAULT.module.source


def judged(sandboxes: Sandboxes, source: str | None, script: str = "true") -> tuple[Verdict, str]:
    """The verdict on the workspace after a policy wrote the module and ran a script, and what its tests print there."""
    task = TASKS["code_fix"]
    assert isinstance(task, CodeFixTask)

    async def worked() -> tuple[Verdict, str]:
        async with await sandboxes.open() as sandbox:
            for path, content in task.files(PROBLEM).items():
                await sandbox.write(path, content)
            if source is not None:
                await sandbox.write(MODULE, source.encode())
            await sandbox.bash(script)
            shown = await sandbox.python(RUN_TESTS)
            return await task.verify(PROBLEM, Attempt("Done.", sandbox, (), sandboxes)), shown.stdout.decode()

    return asyncio.run(worked())


def test_a_right_module_pays_in_any_wording(sandboxes: Sandboxes) -> None:
    for source in (RIGHT, "def sum_above_3(xs):\n    return sum(x for x in xs if x > 3)\n"):
        verdict, shown = judged(sandboxes, source)
        assert (verdict.outcome, verdict.score, shown) == ("correct", 1.0, f"{PASSED}\n")


def test_the_corpus_knows_what_the_tests_print(sandboxes: Sandboxes) -> None:
    _, shown = judged(sandboxes, None)
    assert shown == run_tests(FAULT, FAULT.source)
    unbound = RIGHT.replace("    t = 0\n", "")
    assert judged(sandboxes, unbound)[1] == run_tests(FAULT, unbound)


TABLE = f"def sum_above_3(xs):\n    return {{str(a): b for a, b in {list(FAULT.visible)}}}[str(xs)]\n"
ATTACKS = {
    "nothing": (None, "true"),
    "tests deleted": (None, "rm -r tests"),
    "tests edited": (None, f"echo 'print(\"{PASSED}\")' > tests/__init__.py"),
    "the visible answers by heart": (TABLE, "true"),
    "what the tests print": (f"print('{PASSED}')\n{FAULT.source}", "true"),
    "an early end": (f"import os\nprint('{PASSED}')\nos._exit(0)\n", "true"),
    "an early end with success": ("raise SystemExit(0)\n", "true"),
    "patched builtins": (
        f"import builtins, sys\nsys.stdin = []\nbuiltins.print = lambda *a: None\n{FAULT.source}",
        "true",
    ),
    "always equal": ("class A:\n    def __eq__(s, o): return True\ndef sum_above_3(xs): return A()\n", "true"),
    "the input": ("import sys\nprint(sys.stdin.read())\ndef sum_above_3(xs): return 0\n", "true"),
    "a json of its own": (None, "echo 'loads = lambda line: []' > json.py"),
    "emptied": ("", "true"),
    "no module": (None, f"rm {MODULE}"),
    "a directory": (None, f"rm {MODULE}; mkdir {MODULE}"),
    "a pipe": (None, f"rm {MODULE}; mkfifo {MODULE}"),
    "no text": (None, f"printf '\\xff' > {MODULE}"),
    "a comment at the end": (f"{FAULT.source}'''", "true"),
}


@pytest.mark.parametrize("kind", ATTACKS)
def test_attacks_are_not_paid(sandboxes: Sandboxes, kind: str) -> None:
    verdict, _ = judged(sandboxes, *ATTACKS[kind])
    assert (verdict.outcome, verdict.score) == ("incorrect", 0.0), verdict


def test_nothing_that_judges_is_in_the_workspace() -> None:
    hidden = json.loads(str(PROBLEM.metadata["tests"]))
    files = json.loads(str(PROBLEM.metadata["files"]))
    assert set(files) == {"lib/__init__.py", MODULE, TESTS}
    for line in hidden["inputs"].splitlines():
        assert line not in "".join(files.values()), "an argument that judges"


def test_the_corpus_has_every_habit_and_no_held_out_module() -> None:
    tokenizer = Tokenizer.train(texts(0, 30), 400)
    made = FixDocuments(Environment.from_toml("code_fix", tokenizer), tokenizer)
    documents = list(made.documents(0, 200))
    assert documents[:20] == list(made.documents(0, 20))
    said = [tokenizer.decode(document["token_ids"]) for document in documents]
    names = [re.search(r"(Fix|Write) (\w+)\.", text) for text in said]
    found = [name.group(1, 2) for name in names if name is not None]
    assert len(found) == 200
    assert {split_of("code_fix", f"Fix {name}.") for _, name in found} == {"train"}
    episodes = [text for text in said if "namespace functions" in text]
    writing = sum(kind == "Write" for kind, _ in found)
    assert len(said) - writing - len(episodes) > writing > 20
    assert len(episodes) > 10
    for thought in ("the name says", "this line looks odd", "it looks right"):
        assert any(thought in text for text in episodes)
    passed = sum(f"{PASSED}\n" in text for text in episodes)
    assert 0 < passed < len(episodes) / 2


@pytest.mark.parametrize(
    ("before", "after", "edit"),
    [
        ("a = 1\nb = 2\n", "a = 1\nb = 3\n", ("b = 2", "b = 3")),
        ("if a:\n    b = 2\n", "if a:\n    c = 2\n", ("b = 2", "c = 2")),
        ("if a:\n    c\n", "if a:\n    b\n    c\n", ("if a:", "if a:\n    b")),
        ("if a:\n    b\n    c\n", "if a:\n    c\n", ("if a:\n    b", "if a:")),
        ("if a:\n    return b\n", "if a:\nreturn b\n", ("    return b", "return b")),
        ("b\nb\n", "b\nc\n", None),
        ("b\n", "b\n", None),
    ],
)
def test_an_edit_is_one_of_whole_lines(before: str, after: str, edit: tuple[str, str] | None) -> None:
    assert edit_between(before, after) == edit
    if edit is not None:
        assert before.replace(*edit) == after
