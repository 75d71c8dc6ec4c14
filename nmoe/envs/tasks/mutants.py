"""Plants one fault in a Python module: the operators of mutation testing, each with its sites in the module's syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_OPERATORS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Add: (ast.Sub, ast.Mult),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add, ast.Sub),
    ast.Mod: (ast.FloorDiv, ast.Mult),
}
_COMPARISONS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.Gt,),
    ast.Gt: (ast.Lt,),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
}
_BOUNDARIES: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {ast.Lt: (ast.LtE,), ast.Gt: (ast.GtE,)}
KINDS = ("operator", "comparison", "boundary", "off by one", "constant", "name", "deleted line", "indentation")

Change = Callable[[Any], None]


@dataclass(frozen=True)
class Mutant:
    """A faulty version of a module: the n-th change of the n-th node of its syntax tree."""

    kind: str
    node: int
    change: int

    def applied(self, source: str) -> str:
        """Returns the faulty version of the module, as `ast.unparse` writes it."""
        tree = ast.parse(source)
        node, names = list(_nodes(tree))[self.node]
        _, change = list(_changes(node, names))[self.change]
        change(node)
        return ast.unparse(tree) + "\n"


def mutants(source: str) -> dict[str, list[Mutant]]:
    """Returns the faulty versions of a module by the kind of their fault, in a fixed order. Each has one fault; whether it behaves
    otherwise than the module, tests have to show.

        >>> source = "def f(x):\\n    return x > 3\\n"
        >>> [mutant.applied(source) for mutant in mutants(source)["boundary"]]
        ['def f(x):\\n    return x >= 3\\n']
    """
    found: dict[str, list[Mutant]] = {}
    for index, (node, names) in enumerate(_nodes(ast.parse(source))):
        for number, (kind, _) in enumerate(_changes(node, names)):
            found.setdefault(kind, []).append(Mutant(kind, index, number))
    return found


def _nodes(tree: ast.Module) -> Iterator[tuple[ast.AST, tuple[str, ...]]]:
    """Yields the nodes of each function with its parameters and variables."""
    for function in tree.body:
        bound = [one.arg for one in ast.walk(function) if isinstance(one, ast.arg)]
        bound += [one.id for one in ast.walk(function) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)]
        for node in ast.walk(function):
            yield node, tuple(dict.fromkeys(bound))


def _changes(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, Change]]:
    if isinstance(node, ast.BinOp | ast.AugAssign):
        for other in _OPERATORS.get(type(node.op), ()):
            yield "operator", _setting("op", other())
    elif isinstance(node, ast.Compare):
        for kind, table in (("comparison", _COMPARISONS), ("boundary", _BOUNDARIES)):
            for other in table.get(type(node.ops[0]), ()):
                yield kind, _setting("ops", [other()])
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        for value in (node.value - 1, node.value + 1):
            yield "off by one", _setting("value", value)
        for value in range(10):
            if abs(value - node.value) > 1:
                yield "constant", _setting("value", value)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names:
        for name in names:
            if name != node.id:
                yield "name", _setting("id", name)
    for field in ("body", "orelse"):
        body = getattr(node, field, None)
        if isinstance(body, list):
            for index, statement in enumerate(body):
                if len(body) > 1 and not isinstance(statement, ast.For | ast.If | ast.FunctionDef):
                    yield "deleted line", _deleting(field, index)
                if index and isinstance(statement, ast.Return) and isinstance(body[index - 1], ast.For):
                    yield "indentation", _moving(field, index)


def _setting(field: str, value: Any) -> Change:
    return lambda node: setattr(node, field, value)


def _deleting(field: str, index: int) -> Change:
    def change(node: Any) -> None:
        del getattr(node, field)[index]

    return change


def _moving(field: str, index: int) -> Change:
    """Moves a statement to the end of the loop before it."""

    def change(node: Any) -> None:
        body = getattr(node, field)
        body[index - 1].body.append(body.pop(index))

    return change
