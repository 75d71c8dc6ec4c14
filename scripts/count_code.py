"""Counts the code of nmoe/ at one commit or several: python scripts/count_code.py [COMMIT ...]

Prints, side by side, the lines of code of every room, and the numbers of modules (Python files but for `__init__.py`), of all files
of nmoe/ and of all files of the repository; then for each commit the files that are too long or too short and the import circles.
Without arguments it compares the last commit before the rooms were rebuilt with HEAD; `.` is the working tree. A line of code has
a token that belongs neither to a comment nor to a docstring. C++ is not counted.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from commits import BEFORE, checked_out, resolved, subject

LONGEST, SHORTEST = 450, 40
"""Bounds on a file's lines, all of them counted."""

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Lines of code of one file. Strings that stand alone as statements are docstrings, wherever they stand."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def room_of(path: Path) -> str:
    """`rl` for `nmoe/rl/pools/pool.py`, `cli.py` for `nmoe/cli.py`."""
    return path.parts[1]


@dataclass(frozen=True)
class Imports:
    """What one module imports of nmoe: when it is imported itself, and later or only for its types."""

    at_once: frozenset[str]
    later: frozenset[str]


def imports(module: str, source: str, known: Collection[str], is_package: bool = False) -> Imports:
    """The modules of `known` that `source` names. `from package import name` is an import of `package.name` where that is a module,
    and of the package's own file otherwise."""
    at_once: set[str] = set()
    later: set[str] = set()

    def visit(node: ast.AST, found: set[str]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names if alias.name in known)
            elif isinstance(child, ast.ImportFrom):
                base = _absolute(module, child, is_package)
                named = [f"{base}.{alias.name}" for alias in child.names]
                found.update(name if name in known else base for name in named if name in known or base in known)
            deferred = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
                isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            )
            visit(child, later if deferred else found)

    visit(ast.parse(source), at_once)
    return Imports(frozenset(at_once - {module}), frozenset(later - at_once - {module}))


def _absolute(module: str, node: ast.ImportFrom, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, node.module] if node.module else parts)


def circles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module, the largest first."""
    reached = {module: _reachable(graph, module) for module in graph}
    found = {
        tuple(sorted({other for other in reached[module] if module in reached[other]}))
        for module in graph
        if module in reached[module]
    }
    return sorted(map(list, found), key=lambda circle: (-len(circle), circle))


def _reachable(graph: Mapping[str, Collection[str]], start: str) -> set[str]:
    reached: set[str] = set()
    ahead = [start]
    while ahead:
        for module in graph.get(ahead.pop(), ()):
            if module not in reached:
                reached.add(module)
                ahead.append(module)
    return reached


@dataclass(frozen=True)
class Code:
    """The counts of one commit: lines of code by room, modules, files of nmoe/ and of the repository, e.g. rooms = {"rl": 9153},
    long = {"nmoe/cli.py": 738}, short = {"nmoe/rl/turn.py": 22}, circles = [["nmoe.rl.rewards.reward",
    "nmoe.rl.rollout.trajectory"]], and `late_circles`: the further ones that imports inside of functions or for types alone close.
    Files of packages (`__init__.py`) may be short."""

    rooms: Counter[str]
    modules: int
    files: int
    tracked: int
    long: dict[str, int]
    short: dict[str, int]
    circles: list[list[str]]
    late_circles: list[list[str]]


def sources(tree: Path) -> Iterator[tuple[Path, str, str]]:
    """Path below `tree`, module name and text of every Python file of nmoe/."""
    for file in sorted((tree / "nmoe").rglob("*.py")):
        path = file.relative_to(tree)
        parts = path.with_suffix("").parts
        yield path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts), file.read_text()


def tracked(tree: Path) -> list[Path]:
    """The files of a commit, relative to `tree`. In a repository those that git tracks or would add; elsewhere all there are."""
    if not (tree / ".git").exists():
        return [path.relative_to(tree) for path in tree.rglob("*") if path.is_file()]
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate", "-z"]
    listed = subprocess.run(command, cwd=tree, check=True, capture_output=True, text=True).stdout.split("\0")
    return [Path(name) for name in listed if name and (tree / name).exists()]


def count(tree: Path) -> Code:
    """Counts the files below `tree`."""
    every = tracked(tree)
    files = list(sources(tree))
    known = {module for _, module, _ in files}
    found = {module: imports(module, text, known, path.name == "__init__.py") for path, module, text in files}
    rooms: Counter[str] = Counter()
    for path, _, text in files:
        rooms[room_of(path)] += code_lines(text)
    lengths = {str(path): len(text.splitlines()) for path, _, text in files}
    at_once = circles({module: each.at_once for module, each in found.items()})
    return Code(
        rooms,
        sum(path.name != "__init__.py" for path, _, _ in files),
        sum(path.parts[0] == "nmoe" for path in every),
        len(every),
        {path: lines for path, lines in lengths.items() if lines > LONGEST},
        {path: lines for path, lines in lengths.items() if lines < SHORTEST and not path.endswith("__init__.py")},
        at_once,
        [
            circle
            for circle in circles({module: each.at_once | each.later for module, each in found.items()})
            if circle not in at_once
        ],
    )


def report(named: Mapping[str, Code]) -> Iterator[str]:
    """The table of rooms, and what is wrong at each commit."""
    rooms = sorted({room for code in named.values() for room in code.rooms})
    yield f"{'lines of code':<16}" + "".join(f"{commit[:10]:>12}" for commit in named)
    for room in rooms:
        yield f"{room:<16}" + "".join(f"{code.rooms[room] or '':>12}" for code in named.values())
    totals = [code.rooms.total() for code in named.values()]
    yield f"{'in all':<16}" + "".join(f"{total:>12}" for total in totals)
    yield f"{'of the first':<16}" + "".join(f"{total / totals[0]:>12.1%}" for total in totals)
    for title, numbers in (
        ("modules", [code.modules for code in named.values()]),
        ("files of nmoe", [code.files for code in named.values()]),
        ("files in all", [code.tracked for code in named.values()]),
    ):
        yield f"{title:<16}" + "".join(f"{number:>12}" for number in numbers)
    for commit, code in named.items():
        yield f"\n{subject(commit)}"
        for title, lengths in ((f"over {LONGEST} lines", code.long), (f"under {SHORTEST} lines", code.short)):
            yield f"  {len(lengths)} files {title}: " + ", ".join(f"{path} {n}" for path, n in lengths.items())
        for title, found in (("at import", code.circles), ("with later and type imports", code.late_circles)):
            yield f"  {len(found)} import circles {title}"
            yield from (f"    {len(circle)}: {' '.join(circle)}" for circle in found)


def main() -> None:
    named = {}
    for commit in map(resolved, sys.argv[1:] or [BEFORE, "HEAD"]):
        with checked_out(commit) as tree:
            named[commit] = count(tree)
    print("\n".join(report(named)))


if __name__ == "__main__":
    main()
