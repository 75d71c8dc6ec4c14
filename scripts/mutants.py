"""Plants mistakes in the code and counts those that the tests notice: python scripts/mutants.py [COMMIT]

Plants 50 mistakes, one at a time, in learner, grading and engine, and runs the test files that are nearest to the changed module in
imports. A mistake changes one unit of a function, a simple statement or the condition of an `if` or a loop: it turns a comparison,
exchanges an operator, changes a number or a truth value, leaves a statement out or negates a condition. A mutant is killed where a
test fails or takes far too long; it survives where all pass.

The mutants are drawn by a seed from the code of `BEFORE`, in every commit the same, and are found by function and text: code that
has moved keeps its mutants, and those whose code is gone are reported as such. Writes benchmarks/results/mutants.json, one entry
for each commit; started again after an interruption, it goes on there.
"""

from __future__ import annotations

import ast
import copy
import json
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from commits import BEFORE, ROOT, checked_out, environment, resolved
from count_code import imports, sources

sys.path.insert(0, str(ROOT / "benchmarks"))

from result_files import write_results

RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"

ROOMS = {"nmoe/learner/": 17, "nmoe/rl/grading/": 17, "nmoe/engine/": 16}
"""How many mutants the code of each room at `BEFORE` gets."""

LEFT_OUT = ("/code/", "graphs.py")
"""Code that is tested in a sandbox or on a GPU."""

SLOW = "not compiled and not trl and not settle_is_total and not whoever_is_cancelled"
"""Tests that are left out for the time that they take, in the language of pytest's -k."""

SEED = 12
TEST_FILES = 2
TEST_ROOMS = {"learner", "grading", "engine", "rl"}
"""Only tests in folders of these names are run: those of whole runs take too long."""

LIMIT_CPU_S = 60
LIMIT_S = 3600


_COMPARISONS: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: Mapping[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
_CONDITIONAL = (ast.If, ast.While, ast.IfExp)
_SIMPLE = (ast.Assign, ast.AugAssign, ast.Return, ast.Expr, ast.Assert, ast.Raise, ast.Delete)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutation:
    """A mistake by what it replaces: Mutation("Optimizer.step", "self.steps += 1", 0, "pass") leaves the first such statement of
    that method out. Code is written as `ast.unparse` does."""

    function: str
    unit: str
    occurrence: int
    mistake: str


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """The functions and methods of a module by qualified name; one within another belongs to the outer."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")


def units(function: Function) -> Iterator[ast.stmt | ast.expr]:
    """The simple statements and conditions of a function, in order; docstrings are none."""
    for node in ast.walk(function):
        if isinstance(node, _CONDITIONAL):
            yield node.test
        elif isinstance(node, _SIMPLE) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            yield node


def mutations(name: str, function: Function) -> Iterator[Mutation]:
    """Every mistake that can be made in a function."""
    seen: dict[str, int] = {}
    for unit in units(function):
        text = ast.unparse(unit)
        occurrence = seen.get(text, 0)
        seen[text] = occurrence + 1
        for mistake in _mistakes(unit):
            if mistake != text:
                yield Mutation(name, text, occurrence, mistake)


def _mistakes(unit: ast.stmt | ast.expr) -> Iterator[str]:
    if isinstance(unit, ast.expr):
        yield f"not ({ast.unparse(unit)})"
    elif _can_be_left_out(unit):
        yield "pass"
    places = [place for place, node in enumerate(ast.walk(unit)) if _change(node) is not None]
    for place in places:
        changed = copy.deepcopy(unit)
        node = list(ast.walk(changed))[place]
        change = _change(node)
        assert change is not None
        change()
        yield ast.unparse(changed)


def _can_be_left_out(unit: ast.stmt) -> bool:
    """Leaving out what binds a name would be an error at once, which is no test of the tests."""
    if isinstance(unit, ast.Assign):
        return not any(isinstance(target, ast.Name | ast.Tuple) for target in unit.targets)
    return isinstance(unit, ast.AugAssign | ast.Raise | ast.Expr) and not isinstance(
        getattr(unit, "value", None), ast.Yield | ast.YieldFrom
    )


def _change(node: ast.AST) -> Callable[[], None] | None:
    """What makes a mistake of a node, in place; None where there is nothing to mistake."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
        compare, turned = node, _COMPARISONS[type(node.ops[0])]()
        return lambda: compare.ops.__setitem__(0, turned)
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _OPERATORS:
        # Texts and types are joined by operators, too: there the mistake would be an error at once.
        operation, other = node, _OPERATORS[type(node.op)]()
        return lambda: setattr(operation, "op", other)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, str):
        constant = node
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        return lambda: setattr(constant, "value", value)
    return None


def planted(source: str, name: str, mutation: Mutation) -> str | None:
    """`source` with the mistake in its function `name`; None where that does not have the unit."""
    tree = ast.parse(source)
    for found, function in functions(tree):
        if found == name:
            matching = [unit for unit in units(function) if ast.unparse(unit) == mutation.unit]
            if len(matching) > mutation.occurrence:
                _Replace(matching[mutation.occurrence], mutation.mistake).visit(tree)
                return ast.unparse(ast.fix_missing_locations(tree))
    return None


class _Replace(ast.NodeTransformer):
    def __init__(self, unit: ast.stmt | ast.expr, mistake: str) -> None:
        self.unit = unit
        (statement,) = ast.parse(mistake).body
        self.new = statement.value if isinstance(unit, ast.expr) and isinstance(statement, ast.Expr) else statement

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.unit else self.generic_visit(node)


Index = Mapping[str, Sequence[tuple[str, str, int]]]
"""By unit: the files and functions that have it, and how often."""


def indexed(sources: Mapping[str, str]) -> Index:
    """The units of all files, by path and text."""
    index: dict[str, list[tuple[str, str, int]]] = {}
    for path, source in sources.items():
        for name, function in functions(ast.parse(source)):
            for text, times in Counter(ast.unparse(unit) for unit in units(function)).items():
                index.setdefault(text, []).append((path, name, times))
    return index


def place(index: Index, mutation: Mutation, path: str) -> tuple[str, str] | None:
    """File and function where a mistake from the file `path` can be made: in a function of that qualified name, else of that bare
    name, else in the only function that has the unit. Among several, one in a file of the same name comes first."""
    bare = mutation.function.rsplit(".", 1)[-1]
    found = [(file, name) for file, name, times in index.get(mutation.unit, ()) if times > mutation.occurrence]
    named = [(file, name) for file, name in found if name.rsplit(".", 1)[-1] == bare]
    base = path.rsplit("/", 1)[-1]
    named.sort(key=lambda each: (each[1] != mutation.function, each[0].rsplit("/", 1)[-1] != base, each))
    if named:
        return named[0]
    return found[0] if len(found) == 1 else None


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
        found = place(index, mutation, path)
        text = planted(texts[found[0]], found[1], mutation) if found else None
        if found is None or text is None:
            yield {"function": mutation.function, "end": "gone"}
            continue
        killing = [killer] if killer and (tree / killer).is_file() else []
        files_run = list(dict.fromkeys([*killing, *tests[found[0]]]))
        with mistaken(tree, found[0], text):
            failed = first_failure(tree, files_run) if files_run else None
        if failed is not None and failed not in sound:
            if first_failure(tree, [failed]) is not None:
                raise RuntimeError(f"{failed} fails without a mutant")
            sound.add(failed)
        end = {"end": "killed", "by": failed.split("::")[0]} if failed else {"end": "survived"}
        yield {"function": mutation.function, **end}


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
            write_results(RESULTS, results)
            path, mutation = mutants[len(records) - 1]
            print(record["end"], path, mutation.function, mutation.mistake, flush=True)
    print("\n".join(summary(results)))


if __name__ == "__main__":
    main()
