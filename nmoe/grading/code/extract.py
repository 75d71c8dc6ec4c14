"""The code in an answer: its last fenced block, or the whole answer if there is none; and the names that code uses."""

from __future__ import annotations

import ast
from collections.abc import Iterator

# The parser takes linear time, but 100 times the size of the text in memory.
MAX_CODE_CHARS = 100_000


def code_of(answer: str) -> str:
    """Extracts the code from an answer. Total: any answer gives some text."""
    blocks = [code for _, code in fenced_blocks(answer[: 2 * MAX_CODE_CHARS])]
    return blocks[-1] if blocks else answer


def fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
    r"""The info string and content of every fenced block, as in Markdown: ("python stats.py", "x = 1\n").

    A block starts with a line of three or more backticks or tildes and its info string. It ends with a line of the same fence
    alone. A fence that is never closed is text. Takes linear time; a regular expression would search for the end again at
    every fence.
    """
    lines = text.split("\n")
    fences = [_fence(line) for line in lines]
    last_end = {line.rstrip(" \t"): index for index, line in enumerate(lines) if fences[index]}
    index = 0
    while index < len(lines):
        fence = fences[index]
        if fence and "`" not in lines[index][len(fence) :] and last_end.get(fence, -1) > index:
            end = index + 1
            while lines[end].rstrip(" \t") != fence:
                end += 1
            content = "".join(f"{line}\n" for line in lines[index + 1 : end])
            yield lines[index][len(fence) :].strip(), content
            index = end
        index += 1


def _fence(line: str) -> str:
    """The backticks or tildes that start a line, if there are three or more."""
    mark = line[:1]
    length = len(line) - len(line.lstrip(mark)) if mark in ("`", "~") and mark else 0
    return mark * length if length >= 3 else ""


def definitions(code: str) -> tuple[str, ...]:
    """The names of top-level functions and classes in code; empty if the code is not valid Python."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return tuple(node.name for node in tree.body if isinstance(node, kinds))


def after(start: str, code: str) -> str:
    """A program that runs `start` and then `code` in the same module. The code may begin with `from __future__ import`."""
    return f"{start}\nexec(compile({code!r}, 'solution.py', 'exec'), globals())\n"


def names_read(code: str) -> set[str]:
    """The names that code reads. Raises SyntaxError if it is not valid Python."""
    return {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}


def methods(code: str) -> tuple[str, ...]:
    """The names of methods and attributes that code gives its classes and objects; empty if it is not valid Python."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for one in node.body:
                if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    found.add(one.name)
                elif isinstance(one, (ast.Assign, ast.AnnAssign)):
                    found |= {
                        name.id
                        for name in ast.walk(one)
                        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
                    }
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return tuple(sorted(found))
