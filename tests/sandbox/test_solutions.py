"""Verification of code: right solutions pass whatever form their tests have, and no attack on the tests scores."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmoe.config.tables.pools import JsonlPool
from nmoe.envs.attacks.code import function_attacks, script_attacks
from nmoe.envs.check import check_environment
from nmoe.envs.pools import build_pool
from nmoe.envs.tasks import TASKS, Attempt
from nmoe.errors import UserError
from nmoe.grading.code import verify, wire
from nmoe.grading.code.extract import code_of, definitions
from nmoe.sandbox.api import Result, Sandbox, SandboxSetupError
from nmoe.sandbox.sandboxes import Sandboxes
from nmoe.types import Problem, Verdict

HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": (
        "from typing import List\n\n\ndef double(x: int) -> int:\n    return 2 * x\n\n\n"
        'def total(numbers: List[int]) -> int:\n    """Twice the sum.\n    >>> total([1, 2])\n    6\n    """\n'
    ),
    "canonical_solution": "    return double(sum(numbers))\n",
    "entry_point": "total",
    "test": (
        "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate([1, 2]) == 6\n    assert candidate([]) == 0\n"
        "    assert candidate([5]) == double(5)\n"
    ),
}
MBPP = {
    "task_id": 11,
    "text": "Write a function to remove the first and the last occurrence of a character.",
    "code": "def remove_Occ(s, ch):\n    s = s.replace(ch, '', 1)\n    return s[::-1].replace(ch, '', 1)[::-1]",
    "test_list": [
        'assert remove_Occ("hello","l") == "heo"',
        'assert remove_Occ("abcda","a") == "bcd"',
        'assert remove_Occ("PHP","P") == "H"',
    ],
    "test_setup_code": "",
}
PAIRS = {
    "text": "Find the longest chain.",
    "code": (
        "class Pair:\n    def __init__(self, a, b):\n        self.a = a\n        self.b = b\n"
        "def longest(pairs):\n    return max(pair.b - pair.a for pair in pairs)\n"
    ),
    "test_list": ["assert longest([Pair(1, 4), Pair(2, 9)]) == 7"],
}
EDIT = {
    "problem": "Make `mean` in stats.py work for an empty list (0.0), and add `median`.",
    "files": {
        "stats.py": "def mean(values):\n    return sum(values) / len(values)\n",
        "test_stats.py": "from stats import mean\n\ndef test_mean():\n    assert mean([1, 3]) == 2\n",
        "data/limits.json": '{"most": 5}',
        "tools/limits.py": "import json\n\ndef most():\n    return json.load(open('/workspace/data/limits.json'))['most']\n",
    },
    "tests": {
        "test_hidden.py": (
            "import unittest\nimport stats\nfrom stats import mean, median\nfrom tools.limits import most\n\n"
            "def test_mean():\n    assert mean([]) == 0.0\n    assert mean([1, 3]) == 2\n\n"
            "class Median(unittest.TestCase):\n"
            "    def test_odd(self):\n        self.assertEqual(median([3, 1, 2]), 2)\n"
            "    def test_even(self):\n        self.assertEqual(stats.median([4, 1, 2, 3]), 2.5)\n"
            "    def test_none(self):\n        with self.assertRaises(ValueError):\n            median([])\n\n"
            "def test_most():\n    assert most() == 5\n"
        )
    },
    "solution": {
        "stats.py": (
            "def mean(values):\n    return sum(values) / len(values) if values else 0.0\n\n"
            "def median(values):\n    if not values:\n        raise ValueError('no values')\n"
            "    ordered = sorted(values)\n    middle = len(ordered) // 2\n"
            "    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2\n"
        )
    },
    "protected": ["test_stats.py", "data/limits.json"],
}
SEARCH = {
    "question": "Which port does the server listen on?",
    "answer": "8421",
    "files": {"etc/server.toml": "port = 8421\n"},
}
PROGRAM = {
    "problem": "Print the sum of the numbers.",
    "tests": [
        {"type": "stdin_stdout", "input": "1 2\n", "output": "3\n"},
        {"input": "8 8400 13\n", "output": "8421\n"},
    ],
    "solutions": ["print(sum(map(int, input().split())))"],
}
RECORDS = {"humaneval": HUMANEVAL, "mbpp": MBPP, "program": PROGRAM, "code_edit": EDIT, "file_search": SEARCH}


Judge = Callable[..., Verdict]


def problem_of(task_type: str, record: dict[str, object]) -> Problem:
    task = TASKS[task_type]
    read = task.read_record(record)
    assert read is not None
    question, gold, metadata = read
    problem = Problem("demo/0", task_type, question, gold, "demo", metadata)
    task.check_gold(problem)
    return problem


@pytest.fixture
def judge(graders: Sandboxes, loop: asyncio.Runner, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """The verdict on an answer, with a second for what does not end, and longer where others have the CPUs. An attempt that the
    machine's load ended says nothing of the answer, so it is made again."""
    monkeypatch.setattr(verify, "LIMITS", verify.LIMITS.__class__(wall_s=1.5, cpu_s=1.5, starved_s=15.0))

    def judged(task_type: str, answer: str, record: dict[str, object] | None = None) -> Verdict:
        problem = problem_of(task_type, record or RECORDS[task_type])
        attempt = Attempt(answer, None, (), graders)
        for _ in range(10):
            verdict = loop.run(TASKS[task_type].verify(problem, attempt))
            if not verdict.reason.startswith("the machine is overloaded"):
                break
        return verdict

    return judged


@pytest.mark.parametrize("task_type", RECORDS)
def test_the_gold_answer_is_right_and_the_other_wrong(judge: Judge, task_type: str) -> None:
    right, wrong = TASKS[task_type].example_answers(problem_of(task_type, RECORDS[task_type]))
    verdict = judge(task_type, right)
    assert (verdict.outcome, verdict.score) == ("correct", 1.0), verdict
    verdict = judge(task_type, wrong)
    assert (verdict.outcome, verdict.score) == ("incorrect", 0.0), verdict


RIGHT = "def total(numbers):\n    return 2 * sum(numbers)\n"


@pytest.mark.parametrize(
    "answer",
    [
        RIGHT,
        f"```python\n{RIGHT}```",
        f"First I thought:\n```python\ndef total(numbers): pass\n```\nbut it is:\n```python\n{RIGHT}```\nDone.",
        "    return double(sum(numbers))",
        "def total(numbers: List[int]) -> int:\n    print('x' * 10**6)\n    return double(sum(numbers))",
        "def helper(n):\n    return 2 * n\ntotal = lambda numbers: helper(sum(numbers))\ndef total(n, t=total): return t(n)",
    ],
)
def test_forms_of_a_right_solution(judge: Judge, answer: str) -> None:
    verdict = judge("humaneval", answer)
    assert verdict.outcome == "correct", verdict


ATTACKS = function_attacks("total")


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_scores(judge: Judge, attack: str) -> None:
    verdict = judge("humaneval", ATTACKS[attack])
    assert (verdict.outcome, verdict.score, verdict.layer) == ("incorrect", 0.0, "tests"), verdict


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "def total(numbers):\n    while True: pass",
        "import time\ntime.sleep(99)",
        "import os\nos.fork()",
    ],
)
def test_what_does_not_end_is_wrong(judge: Judge, code: str) -> None:
    verdict = judge("humaneval", code)
    assert (verdict.outcome, verdict.score) == ("incorrect", 0.0)


def test_the_same_attack_scores_where_tests_and_solution_share_a_process() -> None:
    """The attacks are real: in one process, as the original harness runs them, they pass."""
    test = "\nassert total([1, 2]) == 6"
    exec(ATTACKS["always equal"] + test, {})
    with pytest.raises(SystemExit) as caught:
        exec(ATTACKS["sys.exit"] + test, {})
    assert caught.value.code == 0, "what a harness takes for success"


def test_assertions_that_a_no_op_passes_prove_nothing(judge: Judge) -> None:
    vacuous = {**MBPP, "test_list": ["remove_Occ('a', 'b')", "assert not remove_Occ('', '')"]}
    verdict = judge("mbpp", "def remove_Occ(s, ch):\n    return ''", vacuous)
    assert verdict.outcome == "incorrect"
    assert "prove nothing" in verdict.reason


def test_assertions_that_never_call_the_solution(judge: Judge) -> None:
    idle = {**MBPP, "test_list": ["assert remove_Occ is not None"]}
    assert judge("mbpp", MBPP["code"], idle).outcome == "incorrect"


def test_one_failing_assertion_is_enough(judge: Judge) -> None:
    code = "def remove_Occ(s, ch):\n    return {'hello': 'heo', 'abcda': 'bcd'}.get(s)"
    verdict = judge("mbpp", code)
    assert verdict.outcome == "incorrect"
    assert "test 3 of 3" in verdict.reason


def test_objects_of_the_solutions_own_can_be_given_back(judge: Judge) -> None:
    assert judge("mbpp", PAIRS["code"], PAIRS).outcome == "correct"
    assert judge("mbpp", PAIRS["code"].replace("pair.b - pair.a", "pair.b"), PAIRS).outcome == "incorrect"


def test_a_function_named_like_a_builtin(judge: Judge) -> None:
    record = {"text": "Add.", "code": "def sum(a, b):\n    return a + b", "test_list": ["assert sum(10, 15) == 25"]}
    assert judge("mbpp", record["code"], record).outcome == "correct"
    assert judge("mbpp", "def total(a, b): return a + b", record).outcome == "incorrect", (
        "the builtin does not stand in"
    )


def test_results_keep_their_types(judge: Judge) -> None:
    values = (
        "[(1, 2), {3, 4}, frozenset({5}), {1: 'a', (2, 3): b'b'}, 1.5, 10**400, None, True, 2j, float('inf'), range(3)]"
    )
    record = {
        "prompt": "Values.",
        "code": f"def values():\n    return {values}",
        "test_list": [
            f"assert values() == {values}",
            "assert [type(v).__name__ for v in values()][:3] == ['tuple', 'set', 'frozenset']",
        ],
    }
    assert judge("mbpp", record["code"], record).outcome == "correct"
    listed = "def values():\n    return [[1, 2], [3, 4], [5]] + " + values + "[3:]"
    assert judge("mbpp", listed, record).outcome == "incorrect", "a list is no tuple"


def test_subclasses_of_plain_data_are_what_they_extend(judge: Judge) -> None:
    record = {
        "text": "Count.",
        "code": "from collections import Counter\ndef count(s):\n    return Counter(s)",
        "test_list": ["assert count('aab') == {'a': 2, 'b': 1}"],
    }
    assert judge("mbpp", record["code"], record).outcome == "correct"


def test_numbers_of_numpy_are_numbers(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    # The package may have to come from the disk first.
    monkeypatch.setattr(verify, "LIMITS", verify.LIMITS.__class__(wall_s=10.0, cpu_s=5.0, starved_s=30.0))
    record = {
        "text": "Double.",
        "code": "def double(x):\n    return 2 * x\ndef big(x):\n    return x > 2",
        "test_list": ["assert double(3) == 6", "assert big(3) is True", "assert {double(1): 0} == {2: 0}"],
    }
    numpy = "import numpy\ndef double(x):\n    return numpy.int64(x) * 2\ndef big(x):\n    return numpy.float32(x) > 2"
    verdict = judge("mbpp", numpy, record)
    assert verdict.outcome == "correct", verdict
    assert judge("mbpp", numpy.replace("* 2", "* 3"), record).outcome == "incorrect"


def test_objects_within_objects_and_what_classes_hold(judge: Judge) -> None:
    code = (
        "class Node:\n    limit = 9\n    def __init__(self, value, rest=None):\n        self.value, self.rest = value, rest\n"
        "    @staticmethod\n    def two():\n        return 2\n"
        "def build():\n    return Node(1, Node(5))"
    )
    tests = [
        "assert build().rest.value == 5",
        "assert build().rest.rest is None",
        "assert Node.limit == 9 and Node.two() == 2",
    ]
    record = {"text": "Build.", "code": code, "test_list": tests}
    assert judge("mbpp", code, record).outcome == "correct"
    assert judge("mbpp", code.replace("Node(5)", "Node(4)"), record).outcome == "incorrect"


@pytest.mark.parametrize("test", ["assert Box(3).size", "assert Box(3).size != 4", "assert not Box(3).size == 4"])
def test_an_object_in_an_attribute_is_neither_true_nor_unequal(judge: Judge, test: str) -> None:
    code = "class Box:\n    def __init__(self, size):\n        self.size = size"
    record = {"text": "A box.", "code": code, "test_list": [test]}
    assert judge("mbpp", code, record).outcome == "correct"
    assert judge("mbpp", code.replace("= size", "= object()"), record).outcome == "incorrect"
    module = {
        **EDIT,
        "tests": {"test_a.py": f"from stats import Box\ndef test_box():\n    {test.replace('(3).size', '')}\n"},
    }
    answer = "```stats.py\nBox = object()\n```"
    assert judge("code_edit", answer, module).outcome == "incorrect"


def test_exceptions_are_those_the_tests_expect(judge: Judge) -> None:
    record = {
        "text": "Refuse.",
        "code": "class Refused(ValueError):\n    pass\ndef refuse(x):\n    if x:\n        raise Refused('no')\n    return 1",
        "test_list": [
            "try:\n    refuse(1)\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'no'",
            "assert refuse(0) == 1",
        ],
    }
    assert judge("mbpp", record["code"], record).outcome == "correct"
    assert judge("mbpp", "def refuse(x):\n    if x: raise KeyError('no')\n    return 1", record).outcome == "incorrect"


# code edit


def edit(
    graders: Sandboxes, loop: asyncio.Runner, script: str, record: dict[str, object] = EDIT, *, answer: str = "done"
) -> Verdict:
    """The verdict on a workspace after a policy's script has changed it."""
    problem = problem_of("code_edit", record)
    task = TASKS["code_edit"]

    async def worked() -> Verdict:
        async with await graders.open() as sandbox:
            for path, content in task.files(problem).items():
                await sandbox.write(path, content)
            result = await sandbox.bash(script)
            assert result.failure == "ok", result
            return await task.verify(problem, Attempt(answer, sandbox, (), graders))

    return loop.run(worked())


WRITE_SOLUTION = "cat > stats.py << 'END'\n" + EDIT["solution"]["stats.py"] + "END\n"


def test_an_edited_workspace(graders: Sandboxes, loop: asyncio.Runner) -> None:
    assert edit(graders, loop, WRITE_SOLUTION).outcome == "correct"
    assert edit(graders, loop, "true").outcome == "incorrect", "nothing was done"
    assert edit(graders, loop, WRITE_SOLUTION + "sed -i 's/0.0/1.0/' stats.py").outcome == "incorrect"
    assert (
        edit(graders, loop, "cd data; " + WRITE_SOLUTION.replace("stats.py <<", "../stats.py <<")).outcome == "correct"
    )


@pytest.mark.parametrize("script", script_attacks("stats.py", ["mean", "median"]))
def test_no_edit_but_the_right_one_scores(graders: Sandboxes, loop: asyncio.Runner, script: str) -> None:
    verdict = edit(graders, loop, script)
    assert (verdict.outcome, verdict.score) == ("incorrect", 0.0), verdict


def test_protected_files_are_restored(graders: Sandboxes, loop: asyncio.Runner) -> None:
    """The hidden tests need data/limits.json as it was."""
    for spoil in (
        "rm -r data",
        "echo '{}' > data/limits.json",
        "rm data/limits.json; ln -s /etc/passwd data/limits.json",
    ):
        assert edit(graders, loop, f"{WRITE_SOLUTION}{spoil}").outcome == "correct", spoil
    unprotected = {**EDIT, "protected": []}
    assert edit(graders, loop, f"{WRITE_SOLUTION}rm -r data", unprotected).outcome == "incorrect"


def test_tests_that_pass_untouched_prove_nothing(graders: Sandboxes, loop: asyncio.Runner) -> None:
    vacuous = {
        **EDIT,
        "tests": {"test_old.py": "from stats import mean\ndef test_mean():\n    assert mean([1, 3]) == 2\n"},
    }
    verdict = edit(graders, loop, WRITE_SOLUTION, vacuous)
    assert verdict.outcome == "incorrect"
    assert "prove nothing" in verdict.reason


def test_hidden_tests_are_nowhere_the_policy_looks(graders: Sandboxes, loop: asyncio.Runner) -> None:
    """While its own module is being tested, the solution looks for the tests' words in every file and process it can read."""
    spy = (
        "import glob, os\n"
        "def mean(values):\n"
        "    found = []\n"
        "    for path in glob.glob('/workspace/**', recursive=True) + glob.glob('/tmp/**', recursive=True) "
        "+ glob.glob('/proc/[0-9]*/cmdline') + glob.glob('/proc/[0-9]*/environ'):\n"
        "        try:\n"
        "            with open(path, 'rb') as file: found.append(b'assert' b'Raises' in file.read(1 << 20))\n"
        "        except OSError: pass\n"
        "    if any(found): return 0.0 if not values else 2\n"
        "    raise RuntimeError('nothing found')\n"
        "median = mean\n"
    )
    verdict = edit(graders, loop, f"cat > stats.py << 'END'\n{spy}END\n")
    assert verdict.outcome == "incorrect"
    assert "nothing found" in verdict.reason


def test_an_answer_can_hold_whole_files(judge: Judge) -> None:
    solution = EDIT["solution"]["stats.py"]
    assert judge("code_edit", f"I changed it.\n```python stats.py\n{solution}```\n").outcome == "correct"
    assert judge("code_edit", f"```../stats.py\n{solution}```").outcome == "incorrect"
    assert judge("code_edit", solution).outcome == "incorrect", "no block says which file"


# what cannot be graded


def test_a_workspace_that_is_lost_is_no_verdict(graders: Sandboxes, loop: asyncio.Runner) -> None:
    """Before its protected files are restored; the answer is right."""
    problem = problem_of("code_edit", EDIT)

    async def verified() -> Verdict:
        async with await graders.open() as sandbox:
            await sandbox.close()
            return await TASKS["code_edit"].verify(problem, Attempt("done", sandbox, (), graders))

    verdict = loop.run(verified())
    assert (verdict.outcome, verdict.score) == ("error", 0.0), verdict


class Cannot:
    async def open(self, workspace: Path | None = None) -> Sandbox:
        raise SandboxSetupError("no more processes")


@pytest.mark.parametrize("task_type", ["humaneval", "mbpp", "program", "code_edit"])
def test_a_sandbox_that_does_not_open_is_no_verdict(task_type: str) -> None:
    problem = problem_of(task_type, RECORDS[task_type])
    right, _ = TASKS[task_type].example_answers(problem)
    verdict = asyncio.run(TASKS[task_type].verify(problem, Attempt(right, None, (), Cannot())))
    assert (verdict.outcome, verdict.score) == ("error", 0.0)


@pytest.mark.parametrize(
    ("task_type", "change", "message"),
    [
        ("humaneval", {"test": "def chek(candidate): pass"}, "does not define check"),
        ("humaneval", {"entry_point": "sum_all"}, "does not define sum_all"),
        ("humaneval", {"test": 3}, "field 'test' holds a number"),
        ("mbpp", {"test_list": ["assert other(1)"]}, "nothing that 'code' defines"),
        ("mbpp", {"test_list": ["assert ("]}, "no Python"),
        ("mbpp", {"test_list": "assert remove_Occ"}, "not a list of texts"),
        ("mbpp", {"code": None}, "no field 'code'"),
        ("code_edit", {"files": {"../x.py": ""}}, "is not a path within a workspace"),
        ("code_edit", {"files": {"x.txt": ""}, "protected": []}, "protected"),
        ("code_edit", {"protected": ["nowhere.py"]}, "nowhere.py"),
        ("code_edit", {"solution": {}}, "changes nothing"),
        ("file_search", {"answer": " `` "}, "nothing is left"),
        ("file_search", {"files": {"x": 3}}, "'x' holds a number"),
    ],
)
def test_records_that_are_wrong_are_named(
    tmp_path: Path, task_type: str, change: dict[str, object], message: str
) -> None:
    if change == {"files": {"x.txt": ""}, "protected": []}:
        change, message = {**change, "solution": {"x.txt": "y"}}, "no Python module"
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in (RECORDS[task_type], {**RECORDS[task_type], **change})))
    with pytest.raises(UserError, match=message) as caught:
        build_pool("demo", JsonlPool(type="jsonl", path=str(path), task_type=task_type))  # type: ignore[arg-type]
    assert f"{path}:2: " in str(caught.value)


@pytest.mark.parametrize("task_type", RECORDS)
def test_a_pool_of_records(tmp_path: Path, task_type: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(RECORDS[task_type]))
    pool = build_pool("demo", JsonlPool(type="jsonl", path=str(path), task_type=task_type))  # type: ignore[arg-type]
    (problem,) = pool.take(1)
    assert problem.metadata == {"record": 0, **problem_of(task_type, RECORDS[task_type]).metadata}
    hidden = [text for text in ("== 6", "heo", "assertRaises", "8421") if text in problem.question]
    assert not hidden, "the question does not tell"


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed (apt-get install bubblewrap)")
@pytest.mark.parametrize("task_type", RECORDS)
def test_an_environment_of_records_checks_out(tmp_path: Path, task_type: str) -> None:
    """`nmoe env check`: the gold solution is run and right, the wrong one is run and wrong."""
    (tmp_path / "data.jsonl").write_text(json.dumps(RECORDS[task_type]))
    (tmp_path / "environment.toml").write_text(
        f'env_id = "code"\n[task_pool]\ntype = "jsonl"\npath = "data.jsonl"\ntask_type = "{task_type}"\n'
    )
    lines = list(check_environment(tmp_path, None))
    assert lines[-1] == "ok"
    assert any(line.startswith("  right answer") and "correct (" in line for line in lines)


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed (apt-get install bubblewrap)")
@pytest.mark.parametrize("name", ["humaneval", "mbpp", "deepcoder"])
def test_packaged_environments_name_these_tasks(name: str) -> None:
    """Without their data, a problem of the same form stands in for them, and is run."""
    lines = list(check_environment(Path(name), None))
    assert any(line.startswith("  right answer") and "correct (tests: all tests pass)" in line for line in lines)
    assert lines[-1] == "ok"


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("8421", True),
        (" `8421`\n", True),
        ("8421.", True),
        ('"8421".', True),
        ("`8421.`", True),
        ("port 8421", False),
        ("842", False),
        ("", False),
    ],
)
def test_file_search(answer: str, right: bool) -> None:
    verdict = asyncio.run(TASKS["file_search"].verify(problem_of("file_search", SEARCH), Attempt(answer)))
    assert (verdict.outcome == "correct") is right


PLAIN = (
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text()
        | st.binary()
        | st.complex_numbers(allow_nan=False),
        lambda inner: (
            st.lists(inner)
            | st.lists(inner).map(tuple)
            | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner)
        ),
        max_leaves=20,
    )
    | st.sets(st.integers() | st.text())
    | st.frozensets(st.text())
)


def refuse(value: object) -> int:
    raise AssertionError(value)


@given(PLAIN)
def test_plain_data_comes_back_as_it_was(value: object) -> None:
    back = wire.decode(json.loads(json.dumps(wire.encode(value, refuse))), refuse)
    assert back == value
    assert type(back) is type(value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
        max_leaves=12,
    )
)
def test_decoding_is_total(message: object) -> None:
    """Any JSON becomes exact builtin types, or a WireError."""
    try:
        value = wire.decode(message, lambda number: None)
    except wire.WireError:
        return
    assert type(value).__module__ == "builtins"


@given(st.text())
def test_extraction_is_total(answer: str) -> None:
    assert isinstance(code_of(answer), str)
    assert isinstance(definitions(answer), tuple)


KINDS = {
    "OSError's family": {
        "code": "def load(name):\n    raise FileNotFoundError(name)",
        "test_list": [
            "try:\n    load('a')\nexcept OSError as error:\n    assert type(error) is FileNotFoundError\nelse:\n    assert False",
        ],
        "wrong": "def load(name):\n    raise ValueError(name)",
    },
    "EOFError": {
        "code": "def parse(text):\n    if not text:\n        raise EOFError('nothing')\n    return text",
        "test_list": [
            "try:\n    parse('')\nexcept EOFError:\n    pass\nelse:\n    assert False",
            "assert parse('a') == 'a'",
        ],
        "wrong": "def parse(text):\n    return text",
    },
    "an OSError that ends no channel": {
        "code": "def load(name):\n    if name == 'a':\n        raise ConnectionResetError(name)\n    return name",
        "test_list": [
            "try:\n    load('a')\nexcept ConnectionError:\n    pass\nelse:\n    assert False",
            "assert load('b') == 'b'",
        ],
        "wrong": "def load(name):\n    raise ConnectionResetError(name)",
    },
    "a set-up with the solution's classes": {
        "code": (
            "class Node:\n    def __init__(self, data):\n        self.data, self.left, self.right = data, None, None\n"
            "def height(node):\n    return 0 if node is None else 1 + max(height(node.left), height(node.right))"
        ),
        "test_setup_code": "root = Node(1)\nroot.left = Node(2)\nroot.left.right = Node(3)",
        "test_list": ["assert height(root) == 3", "assert height(root.left) == 2"],
        "wrong": "class Node:\n    def __init__(self, data):\n        self.data = data\ndef height(node):\n    return 3",
    },
    "builtin types as arguments": {
        "code": "def without(values, kind):\n    return [value for value in values if type(value) is not kind]",
        "test_list": ["assert without((4, 5.5, 7), int) == [5.5]", "assert without([1, 'a'], str) == [1]"],
        "wrong": "def without(values, kind):\n    return list(values)",
    },
    "an exception of the solution's own": {
        "code": (
            "class Empty(Exception):\n    pass\nclass Short(Empty, ValueError):\n    pass\n"
            "def first(values):\n    if not values:\n        raise Short('none')\n    return values[0]"
        ),
        "test_list": [
            "try:\n    first([])\nexcept Empty as error:\n    assert str(error) == 'none'\nelse:\n    assert False",
            "try:\n    first([])\nexcept Short:\n    pass",
            "assert first([3]) == 3",
        ],
        "wrong": (
            "class Empty(Exception):\n    pass\nclass Short(Exception):\n    pass\n"
            "def first(values):\n    return values[0] if values else 0"
        ),
    },
    "operators of the solution's objects": {
        "code": (
            "class Point:\n    def __init__(self, x):\n        self.x = x\n"
            "    def __add__(self, other):\n        return Point(self.x + other.x)\n"
            "    def __rmul__(self, k):\n        return Point(k * self.x)\n"
            "    def __neg__(self):\n        return Point(-self.x)"
        ),
        "test_list": [
            "assert (Point(1) + Point(2)).x == 3",
            "assert (3 * Point(2)).x == 6",
            "assert (-Point(2)).x == -2",
        ],
        "wrong": "class Point:\n    x = 3\n    def __init__(self, x): pass\n    def __add__(self, other): return self",
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_tests(judge: Judge, kind: str) -> None:
    record = {"text": "Do it.", **{key: value for key, value in KINDS[kind].items() if key != "wrong"}}
    verdict = judge("mbpp", KINDS[kind]["code"], record)
    assert verdict.outcome == "correct", verdict
    verdict = judge("mbpp", KINDS[kind]["wrong"], record)
    assert verdict.outcome == "incorrect", verdict


@pytest.mark.parametrize("name", ["AssertionError", "Exception"])
def test_an_exception_that_would_catch_the_tests_own_failures(judge: Judge, name: str) -> None:
    """The tests' `assert False` is none of what the solution raises, whatever class it gives for its own."""
    record = {
        "text": "Refuse an empty cart.",
        "code": "class EmptyCart(Exception):\n    pass\ndef checkout(items):\n    if not items: raise EmptyCart\n    return 1",
        "test_list": [
            "try:\n    checkout([])\n    assert False\nexcept EmptyCart:\n    pass",
            "assert checkout([1]) == 1",
        ],
    }
    assert judge("mbpp", record["code"], record).outcome == "correct"
    bought = f"EmptyCart = {name}\ndef checkout(items):\n    return 1"
    verdict = judge("mbpp", bought, record)
    assert verdict.outcome == "incorrect", verdict
    # One that does raise it is as right as any other.
    raising = f"EmptyCart = {name}\ndef checkout(items):\n    if not items: raise EmptyCart\n    return 1"
    assert judge("mbpp", raising, record).outcome == "correct"


@pytest.mark.parametrize("name", ["RuntimeError", "TypeError"])
def test_an_alias_of_a_builtin_exception_hides_none_of_the_tests_own(judge: Judge, name: str) -> None:
    """A RuntimeError that the tests raise, and the TypeError that refuses to compare the solution's objects."""
    record = {
        "text": "Refuse an empty cart.",
        "code": "class EmptyCart(Exception):\n    pass\ndef checkout(items):\n    if not items: raise EmptyCart\n    return 1",
        "test_list": [
            "try:\n    if checkout([]) != 1: raise RuntimeError('no')\n    assert False\nexcept EmptyCart:\n    pass",
            "assert checkout([1]) == 1",
        ],
    }
    assert judge("mbpp", record["code"], record).outcome == "correct"
    given = {"RuntimeError": "return 1 if items else 2", "TypeError": "return 1 if items else object()"}[name]
    verdict = judge("mbpp", f"EmptyCart = {name}\ndef checkout(items):\n    {given}", record)
    assert verdict.outcome == "incorrect", verdict
    # A solution may call a builtin exception its own, and raise one of its subclasses.
    raising = "EmptyCart = LookupError\ndef checkout(items):\n    if not items: raise KeyError('empty')\n    return 1"
    assert judge("mbpp", raising, record).outcome == "correct"
    taking = {**record, "test_list": [*record["test_list"], "assert checkout([EmptyCart]) == 1"]}
    assert judge("mbpp", raising, taking).outcome == "correct"


# An object for which every computation and every question has the answer that a test may want.
AGREEABLE = """
class Agreeable:
    def __init__(self, *_): pass
    __sub__ = __rsub__ = __mod__ = __neg__ = __abs__ = lambda *_: 0.0
    __add__ = __radd__ = __mul__ = __rmul__ = __truediv__ = __pow__ = lambda *_: 0.0
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = lambda *_: True
    __float__ = __round__ = lambda *_: 0.0
    __len__ = __int__ = __index__ = __hash__ = lambda *_: 0
    __getitem__ = lambda self, _: self
    isclose = startswith = endswith = issubset = issuperset = equals = lambda *_: True
    count = index = find = norm = lambda self, *_: self
def f(*_): return Agreeable()
def g(*_): return [Agreeable()]
Point = Agreeable
"""
# The gold has no class, or one with these operators.
NO_CLASS = "def f(x):\n    return x / 2\ndef g(x):\n    return [x / 2]\n"
POINTS = (
    "class Point:\n    def __init__(self, x):\n        self.x = x\n    def norm(self):\n        return abs(self.x)\n"
    "    def __sub__(self, other):\n        return Point(self.x - getattr(other, 'x', other))\n"
    "    def __mul__(self, other):\n        return self.x * other.x\n"
)


AGREEMENTS = [
    (NO_CLASS, "assert abs(f(1) - 0.5) < 1e-6"),
    (NO_CLASS, "assert 0.5 - f(1) == 0"),
    (NO_CLASS, "assert (f(1) - 0.5) ** 2 < 1e-6"),
    (NO_CLASS, "assert abs(g(1)[0] - 0.5) < 1e-6"),
    (NO_CLASS, "assert max(abs(a - b) for a, b in zip(g(1), [0.5])) < 1e-6"),
    (NO_CLASS, "import math\nassert math.isclose(f(1), 0.5)"),
    (NO_CLASS, "assert round(f(1), 1) == 0.5"),
    (NO_CLASS, "assert int(f(9) * 2) % 9 == 0"),
    (NO_CLASS, "assert not f(1) % 0.5"),
    (NO_CLASS, "assert 0.5 in g(1)"),
    (NO_CLASS, "assert f(1) == f(1) == 0.5"),
    (NO_CLASS, "assert sorted(g(1)) == [0.5]"),
    ("def f(x):\n    return 'ab'\n", "assert f(1).startswith('ab')"),
    ("def f(x):\n    return {1}\n", "assert f(1).issubset({1, 2}) and f(1).issuperset({1})"),
    (POINTS, "assert abs(Point(3).norm() - 3) < 1e-6"),
    (POINTS, "assert not Point(3).x - 3"),
    (POINTS, "assert (Point(3) - 3).norm() == 0"),
]


def test_the_gold_agrees_with_these_tests(judge: Judge) -> None:
    for code in dict(AGREEMENTS):
        record = {"text": "Do it.", "code": code, "test_list": [test for other, test in AGREEMENTS if other == code]}
        verdict = judge("mbpp", code, record)
        assert verdict.outcome == "correct", verdict


@pytest.mark.parametrize(("code", "test"), AGREEMENTS)
def test_no_object_agrees_with_a_test(judge: Judge, code: str, test: str) -> None:
    """The judge gives none of them what the test expects, and no operator of theirs makes a value that decides."""
    verdict = judge("mbpp", AGREEABLE, {"text": "Do it.", "code": code, "test_list": [test]})
    assert verdict.outcome == "incorrect", verdict


@pytest.mark.parametrize(
    "test",
    ["assert NAME.startswith('ab')", "assert NAME.count('a') == 1", "assert LIMIT - 5 == 0", "assert 5 in PORTS"],
)
def test_no_object_of_a_module_agrees_with_a_test(judge: Judge, test: str) -> None:
    record = {
        **EDIT,
        "tests": {"test_a.py": f"from stats import LIMIT, NAME, PORTS\ndef test_it():\n    {test}\n"},
        "solution": {"stats.py": "NAME, LIMIT, PORTS = 'ab', 5, [5]\n"},
    }
    right = "```stats.py\nNAME, LIMIT, PORTS = 'ab', 5, [5]\n```"
    assert judge("code_edit", right, record).outcome == "correct"
    agreeable = AGREEABLE.replace("count = index", "count = lambda *_: 1\n    index").strip("\n")
    verdict = judge("code_edit", f"```stats.py\n{agreeable}\nNAME = LIMIT = PORTS = Agreeable()\n```", record)
    assert verdict.outcome == "incorrect", verdict


def test_a_tolerance_test_of_humaneval_is_not_deceived(judge: Judge) -> None:
    record = {
        **HUMANEVAL,
        "test": "def check(candidate):\n    assert abs(candidate([1.0, 2.0]) - 6.0) < 1e-6\n",
    }
    assert judge("humaneval", RIGHT, record).outcome == "correct"
    verdict = judge("humaneval", AGREEABLE + "def total(numbers): return Agreeable()", record)
    assert (verdict.outcome, verdict.score) == ("incorrect", 0.0), verdict


@pytest.mark.parametrize(
    "given", ["range(-10**15, 10**15)", "range(10**6)", "range(-10**30, 10**30)", "[range(-10**9, 10**9)]"]
)
def test_a_range_is_as_long_as_a_list_may_be(judge: Judge, given: str) -> None:
    record = {"text": "Do it.", "code": "def f(x):\n    return range(x + 1)\n", "test_list": ["assert 5 in f(5)"]}
    assert judge("mbpp", record["code"], record).outcome == "correct"
    verdict = judge("mbpp", f"def f(x):\n    return {given}", record)
    assert verdict.outcome == "incorrect", verdict


def test_exact_numbers_are_compared_as_numbers(judge: Judge) -> None:
    record = {
        "text": "Halve.",
        "code": "from fractions import Fraction\ndef half(x):\n    return Fraction(x) / 2",
        "test_list": ["assert half(1) == 0.5", "assert half(half(3)) * 4 == 3", "assert abs(half(1) - 0.5) < 1e-9"],
    }
    assert judge("mbpp", record["code"], record).outcome == "correct"
    decimal = "from decimal import Decimal\ndef half(x):\n    return Decimal(str(float(x))) / 2"
    assert judge("mbpp", decimal, {**record, "test_list": record["test_list"][:1]}).outcome == "correct"
    assert judge("mbpp", decimal.replace("/ 2", "/ 3"), record).outcome == "incorrect"
    deceiving = (
        "from fractions import Fraction\nclass Zero(Fraction):\n    __sub__ = __eq__ = lambda *_: 0\n"
        "def half(x):\n    return Zero(7)"
    )
    assert judge("mbpp", deceiving, record).outcome == "incorrect"


# What a solution could send the judge in its own words, so that the judge breaks: code that replaces the answer.
FORGED = """
import json, os, struct
def total(numbers):
    text = {message}
    os.write(3, struct.pack("<I", len(text)) + text) if len(text) < 65536 else __import__("socket").socket(
        fileno=os.dup(3)).sendall(struct.pack("<I", len(text)) + text)
    os.read(3, 1)
"""


@pytest.mark.parametrize(
    "message",
    [
        "json.dumps({'value': {'set': [n * (2**61 - 1) for n in range(99999)]}}).encode()",
        "json.dumps({'value': {'dict': [[n * (2**61 - 1), 0] for n in range(99999)]}}).encode()",
        'b\'{"value": {"handle": 1e999}}\'',
        'b\'{"value": {"handle": {}}}\'',
        'b\'{"value": {"complex": [1e999, "nan("]}}\'',
        'b\'{"value": {"range": [0, 1e999]}}\'',
        'b\'{"value": {"fraction": [1, 0]}}\'',
        'b\'{"value": {"decimal": "none"}}\'',
        "b'{\"value\": ' + b'[' * 10**6 + b']' * 10**6 + b'}'",
        "b'{\"value\": [' + b'[],' * 10**6 + b'[]]}'",
        'b\'{"raised": ["SystemExit", "KeyboardInterrupt", "GeneratorExit"], "message": "0"}\'',
        'b\'{"raised": [[]], "message": {}}\'',
        "b'\"\\\\ud800\"'",
        "b'\\xff' * 999",
    ],
)
def test_no_answer_breaks_the_judge(judge: Judge, message: str) -> None:
    verdict = judge("humaneval", FORGED.format(message=message))
    assert (verdict.outcome, verdict.score) == ("incorrect", 0.0), verdict
    assert "timeout" not in verdict.reason, "it is refused at once"


@pytest.mark.parametrize(
    "value", ["[n * (2**61 - 1) for n in range(99999)]", "10 ** 9", "[10 ** 8] * 99"], ids=["hashes", "steps", "many"]
)
def test_a_solution_that_exhausts_the_tests_is_wrong(judge: Judge, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends the judge's process because of what it was given, the sample is scored, not masked."""
    monkeypatch.setattr(verify, "LIMITS", verify.LIMITS.__class__(wall_s=10.0, cpu_s=0.5, starved_s=30.0))
    record = {
        "text": "Do it.",
        "code": "def f(x):\n    return [1, 2]\n",
        "test_list": ["found = f(1)\nassert sum(len(set(range(n))) for n in found) == 3 and len(set(found)) == 2"],
    }
    if value.startswith("10"):
        record = {"text": "Do it.", "code": "def f(x):\n    return 3\n", "test_list": ["assert sum(range(f(1))) == 3"]}
    assert judge("mbpp", record["code"], record).outcome == "correct"
    verdict = judge("mbpp", f"def f(x):\n    return {value}", record)
    assert (verdict.outcome, verdict.score) == ("incorrect", 0.0), verdict


def test_only_the_host_loses_a_judge() -> None:
    fine = Result("ok", 0, b"", b"", 0.1)
    for ended, outcome in (
        (Result("nonzero_exit", -11, b"", b"", 0.1), "incorrect"),
        (Result("nonzero_exit", 1, b"", b"MemoryError", 0.1), "incorrect"),
        (Result("sandbox_denied", -31, b"", b"", 0.1), "incorrect"),
        (Result("out_of_memory", None, b"", b"", 0.1), "incorrect"),
        (Result("timeout", None, b"", b"", 0.1, cpu_s=10.0), "incorrect"),
        (Result("nonzero_exit", -9, b"", b"", 0.1), "error"),
        (Result("internal_error", None, b"", b"", 0.1), "error"),
    ):
        assert verify._verdict(ended, fine, "nonce").outcome == outcome, ended


def test_a_function_as_an_argument_is_refused_by_its_name(judge: Judge) -> None:
    """What the judge cannot hand over fails the gold, too, so that the record is refused when the pool loads."""
    record = {
        "text": "Apply.",
        "code": "def twice(f, x):\n    return f(f(x))",
        "test_list": ["assert twice(lambda n: n + 1, 3) == 5"],
    }
    verdict = judge("mbpp", record["code"], record)
    assert verdict.reason.startswith("TypeError: a function cannot be given to the solution"), verdict


def test_an_object_that_equals_everything_under_an_operator(judge: Judge) -> None:
    """Sums of the solution's objects stay its objects: they equal nothing here."""
    record = {
        "text": "Add.",
        "code": "def make(n):\n    return n",
        "test_list": ["assert make(1) + make(2) == 3"],
    }
    assert judge("mbpp", record["code"], record).outcome == "correct"
    same = "class Same:\n    __eq__ = lambda *_: True\n    __add__ = lambda self, _: self\ndef make(n): return Same()"
    assert judge("mbpp", same, record).outcome == "incorrect"
