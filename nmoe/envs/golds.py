"""Grades the gold answers of an environment's records before anything is sampled.

If a grader rejected a gold answer, training would teach that right answers are wrong. Each gold is graded once, or again if the
first grade was not "correct". Those that passed are remembered in $NMOE_GOLDS, by default nmoe/golds in the user's cache directory.
Their key is a hash of the problem and of everything that decides a verdict: the graders' sources, the versions of Python and the
parsing packages, and for code the sandbox.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

import nmoe.envs.tasks
import nmoe.grading
import nmoe.sandbox
from nmoe.config import registry as names
from nmoe.config.tables.pools import DatasetKeys, GeneratedPool, MixturePool
from nmoe.envs.environment import Environment
from nmoe.envs.pools.pool import Mixture, Order, stable_hash
from nmoe.envs.tasks import TASKS, Attempt
from nmoe.envs.tasks.task import SandboxTask
from nmoe.envs.tasks.text import OpenTask
from nmoe.errors import InfrastructureError, StorageError, UserError
from nmoe.runs.storage import append_whole
from nmoe.runs.waiting import all_or_none, wait_for
from nmoe.sandbox.api import OpensSandboxes
from nmoe.sandbox.sandboxes import Sandboxes
from nmoe.types import Problem, Verdict

SAMPLE = 64
_NAMED = 20
_AT_ONCE = 8
_INTERVAL_S = 10.0
_PACKAGES = (nmoe.grading, nmoe.envs.tasks, nmoe.sandbox)
_DISTRIBUTIONS = ("sympy", "mpmath", "math-verify", "latex2sympy2_extended")


def check_golds(environment: Environment, sandboxes: OpensSandboxes | None, note: Callable[[str], None]) -> None:
    """Grades the gold answers that have not passed before: of a dataset those that `[task_pool] check_gold` selects, of a user's
    generated task up to 64; reports progress to `note`.

    Raises UserError that lists the golds not graded correct, and InfrastructureError if the grader was lost.
    """
    wait_for(_check(list(_chosen(environment)), sandboxes, note))


def _chosen(environment: Environment) -> Iterator[Problem]:
    pool, order = environment.settings.task_pool, environment.pool.order
    pairs = (
        zip(pool.sources, order.sources, strict=True)
        if isinstance(pool, MixturePool) and isinstance(order, Mixture)
        else [(pool, order)]
    )
    for settings, source in pairs:
        if isinstance(settings, DatasetKeys):
            if settings.check_gold != "off" and not isinstance(TASKS[settings.task_type], OpenTask):
                problems = sorted(_problems(source), key=lambda problem: stable_hash(problem.id))
                yield from problems[:SAMPLE] if settings.check_gold == "sample" else problems
        # Built-in generators are tested; a user's is not.
        elif isinstance(settings, GeneratedPool) and not _of_nmoe(settings.task_type):
            size = SAMPLE if TASKS[settings.task_type].knows_answer(source.at(0)) else 0
            yield from map(source.at, range(min(size, source.size or size)))


def _of_nmoe(task_type: str) -> bool:
    return task_type in names.TASKS.builtin


def _problems(order: Order) -> list[Problem]:
    assert order.size is not None, "the records of a dataset are finite"
    return [order.at(position) for position in range(order.size)]


async def _check(problems: Sequence[Problem], sandboxes: OpensSandboxes | None, note: Callable[[str], None]) -> None:
    passed = Passed(sandboxes)
    known = [problem for problem in problems if TASKS[problem.task_type].knows_answer(problem)]
    waiting = [problem for problem in known if not passed.has(problem)]
    rest, failed, done, reported = iter(waiting), dict[str, str](), 0, time.monotonic()

    async def grade_the_rest() -> None:
        nonlocal done, reported
        for problem in rest:
            verdict = await _verdict(problem, sandboxes)
            if verdict.outcome != "correct":
                # Grade again: a program may exceed its deadline only because many run at once.
                verdict = await _verdict(problem, sandboxes)
            if verdict.outcome == "error":
                raise InfrastructureError(f"the gold answer of {problem.id} could not be graded: {verdict.reason}")
            if verdict.score == 1:
                passed.add(problem)
            else:
                record = f" (record {_record(problem)[1]}, from 0)" if "record" in problem.metadata else ""
                failed[problem.id] = f"{problem.id}{record}: {verdict.reason}"
            done += 1
            if time.monotonic() - reported > _INTERVAL_S:
                reported = time.monotonic()
                note(f"gold answers: {done:,} of {len(waiting):,} graded")

    await all_or_none([grade_the_rest() for _ in range(_AT_ONCE)])
    if failed:
        # In the order of the records; grading finishes in another order.
        named = [failed[problem.id] for problem in sorted(problems, key=_record) if problem.id in failed][:_NAMED]
        remedy = (
            'correct or drop their records, or set check_gold = "off" to train on them as they are'
            if any("record" in problem.metadata for problem in problems if problem.id in failed)
            else "correct the task's `gold` or `grade`"
        )
        more = f"\nand {len(failed) - _NAMED:,} more" if len(failed) > _NAMED else ""
        raise UserError(
            f"{len(failed):,} of {len(problems):,} gold answers are not graded correct; {remedy}:\n"
            + "\n".join(named)
            + more
        )


def _record(problem: Problem) -> tuple[str, int]:
    """Returns a problem's source, and the index of its record or of the generated problem in that source."""
    return problem.source, int(problem.metadata.get("record", problem.id.rpartition("/")[2]))


async def _verdict(problem: Problem, sandboxes: OpensSandboxes | None) -> Verdict:
    task = TASKS[problem.task_type]
    right, _ = task.example_answers(problem)
    return await task.verify(problem, Attempt(right, None, (), sandboxes))


def golds_directory() -> Path:
    """Returns the directory that stores which golds passed: $NMOE_GOLDS, else nmoe/golds in the user's cache directory."""
    named, cached = os.environ.get("NMOE_GOLDS"), os.environ.get("XDG_CACHE_HOME")
    return Path(named) if named else Path(cached or Path.home() / ".cache") / "nmoe" / "golds"


class Passed:
    """Remembers which gold answers were graded correct, in one file of hashes per task type: `Passed(sandboxes).has(problem)`.
    Golds of users' tasks are graded each time, since no hash covers everything that their grade depends on.
    """

    def __init__(self, sandboxes: OpensSandboxes | None) -> None:
        self._sandbox = (
            # The number of warm sandboxes and their uids do not affect a verdict.
            repr((sandboxes.settings.level, sandboxes.interpreter, sandboxes.limits))
            if isinstance(sandboxes, Sandboxes)
            else ""
        )
        self._directory = golds_directory()
        self._known: dict[str, set[str]] = {}

    def has(self, problem: Problem) -> bool:
        if not _of_nmoe(problem.task_type):
            return False
        if problem.task_type not in self._known:
            path = self._path(problem)
            self._known[problem.task_type] = set(path.read_text().split()) if path.exists() else set()
        return _key(problem, self._sandbox) in self._known[problem.task_type]

    def add(self, problem: Problem) -> None:
        """Stores that the problem's gold was graded correct; does nothing for a user's task, or if the file cannot be written."""
        if not _of_nmoe(problem.task_type):
            return
        path = self._path(problem)
        # If nothing can be written, the next run grades the golds again.
        with suppress(OSError, StorageError):
            path.parent.mkdir(parents=True, exist_ok=True)
            append_whole(path, f"{_key(problem, self._sandbox)}\n".encode())

    def _path(self, problem: Problem) -> Path:
        return self._directory / f"{problem.task_type}.txt"


def _key(problem: Problem, sandbox: str) -> str:
    of_sandbox = sandbox if isinstance(TASKS[problem.task_type], SandboxTask) else ""
    metadata = sorted((name, value) for name, value in problem.metadata.items() if name != "record")
    content = repr((_graders(), of_sandbox, problem.task_type, problem.question, problem.gold, metadata))
    return hashlib.sha256(content.encode()).hexdigest()[:32]


@cache
def _graders() -> str:
    """Returns a digest of the graders' sources and the package versions that a verdict depends on."""
    versions = (sys.version, *(f"{name} {version(name)}" for name in _DISTRIBUTIONS))
    digest = hashlib.sha256("\n".join(versions).encode())
    for package in _PACKAGES:
        assert package.__file__ is not None, "packages of nmoe lie in files"
        for path in sorted(Path(package.__file__).parent.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def to_stderr(line: str) -> None:
    """Prints a line of progress to stderr, for the time before a run has its log."""
    print(line, file=sys.stderr, flush=True)
