"""Runs a program on the inputs of its tests, and compares what it prints with what is expected.

The program gets the input of one test at a time, as standard input of a fresh process. Expected outputs never enter its sandbox:
they are compared here, as text, so there is nothing that it could read, patch or forge.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass

from nmoe.grading.code.verify import starved
from nmoe.sandbox.api import Limits, OpensSandboxes, Result
from nmoe.types import Verdict

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
    """An input and the output expected for it: `Case(b"1 2\\n", b"3\\n")`."""

    given: bytes
    wanted: bytes


@dataclass(frozen=True)
class ProgramLimits:
    """The limits of one test: seconds of CPU time, MB of memory, and the error that a number may have (None: no number may
    differ)."""

    seconds: float = 4.0
    memory_mb: int = 512
    tolerance: float | None = None


async def verify_program(
    sandboxes: OpensSandboxes, program: str, tests: Sequence[Case], limits: ProgramLimits
) -> Verdict:
    """Verifies a program by its tests, up to the first that fails. Raises SandboxSetupError."""
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
    """Why a test fails; empty if it passes."""
    if result.failure != "ok":
        said = result.stderr.decode(errors="replace").strip().splitlines()
        return f"{result.failure}: {said[-1][:200]}" if said else result.failure
    if len(result.stdout) + len(test.wanted) < _AT_ONCE_BYTES:
        return difference(result.stdout, test.wanted, tolerance)
    return await asyncio.to_thread(difference, result.stdout, test.wanted, tolerance)


def difference(printed: bytes, wanted: bytes, tolerance: float | None = None) -> str:
    r"""Says where an output differs from the expected one; empty where it does not.

    Lines are compared token by token. White space within and at the ends of a line counts only as a separator, and empty lines at
    the end do not count. Tokens are equal byte by byte; with a `tolerance`, two decimal numbers may also differ by that much,
    absolutely or relative to the expected one: `difference(b"0.3333333\n", b"0.333333", 1e-6)` is "".
    """
    ours, theirs = printed.rstrip().split(b"\n"), wanted.rstrip().split(b"\n")
    for place, (our, their) in enumerate(zip(ours, theirs, strict=False), start=1):
        if our == their:
            continue
        found, expected = our.split(), their.split()
        if len(found) != len(expected):
            return f"line {place} has {len(found)} words, not {len(expected)}"
        for one, other in zip(found, expected, strict=True):
            if one != other and not (tolerance is not None and _close(one, other, tolerance)):
                return f"line {place} differs"
    return "" if len(ours) == len(theirs) else f"{len(ours)} lines, not {len(theirs)}"


def _close(one: bytes, other: bytes, tolerance: float) -> bool:
    if max(len(one), len(other)) > _NUMBER_CHARS or not (_NUMBER.fullmatch(one) and _NUMBER.fullmatch(other)):
        return False
    found, expected = float(one), float(other)
    return abs(found - expected) <= tolerance * max(1.0, abs(expected))
