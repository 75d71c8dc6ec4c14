"""Checks of found faults: answers that earn, sandboxed code, and how a solution's tests can be deceived."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

from found import Result, check


def _earn(task_type: str, question: str, gold: str, answers: list[str]) -> list[str]:
    """The answers that a task takes for right."""
    from nmoe.envs.tasks import TASKS
    from nmoe.envs.tasks.task import Attempt
    from nmoe.types import Problem

    problem = Problem("found/0", task_type, question, gold, "found")
    verify = TASKS[task_type].verify
    return [answer for answer in answers if asyncio.run(verify(problem, Attempt(answer))).outcome == "correct"]


def _same(pairs: list[tuple[str, str]]) -> list[str]:
    """The answers that are the same as their golds, without a question."""
    from nmoe.grading.math.answers import grade_answers

    verdicts = grade_answers(pairs)
    return [answer for (_, answer), verdict in zip(pairs, verdicts, strict=True) if verdict.outcome == "correct"]


@check(7, "an unevaluated expression for 24 in gsm8k, arithmetic, add, sum and math", "0 of 25 earn, 24 and 24.0 do")
def unevaluated_numbers() -> Result:
    wrong = ["96/4", r"\frac{192}{8}", "4800/200", r"2400\%", "23.9999999"]
    tasks = {"gsm8k": "Six boxes of 4 eggs.", "arithmetic": "Compute: 4 * 6", "add": "Add: 11 + 13"}
    tasks |= {"sum": "Sum: 7+8+9", "math": "What is $4!$?"}
    earned = [answer for task, question in tasks.items() for answer in _earn(task, question, "24", wrong)]
    right = [answer for task, question in tasks.items() for answer in _earn(task, question, "24", ["24", "24.0"])]
    line = f"{len(earned)} of 25 earn, {len(right)} of 10 right ones do"
    return line, not earned and len(right) == 10


@check(7, "an expression of the question, in other clothes", "0 of 5 earn")
def echoes() -> Result:
    asked = [
        ("What is 12324/79?", "156", "12324/79"),
        (r"Simplify $\frac{144}{216}$.", r"\frac{2}{3}", "144/216"),
        (r"Simplify $\sqrt{180}$.", r"6\sqrt{5}", "180^{0.5}"),
        (r"Simplify $\sqrt{180}$.", r"6\sqrt{5}", r"|\sqrt{180}|"),
        ("Factor $9y^2-30y+25$.", "(3y-5)^2", "9y^2-30y+5^2"),
    ]
    earned = [one for question, gold, answer in asked for one in _earn("math", question, gold, [answer])]
    return f"{len(earned)} of 5 earn", not earned


@check(8, "differences that vanish at the points where values are compared", "0 of 6 are the same")
def vanishing_differences() -> Result:
    pairs = [
        ("3+0.0000004x", "3"),
        (r"1+1.7\times10^{-7}t", r"1+1.2\times10^{-7}t"),
        ("1-(0.5)^{n+25}", "1-(0.5)^{n+26}"),
        ("x^2-1", "(x-1)(x+1)+0.0000001"),
        ("(1+0.0000004x, 2)", "(1,2)"),
        (r"5+6.67\times10^{-11}\frac{M}{r^2}", "5"),
    ]
    taken = _same(pairs)
    return f"{len(taken)} of 6 are the same", not taken


@check(
    9, "several boxes, a list read as a decimal, units of another power, words that change the number", "0 of 8 earn"
)
def hedges_and_units() -> Result:
    pairs = [("6", r"\boxed{5}, \boxed{6}"), ("3,4", "17/5")]
    pairs += [("4 score", "4"), ("2 pairs", "2"), ("6 inverse", "6"), ("5 percent off", "5")]
    taken = _same(pairs) + _earn("math", "Find its area in square feet.", "5", [r"5\text{ ft}^3"])
    from nmoe.grading.extraction import from_response

    box = from_response(r"\boxed{0}\boxed{1}").answer
    taken += _same([("1", box or "")])
    return f"{len(taken)} of 8 earn", not taken


@check(9, "sets by what they leave out or a property, and times", "3 of 3 are the same")
def sets_and_times() -> Result:
    pairs = [(r"x\ne 2", r"\mathbb{R}\setminus\{2\}"), (r"(2,\infty)", r"\{x\mid x>2\}"), ("3:30 PM", "3:30 p.m.")]
    taken = _same(pairs)
    return f"{len(taken)} of 3 are the same", len(taken) == 3


@check(10, "golds with boxes, a list that repeats a tuple, braces against boxes", "4 golds read, 6 of 6 answers right")
def golds_with_boxes() -> Result:
    from nmoe.grading.extraction import unreadable

    golds = [r"\boxed{5}", r"\boxed{1},\boxed{2}", r"x=\boxed{3}", r"The answer is $\boxed{\frac{1}{2}}$."]
    read = [gold for gold in golds if unreadable(gold) is None]
    answers = ["5", r"\{1,2\}", "3", "0.5"]
    pairs = [
        *zip(golds, answers, strict=True),
        ("(1,2),(1,2),(3,4)", "(1,2),(3,4)"),
        (r"\{1,2\}", r"\boxed{1},\boxed{2}"),
    ]
    right = _same(pairs)
    return f"{len(read)} golds read, {len(right)} of 6 answers right", (len(read), len(right)) == (4, 6)


@check(14, "CPU time of comparing 999 signs for a half on the event loop", "less than 0.03 s")
def many_halves() -> Result:
    from nmoe.grading.math.equivalence import settle

    settle("1", "½")
    began = time.process_time()
    settle("42", "½" * 999)
    took = time.process_time() - began
    return f"{took:.3f} s", took < 0.03


_HOLDS = """
import ctypes, mmap
held = mmap.mmap(-1, 1 << 30)
for start in range(0, 1 << 30, 8 << 20):
    held[start : start + (8 << 20)] = b"x" * (8 << 20)
    place = ctypes.addressof(ctypes.c_char.from_buffer(held, start))
    ctypes.CDLL(None).madvise(ctypes.c_void_p(place), 8 << 20, mmap.MADV_DONTNEED)
print("holds 1 GB")
"""
_IGNORED = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(40):
    if os.fork() == 0:
        while time.process_time() < 0.1: pass
        os._exit(0)
    try:
        while True: os.wait()
    except OSError: pass
"""
_AIO = "import ctypes; print(ctypes.CDLL(None).syscall(206, 100, ctypes.byref(ctypes.c_ulong(0))))"
_WEIGHT = "open('/proc/self/autogroup', 'w').write('5')"


def _sandboxes() -> Any:
    from nmoe.config.tables.rollout import SandboxSettings
    from nmoe.sandbox.sandboxes import Sandboxes

    return Sandboxes(SandboxSettings(warm=0))


@check(
    12,
    "1 GB of unmapped shared memory under 128 MB; 4 CPU s of ignored children under 1; aio; autogroup; 2 CPU s of one process",
    "sandbox_denied, timeout, -1, sandbox_denied, timeout",
)
def limits_of_a_sandbox() -> Result:
    from nmoe.sandbox.api import Limits

    limits = Limits(wall_s=30.0, cpu_s=10.0, memory_mb=128)

    async def tried() -> list[str]:
        opened = _sandboxes()
        async with await opened.open() as sandbox:
            said = [
                (await sandbox.python(_HOLDS, limits=limits)).failure,
                (await sandbox.python(_IGNORED, limits=replace(limits, cpu_s=1.0))).failure,
                (await sandbox.python(_AIO, limits=limits)).stdout.decode().strip(),
                (await sandbox.python(_WEIGHT, limits=limits)).failure,
                (await sandbox.python("while True: pass", limits=replace(limits, cpu_s=2.0))).failure,
            ]
        await opened.close()
        return said

    said = asyncio.run(tried())
    return ", ".join(said), said == ["sandbox_denied", "timeout", "-1", "sandbox_denied", "timeout"]


_MBPP = {
    "half": ("def f(x):\n    return x / 2", "assert abs(f(1) - 0.5) < 1e-6"),
    "member": ("def f(x):\n    return [x, x + 1]", "assert 5 in f(5)"),
}
_ZERO = "class Zero:\n    __sub__ = lambda *_: 0.0\ndef f(x):\n    return Zero()"
_RANGE = "def f(x):\n    return range(-10**15, 10**15)"
_COLLIDING = """
import json, os, socket, struct
def f(x):
    text = json.dumps({"value": {"set": [n * (2**61 - 1) for n in range(99999)]}}).encode()
    socket.socket(fileno=os.dup(3)).sendall(struct.pack("<I", len(text)) + text)
    os.read(3, 1)
"""


@check(
    11,
    "an object with a __sub__ of 0.0 under a tolerance; range(-10**15, 10**15) for `5 in f(5)`; a set that keeps the judge busy",
    "incorrect, incorrect, incorrect, within 5 s",
)
def answers_that_are_objects() -> Result:
    import time

    from nmoe.envs.tasks import TASKS, Attempt
    from nmoe.types import Problem

    task = TASKS["mbpp"]
    opened = _sandboxes()

    async def judged(name: str, answer: str) -> str:
        code, test = _MBPP[name]
        read = task.read_record({"text": "Do it.", "code": code, "test_list": [test]})
        assert read is not None
        question, gold, metadata = read
        problem = Problem("demo/0", "mbpp", question, gold, "demo", metadata)
        return (await task.verify(problem, Attempt(answer, None, (), opened))).outcome

    async def all_of_them() -> tuple[list[str], float]:
        said = [await judged("half", _ZERO), await judged("member", _RANGE)]
        began = time.monotonic()
        said.append(await judged("half", _COLLIDING))
        took = time.monotonic() - began
        await opened.close()
        return said, took

    said, took = asyncio.run(all_of_them())
    within = "within 5 s" if took < 5 else f"after {took:.0f} s"
    return ", ".join([*said, within]), said == ["incorrect"] * 3 and took < 5


_CONTEST = {
    "APPS": {"input_output": '{"inputs": ["1 2\\n"], "outputs": ["3\\n"]}'},
    "TACO": {"input_output": '{"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}'},
    "LiveCodeBench": {"public_test_cases": '[{"input": "1 2\\n", "output": "3\\n", "testtype": "stdin"}]'},
    "DeepCoder": {"tests": [{"type": "stdin_stdout", "input": "1 2\n", "output": "3\n"}]},
    "CodeContests": {"public_tests": {"input": ["1 2\n"], "output": ["3\n"]}},
}
_ADD = "print(sum(map(int, input().split())))"


@check(
    11,
    "tests by standard input and output: a right and two wrong programs in five forms of records",
    "5 right, 10 wrong",
)
def programs() -> Result:
    from nmoe.envs.tasks import TASKS, Attempt
    from nmoe.types import Problem

    task = TASKS["program"]
    opened = _sandboxes()

    async def judged(record: dict[str, Any], answer: str) -> str:
        read = task.read_record({"question": "Add.", **record})
        assert read is not None
        question, gold, metadata = read
        problem = Problem("demo/0", "program", question, gold, "demo", metadata)
        return (await task.verify(problem, Attempt(answer, None, (), opened))).outcome

    async def all_of_them() -> list[str]:
        said = []
        for name, record in _CONTEST.items():
            right = "def add(a, b):\n    return a + b" if name == "TACO" else _ADD
            for answer in (right, "import os\nos._exit(0)", f"{right}\nraise SystemExit(1)"):
                said.append(await judged(record, answer))
        await opened.close()
        return said

    said = asyncio.run(all_of_them())
    right, wrong = said.count("correct"), said.count("incorrect")
    return f"{right} right, {wrong} wrong", said == ["correct", "incorrect", "incorrect"] * 5
