"""Whether the tests notice mistakes: python scripts/mutants.py [COMMIT]

Plants 50 mistakes (scripts/mutation.py), one at a time, in learner, grading and engine, and runs the test files that are nearest to
the changed module in imports. A mutant is killed where a test fails or takes far too long; it survives where all pass. The mutants
are drawn by a seed from the code of `BEFORE`, whatever commit they are planted in, and are found by function and text, so that code
that has moved keeps its mutants; those whose code is gone are reported as such. Writes benchmarks/results/mutants.json, where each
commit has its entry. It takes about eight minutes of one core.
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

from commits import BEFORE, ROOT, checked_out, environment, subject
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

LIMIT_CPU_S = 90
LIMIT_S = 600


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


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[int, float]:
    """pytest's exit code, -9 past a limit, and the CPU seconds that it took, its subprocesses included. The tests run in a fork of
    this process, which has loaded torch: starting anew would take as long as the tests themselves."""
    sys.stdout.flush()
    began, deadline = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() + LIMIT_S
    child = os.fork()
    if not child:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_CPU_S, LIMIT_CPU_S))
        _be_pytest(tree, tests)
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.05)
    took = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = os.waitstatus_to_exitcode(ended[1])
    return (-9 if code < 0 else code), took.ru_utime + took.ru_stime - began.ru_utime - began.ru_stime


def _be_pytest(tree: Path, tests: Sequence[str]) -> None:
    """Becomes a pytest over the tests and ends the process."""
    import hypothesis
    import pytest

    code = 3
    try:
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        hypothesis.settings.register_profile("mutants", deadline=None, derandomize=True, database=None)
        hypothesis.settings.load_profile("mutants")
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-k", SLOW, *tests]))
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


def check(tree: Path, mutants: Sequence[tuple[str, Mutation]]) -> Iterator[dict[str, object]]:
    """Plants each mutant in the code of `tree` and says what became of it. Raises RuntimeError where the tests fail without one."""
    files = list(sources(tree))
    texts, tests = {str(path): text for path, _, text in files}, nearest_tests(tree, files)
    index = indexed(texts)
    places = [place(index, mutation, path) for path, mutation in mutants]
    needed = sorted({test for found in places if found for test in tests[found[0]]})
    code, seconds = run_tests(tree, needed)
    if code:
        raise RuntimeError(f"without a mutant the tests end with {code}: {' '.join(needed)}")
    print(f"{len(needed)} test files pass in {seconds:.0f} s", file=sys.stderr, flush=True)
    for (path, mutation), found in zip(mutants, places, strict=True):
        record = {"function": mutation.function, "unit": mutation.unit, "mistake": mutation.mistake}
        text = planted(texts[found[0]], found[1], mutation) if found else None
        if found is None or text is None:
            yield {"file": path, **record, "end": "gone"}
            continue
        with mistaken(tree, found[0], text):
            code, seconds = run_tests(tree, tests[found[0]]) if tests[found[0]] else (0, 0.0)
        end = "survived" if code == 0 else "killed"
        yield {"file": found[0], **record, "end": end, "tests": tests[found[0]], "cpu_s": round(seconds, 1)}


def main() -> None:
    commit = sys.argv[1] if sys.argv[1:] else "HEAD"
    with checked_out(BEFORE) as tree:
        files = list(sources(tree))
        mutants = drawn({str(path): text for path, _, text in files}, nearest_tests(tree, files))
    with checked_out(commit) as tree:
        os.environ.update(environment(tree) | {"TRITON_INTERPRET": "1", "PYTHONDONTWRITEBYTECODE": "1"})
        sys.dont_write_bytecode = True
        for heavy in ("torch", "transformers", "safetensors.torch", "sympy", "math_verify", "hypothesis", "pytest"):
            __import__(heavy)
        records = []
        for record in check(tree, mutants):
            records.append(record)
            print(record["end"], record["file"], record["function"], record["mistake"], file=sys.stderr, flush=True)
    ends = Counter(str(record["end"]) for record in records)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[subject(commit).split()[0]] = {**ends, "mutants": records}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{subject(commit)}: {dict(ends)}")


if __name__ == "__main__":
    main()
