"""Checks of found faults: what sandboxed code can take, and how a solution's tests can be deceived."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from found import Result, check

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
