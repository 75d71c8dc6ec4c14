"""Small mistakes planted in source code: which are possible, and how the same one is found where its code has moved.

A mistake changes one unit of a function: a simple statement, or the condition of an `if` or a loop. It turns a comparison,
exchanges an operator, changes a number or a truth value, leaves a statement out or negates a condition.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

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
