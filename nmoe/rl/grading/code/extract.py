"""The code in an answer: that of its last fenced block, or the answer itself where it has none; and what code defines."""

from __future__ import annotations

import ast
import re

_FENCE = re.compile(r"^(`{3,}|~{3,})[^\n`]*\n(.*?)^\1[ \t]*$", re.DOTALL | re.MULTILINE)
# A parser is linear in the text but takes 100 times its size in memory.
MAX_CODE_CHARS = 100_000


def code_of(answer: str) -> str:
    """Total: any answer gives some text."""
    blocks = _FENCE.findall(answer[: 2 * MAX_CODE_CHARS])
    return blocks[-1][1] if blocks else answer


def definitions(code: str) -> tuple[str, ...]:
    """The names of the functions and classes that code defines on its top level; none for what is no Python."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return tuple(node.name for node in tree.body if isinstance(node, kinds))


def names_read(code: str) -> set[str]:
    """The names that code reads. Raises SyntaxError for what is no Python."""
    return {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
