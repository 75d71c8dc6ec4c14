"""The code in an answer: that of its last fenced block, or the answer itself where it has none; and what code defines."""

from __future__ import annotations

import ast
from collections.abc import Iterator

# A parser is linear in the text but takes 100 times its size in memory.
MAX_CODE_CHARS = 100_000


def code_of(answer: str) -> str:
    """Total: any answer gives some text."""
    blocks = [code for _, code in fenced_blocks(answer[: 2 * MAX_CODE_CHARS])]
    return blocks[-1] if blocks else answer


def fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
    """The info and the content of every fenced block, as Markdown has them: ("python stats.py", "x = 1\\n").

    A block begins with a line of three or more backticks or tildes and its info, and ends with a line of the same fence alone. A
    fence that no later line closes is text. Takes time linear in the text: a regular expression would look for the end anew
    at every fence.
    """
    lines = text.split("\n")
    fences = [_fence(line) for line in lines]
    last_end = {line.rstrip(" \t"): place for place, line in enumerate(lines) if fences[place]}
    place = 0
    while place < len(lines):
        fence = fences[place]
        if fence and "`" not in lines[place][len(fence) :] and last_end.get(fence, -1) > place:
            end = place + 1
            while lines[end].rstrip(" \t") != fence:
                end += 1
            content = "".join(f"{line}\n" for line in lines[place + 1 : end])
            yield lines[place][len(fence) :].strip(), content
            place = end
        place += 1


def _fence(line: str) -> str:
    """The backticks or tildes that a line begins with, if they are three or more."""
    mark = line[:1]
    length = len(line) - len(line.lstrip(mark)) if mark in ("`", "~") and mark else 0
    return mark * length if length >= 3 else ""


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
