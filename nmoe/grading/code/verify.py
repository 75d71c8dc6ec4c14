"""Runs tests against a solution, in two sandboxes with a channel between them: one for the tests (judge), one for the solution
(candidate).

The judge's sandbox holds the tests and the nonce; the candidate's holds the solution. Neither sees the other's files, memory
or descriptors. The verdict is the judge's last line, marked with a 128-bit nonce drawn for this grading. A solution that
exits, patches, prints or loops in its own process can at most delay the judge or send it nonsense.

A program of a contest is verified otherwise: it gets the input of one test at a time, as standard input of a fresh process.
Expected outputs never enter its sandbox: they are compared here, as text, so there is nothing that it could read, patch or forge.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from nmoe.sandbox.api import WORKSPACE, Limits, OpensSandboxes, Result, Sandbox
from nmoe.types import Verdict

# For loading the solution and all tests together. The clock stops while the CPUs are busy elsewhere, for 30 s at most.
LIMITS = Limits(wall_s=10.0, cpu_s=10.0, starved_s=30.0)
_HERE = Path(__file__).parent
_PACKAGE = "nmoe.grading.code"


@dataclass(frozen=True)
class Tests:
    """The tests for the judge to run. `MBPP` with two assertions:

        Tests("asserts", setup="", tests=("assert add(1, 2) == 3", "assert add(0, 0) == 0"), names=("add",))

    `kind`: "check" runs `setup` (the prompt) and then HumanEval's `check(candidate)` for the one name; "asserts" runs
    statements; "files" runs test files that import `modules` of the candidate's workspace. The solution defines
    `names`. The classes of the record's solution define `methods` (`nmoe.grading.code.extract.methods`): on objects
    that a solution returns, the tests can call only these methods with arguments. `protected` files (path -> content) are copied to
    the judge's workspace, and modules among them are loaded there.
    """

    kind: Literal["check", "asserts", "files"]
    tests: tuple[str, ...]
    setup: str = ""
    names: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    modules: tuple[str, ...] | None = None
    protected: Mapping[str, bytes] = field(default_factory=dict)


async def verify_solution(sandboxes: OpensSandboxes, tests: Tests, source: str) -> Verdict:
    """Runs the tests against a solution's code in a fresh sandbox and returns the verdict. Raises SandboxSetupError."""
    async with await sandboxes.open() as candidate:
        return await verify_in(sandboxes, candidate, tests, source)


async def verify_in(sandboxes: OpensSandboxes, candidate: Sandbox, tests: Tests, source: str | None) -> Verdict:
    """Runs the tests against a solution in the sandbox `candidate` and returns the verdict. Without `source`, the solution's
    modules lie in the workspace there.

    Closes `candidate` if there is a `source`. Raises SandboxSetupError, and SandboxFileError for a protected file that cannot be
    written.
    """
    nonce = secrets.token_hex(16)
    asked: dict[str, Any] = {"kind": tests.kind, "setup": tests.setup, "tests": tests.tests, "names": tests.names}
    asked["methods"] = tests.methods
    if tests.modules is not None:
        asked["modules"] = tests.modules
        asked["protected"] = {
            path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): f"{WORKSPACE}/{path}"
            for path in tests.protected
            if path.endswith(".py")
        }
    ours, theirs = socket.socketpair()
    with ours, theirs:
        async with await sandboxes.open() as judge:
            for path, content in tests.protected.items():
                await judge.write(path, content)
            solving = asyncio.create_task(
                candidate.python(_program("candidate", repr(source)), limits=LIMITS, channel=theirs)
            )
            # These ends are copies: without a shutdown neither side would notice that the other has gone.
            solving.add_done_callback(lambda _: theirs.shutdown(socket.SHUT_RDWR))
            # The candidate's deadline is earlier, so that a hanging solution is stopped before the judge is.
            judging = judge.python(
                _program("judge", f"{asked!r}, {nonce!r}"),
                limits=replace(LIMITS, wall_s=LIMITS.wall_s + LIMITS.starved_s + 2),
                channel=ours,
            )
            try:
                judged = await judging
            finally:
                lost = solving.done() and solving.result().failure == "internal_error"
                ours.shutdown(socket.SHUT_RDWR)
                if source is not None:
                    await candidate.close()
                solved = await solving
    if lost:
        return Verdict("error", 0.0, "tests", "the solution's sandbox was lost")
    return _verdict(judged, solved, nonce)


def _program(side: str, arguments: str) -> str:
    """Returns the program of one side, judge or candidate, for a sandbox's interpreter; it carries the source of its modules,
    because nmoe is not installed there.
    """
    parents = [_PACKAGE.rsplit(".", up)[0] for up in reversed(range(_PACKAGE.count(".") + 1))]
    lines = ["import sys, types"]
    for name in parents:
        lines.append(f"sys.modules[{name!r}] = types.ModuleType({name!r}); sys.modules[{name!r}].__path__ = []")
    for name in ("wire", side):
        text = (_HERE / f"{name}.py").read_text()
        lines.append(f"module = sys.modules['{_PACKAGE}.{name}'] = types.ModuleType('{_PACKAGE}.{name}')")
        lines.append(f"exec(compile({text!r}, '{name}.py', 'exec'), module.__dict__)")
    return "\n".join([*lines, f"module.main({arguments})"])


def _verdict(judged: Result, solved: Result, nonce: str) -> Verdict:
    for line in reversed(judged.stdout.decode(errors="replace").splitlines()):
        if line.startswith(f"{nonce} "):
            said = json.loads(line.removeprefix(nonce))
            reason = said["reason"]
            if not said["passed"] and (overloaded := starved(LIMITS, solved, judged)):
                return overloaded
            if not said["passed"] and solved.failure in ("timeout", "out_of_memory"):
                reason = f"{solved.failure}: {reason}"
            return Verdict.of(said["passed"], "tests", reason)
    if overloaded := starved(LIMITS, solved, judged):
        return overloaded
    tail = judged.stderr.decode(errors="replace").strip()[-200:]
    # SIGKILL does not come from the sandbox, which would name its limit, but from the host.
    if judged.failure == "internal_error" or judged.exit_code == -signal.SIGKILL:
        return Verdict("error", 0.0, "tests", f"the judge was lost: {judged.failure} {tail}")
    # The tests ran through with the gold, so the solution ended them, by its values.
    return Verdict.of(False, "tests", f"the tests did not end: {judged.failure} {tail}".strip())


def starved(limits: Limits, *ended: Result) -> Verdict | None:
    """Returns an "error" verdict if processes exceeded a deadline only because of the machine's load; else None. The processes of
    `ended` waited for one another.

    That is so if no process used more than 90% of its CPU limit, and the late one would have taken less than half of the time
    limit without the waits for a CPU, its own and the others'. The answer's correctness is then unknown.
    """
    late = next((one for one in ended if one.failure == "timeout"), None)
    if late is None or max(one.cpu_s for one in ended) >= 0.9 * limits.cpu_s:
        return None
    # At any time one of them waits for the others, so the starved times add up.
    starved_s = sum(one.starved_s for one in ended)
    if late.wall_s - starved_s >= limits.wall_s / 2:
        return None
    return Verdict(
        "error",
        0.0,
        "tests",
        f"the machine is overloaded: for {starved_s:.1f} of {late.wall_s:.1f} s others had the CPUs, after which the tests had "
        f"taken {sum(one.cpu_s for one in ended):.1f} s of CPU time and were not done",
    )


# Of all tests of one program together.
MAX_CPU_S = 60.0
_STARVED_S = 30.0
# What a program may print beyond twice the expected output.
_MORE_OUTPUT_KB = 64
_NUMBER = re.compile(rb"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?")
_NUMBER_CHARS = 64
# Comparing larger outputs would hold up the event loop.
_AT_ONCE_BYTES = 1 << 16


@dataclass(frozen=True)
class Case:
    """One test of a program: its standard input and the expected output, `Case(b"1 2\\n", b"3\\n")`."""

    given: bytes
    wanted: bytes


@dataclass(frozen=True)
class ProgramLimits:
    """The limits of a program in one test: seconds of CPU time, MB of memory, and the permitted error of a number in the output
    (None: numbers are compared as text).
    """

    seconds: float = 4.0
    memory_mb: int = 512
    tolerance: float | None = None


async def verify_program(
    sandboxes: OpensSandboxes, program: str, tests: Sequence[Case], limits: ProgramLimits
) -> Verdict:
    """Runs a program on its tests, up to the first that fails, and returns the verdict. A program that has used 60 s of CPU time
    before its last test is incorrect. Raises SandboxSetupError."""
    spent = 0.0
    async with await sandboxes.open() as sandbox:
        for number, test in enumerate(tests, start=1):
            allowed = Limits(
                wall_s=2 * limits.seconds,
                cpu_s=min(limits.seconds, MAX_CPU_S - spent),
                memory_mb=limits.memory_mb,
                output_kb=2 * len(test.wanted) // 1024 + _MORE_OUTPUT_KB,
                starved_s=_STARVED_S,
            )
            result = await sandbox.python(program, stdin=test.given, limits=allowed)
            spent += result.cpu_s
            if result.failure == "internal_error":
                return Verdict("error", 0.0, "tests", "the program's sandbox was lost")
            if overloaded := starved(allowed, result):
                return overloaded
            if failed := await _failed(result, test, limits.tolerance):
                return Verdict.of(False, "tests", f"test {number} of {len(tests)}: {failed}")
            if spent >= MAX_CPU_S and number < len(tests):
                return Verdict.of(
                    False, "tests", f"timeout: {number} of {len(tests)} tests took {spent:.0f} s of CPU time"
                )
    return Verdict.of(True, "tests", "all tests pass")


async def _failed(result: Result, test: Case, tolerance: float | None) -> str:
    """Returns why a test failed; empty if it passed."""
    if result.failure != "ok":
        said = result.stderr.decode(errors="replace").strip().splitlines()
        return f"{result.failure}: {said[-1][:200]}" if said else result.failure
    if len(result.stdout) + len(test.wanted) < _AT_ONCE_BYTES:
        return difference(result.stdout, test.wanted, tolerance)
    return await asyncio.to_thread(difference, result.stdout, test.wanted, tolerance)


def difference(printed: bytes, wanted: bytes, tolerance: float | None = None) -> str:
    r"""Describes where an output differs from the expected one; empty if it does not.

    Lines are compared token by token. White space within and at the ends of a line counts only as a separator, and empty lines at
    the end do not count. Tokens are equal byte by byte; with a `tolerance`, two decimal numbers may also differ by that much,
    absolutely or relative to the expected one: `difference(b"0.3333333\n", b"0.333333", 1e-6)` is "".
    """
    ours, theirs = printed.rstrip().split(b"\n"), wanted.rstrip().split(b"\n")
    for index, (our, their) in enumerate(zip(ours, theirs, strict=False), start=1):
        if our == their:
            continue
        found, expected = our.split(), their.split()
        if len(found) != len(expected):
            return f"line {index} has {len(found)} words, not {len(expected)}"
        for one, other in zip(found, expected, strict=True):
            if one != other and not (tolerance is not None and _close(one, other, tolerance)):
                return f"line {index} differs"
    return "" if len(ours) == len(theirs) else f"{len(ours)} lines, not {len(theirs)}"


def _close(one: bytes, other: bytes, tolerance: float) -> bool:
    if max(len(one), len(other)) > _NUMBER_CHARS or not (_NUMBER.fullmatch(one) and _NUMBER.fullmatch(other)):
        return False
    found, expected = float(one), float(other)
    return abs(found - expected) <= tolerance * max(1.0, abs(expected))
