"""Whether the tests notice mistakes: python scripts/mutants.py [COMMIT]

Plants 50 mistakes (scripts/mutation.py), one at a time, in learner, grading and engine, and runs the test files that are nearest to
the changed module in imports. A mutant is killed where a test fails or takes far too long; it survives where all pass. The mutants
are drawn by a seed from the code of `BEFORE`, whatever commit they are planted in, and are found by function and text, so that code
that has moved keeps its mutants; those whose code is gone are reported as such. Writes benchmarks/results/mutants.json, where each
commit has its entry; started again after an interruption, it goes on there.
"""

from __future__ import annotations

import ast
import json
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from commits import BEFORE, ROOT, checked_out, environment, resolved
from count_code import imports, sources
from mutation import Mutation, functions, indexed, mutations, place, planted

RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"

ROOMS = {"nmoe/learner/": 17, "nmoe/rl/grading/": 17, "nmoe/engine/": 16}
"""How many mutants the code of each room at `BEFORE` gets."""

LEFT_OUT = ("/code/", "graphs.py")
"""Code that is tested in a sandbox or on a GPU."""

SLOW = "not compiled and not trl and not settle_is_total and not whoever_is_cancelled"
"""Tests that are left out for the time that they take, in the language of pytest's -k."""

SEED = 12
TEST_FILES = 2
TEST_ROOMS = {"learner", "grading", "engine"}
"""Only tests in folders of these names are run: those of whole runs take too long."""

LIMIT_CPU_S = 60
LIMIT_S = 3600


def drawn(files: Mapping[str, str], tested: Mapping[str, Sequence[str]]) -> list[tuple[str, Mutation]]:
    """The mutants with their files, of those that are tested, at most one of a function; always the same of the same code."""
    found = []
    for room, number in ROOMS.items():
        rng = random.Random(f"{SEED} {room}")
        each = [
            (path, options)
            for path, source in files.items()
            if path.startswith(room) and tested[path] and not any(part in path for part in LEFT_OUT)
            for name, function in functions(ast.parse(source))
            if (options := list(mutations(name, function)))
        ]
        # Long functions are drawn as often as their length asks.
        weights = [len(options) for _, options in each]
        chosen: dict[int, None] = {}
        while len(chosen) < number:
            chosen.setdefault(rng.choices(range(len(each)), weights)[0])
        found += [(each[place][0], rng.choice(each[place][1])) for place in chosen]
    return found


def nearest_tests(tree: Path, files: Sequence[tuple[Path, str, str]]) -> dict[str, list[str]]:
    """For each file of nmoe/ the test files that reach it by the fewest imports; among those the ones named after it first, and
    then those that import least."""
    known = {module for _, module, _ in files}
    graph = {
        module: (found := imports(module, text, known, path.name == "__init__.py")).at_once | found.later
        for path, module, text in files
    }
    reached: dict[str, list[tuple[int, bool, int, str]]] = {module: [] for module in known}
    for test in sorted((tree / "tests").rglob("test_*.py")):
        path = test.relative_to(tree)
        if TEST_ROOMS.isdisjoint(path.parts):
            continue
        found = imports("test", test.read_text(), known)
        distances = dict.fromkeys(found.at_once | found.later, 1)
        queue = list(distances)
        for module in queue:
            for imported in graph[module]:
                if imported not in distances:
                    distances[imported] = distances[module] + 1
                    queue.append(imported)
        for module, distance in distances.items():
            named = module.rsplit(".", 1)[-1] in test.stem
            reached[module].append((distance, not named, len(found.at_once), str(path)))
    return {str(path): [test for *_, test in sorted(reached[module])[:TEST_FILES]] for path, module, _ in files}


class Failures:
    """A plugin of pytest that writes the first test that fails, or the file that cannot be imported, to a pipe."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            os.write(self.pipe, report.nodeid.encode() + b"\n")

    pytest_collectreport = pytest_runtest_logreport


def first_failure(tree: Path, tests: Sequence[str]) -> str | None:
    """The first test that fails of these files or tests, None where all pass. Too much processor time fails as "limit", and a
    pytest that breaks down over the mutant as "crash".

    The tests run in a fork of this process, which has loaded torch: starting anew would take as long as the tests themselves.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_CPU_S, LIMIT_CPU_S))
        _be_pytest(tree, tests, writing)
    os.close(writing)
    deadline = time.monotonic() + LIMIT_S
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.05)
    with os.fdopen(reading) as pipe:
        failed = pipe.readline().strip()
    code = os.waitstatus_to_exitcode(ended[1])
    if code == 0:
        return None
    if code < 0 or failed:
        return failed or "limit"
    if code == pytest.ExitCode.INTERNAL_ERROR:
        return "crash"
    raise RuntimeError(f"pytest ended with {code} and no failure: {' '.join(tests)}")


def _be_pytest(tree: Path, tests: Sequence[str], pipe: int) -> None:
    """Becomes a pytest over the tests and ends the process."""
    import hypothesis

    code = 3
    try:
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        hypothesis.settings.register_profile("mutants", deadline=None, derandomize=True, database=None)
        hypothesis.settings.load_profile("mutants")
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-k", SLOW, *tests], [Failures(pipe)]))
    finally:
        os._exit(code)


@contextmanager
def mistaken(tree: Path, path: str, text: str) -> Iterator[None]:
    """The file holds `text` within."""
    file = tree / path
    before = file.read_text()
    file.write_text(text)
    try:
        yield
    finally:
        file.write_text(before)


def check(
    tree: Path, mutants: Sequence[tuple[str, Mutation]], killers: Sequence[str | None]
) -> Iterator[dict[str, object]]:
    """Plants each mutant in the code of `tree` and says what became of it. `killers` are the tests that kill the mutants at
    `BEFORE`: they are run first where their files still exist, because a module that absorbed others has other nearest tests.
    Raises RuntimeError where the test that fails does so without the mutant, too."""
    files = list(sources(tree))
    texts, tests = {str(path): text for path, _, text in files}, nearest_tests(tree, files)
    index, sound = indexed(texts), {"limit", "crash"}
    for (path, mutation), killer in zip(mutants, killers, strict=True):
        record = {"function": mutation.function, "unit": mutation.unit, "mistake": mutation.mistake}
        found = place(index, mutation, path)
        text = planted(texts[found[0]], found[1], mutation) if found else None
        if found is None or text is None:
            yield {"file": path, **record, "end": "gone"}
            continue
        killing = [killer.split("::")[0]] if killer and (tree / killer.split("::")[0]).exists() else []
        files_run = list(dict.fromkeys([*killing, *tests[found[0]]]))
        with mistaken(tree, found[0], text):
            failed = first_failure(tree, files_run) if files_run else None
        if failed is not None and failed not in sound:
            if first_failure(tree, [failed]) is not None:
                raise RuntimeError(f"{failed} fails without a mutant")
            sound.add(failed)
        yield {"file": found[0], **record, "end": "killed" if failed else "survived", "by": failed or files_run}


def summary(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """One line per commit: how many mutants are killed of those whose code no commit has lost."""
    shared = [all(end != "gone" for end in ends) for ends in zip(*map(_ends, results.values()), strict=False)]
    for commit, records in results.items():
        counted = Counter(end for end, kept in zip(_ends(records), shared, strict=False) if kept)
        yield f"{commit}: {counted['killed']} of {counted.total()} killed, {_ends(records).count('gone')} gone"


def _ends(records: Sequence[Mapping[str, Any]]) -> list[str]:
    return [record["end"] for record in records]


def main() -> None:
    commit = resolved(sys.argv[1] if sys.argv[1:] else "HEAD")
    with checked_out(BEFORE) as tree:
        files = list(sources(tree))
        mutants = drawn({str(path): text for path, _, text in files}, nearest_tests(tree, files))
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    records = results.setdefault(commit, [])
    with checked_out(commit) as tree:
        os.environ.update(environment(tree) | {"TRITON_INTERPRET": "1", "PYTHONDONTWRITEBYTECODE": "1"})
        sys.dont_write_bytecode = True
        for heavy in ("torch", "transformers", "safetensors.torch", "sympy", "math_verify", "hypothesis", "pytest"):
            __import__(heavy)
        before = results.get(resolved(BEFORE), []) if commit != resolved(BEFORE) else []
        killers = [str(record["by"]) if record["end"] == "killed" else None for record in before]
        killers += [None] * (len(mutants) - len(killers))
        for record in check(tree, mutants[len(records) :], killers[len(records) :]):
            records.append(record)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            print(record["end"], record["file"], record["function"], record["mistake"], flush=True)
    print("\n".join(summary(results)))


if __name__ == "__main__":
    main()
