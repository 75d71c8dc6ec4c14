"""Programs tested by standard input and output: right ones pass whatever their style, and no hostile one scores."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from nmoe.envs.attacks.code import program_attacks
from nmoe.envs.tasks import TASKS, Attempt
from nmoe.grading.code import verify
from nmoe.grading.code.verify import Case, ProgramLimits, difference, verify_program
from nmoe.sandbox.api import Limits, Result, Sandbox
from nmoe.sandbox.sandboxes import Sandboxes
from nmoe.types import Problem, Verdict

# Sums of the numbers in each line, until the end of the input.
ADD = {
    "question": "For each line, print the sum of its numbers.",
    "input_output": json.dumps({"inputs": ["1 2\n3 4\n", "5\n", "-1 1 7\n0"], "outputs": ["3\n7\n", "5\n", "7\n0\n"]}),
    "solutions": json.dumps(["import sys\nfor line in sys.stdin:\n    print(sum(map(int, line.split())))\n"]),
}
CALLS = {
    "question": "Return the two numbers in order.",
    "starter_code": "class Solution:\n    def order(self, a: int, b: int) -> List[int]:",
    "input_output": json.dumps({"fn_name": "order", "inputs": [[3, 1], [0, 2]], "outputs": [[[1, 3]], [[0, 2]]]}),
    "solutions": ["class Solution:\n    def order(self, a: int, b: int) -> List[int]:\n        return sorted((a, b))"],
}
Judge = Callable[..., Verdict]


@pytest.fixture
def judge(graders: Sandboxes, loop: asyncio.Runner, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """The verdict on an answer, with less time for what does not end."""
    monkeypatch.setattr(verify, "LIMITS", Limits(wall_s=1.5, cpu_s=1.5, starved_s=15.0))
    task = TASKS["program"]

    def judged(answer: str, record: dict[str, Any] = ADD, seconds: float = 0.5) -> Verdict:
        read = task.read_record(record)
        assert read is not None
        question, gold, metadata = read
        problem = Problem("p/0", "program", question, gold, "p", {**metadata, "seconds": seconds})
        return loop.run(task.verify(problem, Attempt(answer or f"```python\n{gold}\n```", None, (), graders)))

    return judged


STYLES = {
    "the gold": "",
    "input()": "try:\n    while True: print(sum(map(int, input().split())))\nexcept EOFError: pass",
    "one read": "import sys\nprint(*[sum(map(int, l.split())) for l in sys.stdin.read().splitlines()], sep='\\n')",
    "bytes": "import sys\nfor l in sys.stdin.buffer: sys.stdout.write(str(sum(map(int, l.split()))) + '\\n')",
    "readline": "import sys\ninput = sys.stdin.readline\nwhile line := input(): print(sum(map(int, line.split())))",
    "file 0": "print('\\n'.join(str(sum(map(int, l.split()))) for l in open(0)))",
    "os.read": "import os\nfor l in os.read(0, 9999).decode().splitlines(): print(sum(map(int, l.split())))",
    "main": "import sys\ndef main():\n    for l in sys.stdin: print(sum(map(int, l.split())))\nif __name__ == '__main__': main()",
    "a thread": (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 26)\ndef main():\n"
        "    for l in sys.stdin: print(sum(map(int, l.split())))\nthread = threading.Thread(target=main)\nthread.start()"
    ),
    "exit()": "import sys\nfor l in sys.stdin: print(sum(map(int, l.split())))\nexit()",
    "quit(0)": "import sys\nfor l in sys.stdin: print(sum(map(int, l.split())))\nquit(0)",
    "sys.exit": "import sys\nfor l in sys.stdin: print(sum(map(int, l.split())))\nsys.exit(0)",
    "atexit": "import atexit, sys\nout = []\natexit.register(lambda: print(*out, sep='\\n'))\n"
    "for l in sys.stdin: out.append(sum(map(int, l.split())))",
    "white space": "import sys\nfor l in sys.stdin: print('  ', sum(map(int, l.split())), ' \\t\\r')\nprint('\\n')",
    "notes on stderr": "import sys\nfor l in sys.stdin:\n    print('read', file=sys.stderr)\n    print(sum(map(int, l.split())))",
    "a class": "import sys\nclass Sum:\n    def __str__(self): return str(sum(map(int, self.line.split())))\n"
    "for line in sys.stdin:\n    one = Sum()\n    one.line = line\n    print(one)",
    "a child": "import os, sys\nlines = sys.stdin.readlines()\nif os.fork() == 0:\n"
    "    for l in lines: print(sum(map(int, l.split())))\n    sys.exit(0)\nos.wait()",
}


@pytest.mark.parametrize("style", STYLES)
def test_styles_of_a_right_program(judge: Judge, style: str) -> None:
    verdict = judge(STYLES[style], seconds=5.0)
    assert verdict.outcome == "correct", verdict


# Each is wrong, whatever it does to its own process; most print nothing that could be right.
RIGHT = "import sys\nfor l in sys.stdin: print(sum(map(int, l.split())))\n"
HOSTILE = {
    **program_attacks(),
    "exit code": f"{RIGHT}sys.exit(1)",
    "exception at the end": f"{RIGHT}raise KeyError",
    "exception at exit": f"{RIGHT}sys.stdout = None\nprint = 3\nimport os\nos.abort()",
    "more lines": f"{RIGHT}print(1)",
    "a line less": "import sys\nprint(sum(map(int, sys.stdin.readline().split())))",
    "all in one line": "import sys\nprint(*[sum(map(int, l.split())) for l in sys.stdin])",
    "as a decimal": "import sys\nfor l in sys.stdin: print(float(sum(map(int, l.split()))))",
    "closed output": f"import os\nos.close(1)\n{RIGHT}",
    "no end": f"{RIGHT}while True: pass",
    "sleep": f"{RIGHT}import time\ntime.sleep(99)",
    "ignored children": f"{RIGHT}import os, signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nsys.stdout.flush()\n"
    "while True:\n    if os.fork() == 0:\n        for n in range(10**6): pass\n        os._exit(0)",
    "memory": f"{RIGHT}x = [b'x' * (1 << 20) for _ in range(4096)]",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_hostile_program_scores(judge: Judge, name: str) -> None:
    verdict = judge(HOSTILE[name])
    assert (verdict.outcome, verdict.score, verdict.layer) == ("incorrect", 0.0, "tests"), verdict


def test_a_failure_has_its_name(judge: Judge) -> None:
    for name, said in (
        ("no end", "timeout"),
        ("sleep", "timeout"),
        ("memory", "out_of_memory"),
        ("a flood", "output_limit"),
        ("exit code", "nonzero_exit"),
        ("exception at the end", "nonzero_exit: KeyError"),
        ("a constant", "line 1 differs"),
        ("more lines", "3 lines, not 2"),
    ):
        number = 2 if name == "a constant" else 1
        seconds = 0.5 if said == "timeout" else 10.0
        verdict = judge(HOSTILE[name], seconds=seconds)
        assert verdict.reason.startswith(f"test {number} of 3: {said}"), verdict


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("", True),
        ("def order(a, b):\n    return sorted([a, b])", True),
        ("def order(a, b):\n    return min(a, b), max(a, b)", True),
        ("class Solution:\n    def order(self, a, b):\n        heap = [a, b]\n        return nsmallest(2, heap)", True),
        ("from __future__ import annotations\ndef order(a: list[No], b):\n    return sorted([a, b])", True),
        ("def order(a, b):\n    return [a, b]", False),
        ("from __future__ import annotations\ndef order(a, b):\n    return [a, b]", False),
        ("x = 1\nfrom __future__ import annotations\ndef order(a, b):\n    return sorted([a, b])", False),
        ("def order(a, b):\n    return None", False),
        ("def order(a, b):\n    return [float(min(a, b)), True]", False),
        ("def order(a, b):\n    return {1, 3}", False),
        ("def sort(a, b):\n    return sorted([a, b])", False),
        ("class Same(list):\n    __eq__ = lambda *_: True\ndef order(a, b): return Same([9])", False),
        ("class Same:\n    __eq__ = __len__ = __iter__ = lambda *_: True\ndef order(a, b): return Same()", False),
        ("class Solution:\n    order = print", False),
        ("import os\nclass Solution:\n    def order(self, a, b): os._exit(0)", False),
    ],
)
def test_calls_of_a_function(judge: Judge, answer: str, right: bool) -> None:
    verdict = judge(answer, CALLS)
    assert (verdict.outcome == "correct", verdict.outcome == "error") == (right, False), verdict


@pytest.mark.parametrize(
    ("tests", "answer", "right"),
    [
        ("listed", "def evens(xs):\n    return [x for x in xs if x % 2 == 0]", True),
        ("listed", "def evens(xs):\n    return next(x for x in xs if x % 2 == 0)", True),
        ("listed", "def evens(xs):\n    return xs", False),
        ("listed", "def evens(xs):\n    return [[x for x in xs if x % 2 == 0]]", False),
        ("plain", "def evens(xs):\n    return [x for x in xs if x % 2 == 0]", True),
        ("plain", "def evens(xs):\n    return next(x for x in xs if x % 2 == 0)", False),
    ],
)
def test_results_that_may_be_in_a_list_of_the_dataset(judge: Judge, tests: str, answer: str, right: bool) -> None:
    """APPS has them in one, TACO has not; without a solution nothing tells [2] from 2."""
    calls = [([[1, 2]], [2]), ([[3, 4, 5]], [4])]
    listed = {"fn_name": "evens", "inputs": [given for given, _ in calls], "outputs": [wanted for _, wanted in calls]}
    plain = [{"fn_name": "evens", "type": "function_call", "input": given, "output": wanted} for given, wanted in calls]
    record = {"question": "Keep the even ones.", "tests": plain if tests == "plain" else listed}
    verdict = judge(answer, record)
    assert (verdict.outcome == "correct", verdict.outcome == "error") == (right, False), verdict


@pytest.mark.parametrize(
    ("printed", "wanted", "tolerance", "same"),
    [
        (b"1 2\n3\n", b"1 2\n3", None, True),
        (b" 1   2 \r\n3\t\n\n\n", b"1 2\n3", None, True),
        (b"1 2 3", b"1 2\n3", None, False),
        (b"1\n\n2", b"1\n2", None, False),
        (b"\n1", b"1", None, False),
        (b"", b"\n", None, True),
        (b"", b"0", None, False),
        (b"YES", b"Yes", None, False),
        (b"1.0", b"1", None, False),
        (b"01", b"1", None, False),
        (b"1.0", b"1", 1e-6, True),
        (b"0.3333333", b"0.333333", 1e-6, True),
        (b"0.334", b"0.333333", 1e-6, False),
        (b"1000001", b"1000000", 1e-6, True),
        (b"1000002", b"1000000", 1e-6, False),
        (b"nan", b"1", 1e-6, False),
        (b"inf", b"1", 0.5, False),
        (b"1_0", b"10", 1e-6, False),
        (b"1e999", b"1", 1e-6, False),
        (b"0x1", b"1", 1e-6, False),
        (b"1" * 99, b"1" * 98 + b"2", 1e-6, False),
        (b"YES 1.0000001", b"YES 1", 1e-6, True),
        (b"NO 1.0000001", b"YES 1", 1e-6, False),
        ("é".encode(), "é".encode(), None, True),
        (b"\xff", "\ufffd".encode(), None, False),
    ],
)
def test_outputs_are_compared_word_by_word(printed: bytes, wanted: bytes, tolerance: float | None, same: bool) -> None:
    assert (difference(printed, wanted, tolerance) == "") is same


def test_a_tolerance_is_the_records_own(judge: Judge) -> None:
    record = {
        "question": "A third of it.",
        "tests": [{"type": "stdin_stdout", "input": "1\n", "output": "0.333333333333\n"}],
        "solutions": ["print(int(input()) / 3)"],
    }
    assert judge("", record, 5.0).outcome == "incorrect"
    assert judge("", {**record, "tolerance": 1e-9}, 5.0).outcome == "correct"


class _Ends:
    """A sandbox whose calls end as they are told."""

    def __init__(self, *results: Result) -> None:
        self._results = list(results)
        self.limits: list[Limits] = []

    async def open(self, workspace: object = None) -> Sandbox:
        return self  # type: ignore[return-value]

    async def python(self, code: str, *, stdin: bytes = b"", limits: Limits) -> Result:
        self.limits.append(limits)
        return self._results.pop(0)

    async def __aenter__(self) -> _Ends:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None


def ended(*results: Result, seconds: float = 4.0, memory_mb: int = 512) -> tuple[Verdict, _Ends]:
    box = _Ends(*results)
    tests = [Case(b"", b"1\n")] * len(results)
    return asyncio.run(verify_program(box, "", tests, ProgramLimits(seconds, memory_mb))), box  # type: ignore[arg-type]


def test_only_the_host_masks_a_program() -> None:
    right = Result("ok", 0, b"1", b"", 0.1, cpu_s=0.1)
    assert ended(right, right)[0].outcome == "correct"
    assert ended(right, Result("internal_error", None, b"", b"", 0.1))[0].outcome == "error"
    assert ended(Result("timeout", None, b"1", b"", 12.0, cpu_s=0.5, starved_s=11.0))[0].outcome == "error"
    assert ended(Result("timeout", None, b"1", b"", 8.0, cpu_s=0.5, starved_s=1.0))[0].outcome == "incorrect"
    assert ended(Result("timeout", None, b"1", b"", 12.0, cpu_s=4.0, starved_s=11.0))[0].outcome == "incorrect"
    assert ended(Result("nonzero_exit", -9, b"1", b"", 0.1))[0].outcome == "incorrect", "it can do that to itself"


def test_all_tests_of_a_program_have_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "MAX_CPU_S", 10.0)
    slow = Result("ok", 0, b"1", b"", 4.0, cpu_s=4.0)
    verdict, box = ended(slow, slow, slow, slow, seconds=5.0, memory_mb=700)
    assert (verdict.outcome, verdict.reason) == ("incorrect", "timeout: 3 of 4 tests took 12 s of CPU time")
    assert [one.cpu_s for one in box.limits] == [5.0, 5.0, 2.0]
    assert {(one.wall_s, one.memory_mb) for one in box.limits} == {(10.0, 700)}
