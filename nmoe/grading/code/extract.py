"""Extracts code from an answer (its last fenced block, else the whole answer) and lists the names that code defines and uses."""

from __future__ import annotations

import ast
from collections.abc import Iterator

# The parser takes linear time, but 100 times the size of the text in memory.
MAX_CODE_CHARS = 100_000


def code_of(answer: str) -> str:
    """Returns the code in an answer: the last fenced block or, without one, the whole text. Blocks are found in the first 200,000
    characters only. Any answer gives some text."""
    blocks = [code for _, code in fenced_blocks(answer[: 2 * MAX_CODE_CHARS])]
    return blocks[-1] if blocks else answer


def fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
    r"""Yields the info string and the content of every fenced block, as in Markdown: ("python stats.py", "x = 1\n").

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
    """Returns the backticks or tildes that start a line if there are three or more, else an empty string."""
    mark = line[:1]
    length = len(line) - len(line.lstrip(mark)) if mark in ("`", "~") and mark else 0
    return mark * length if length >= 3 else ""


def definitions(code: str) -> tuple[str, ...]:
    """Returns the names of top-level functions and classes in code; empty if the code is not valid Python."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return tuple(node.name for node in tree.body if isinstance(node, kinds))


def after(start: str, code: str) -> str:
    """Returns a program that runs `start` and then `code` in the same module; `code` may begin with `from __future__ import`."""
    return f"{start}\nexec(compile({code!r}, 'solution.py', 'exec'), globals())\n"


def variables_in(code: str) -> set[str]:
    """Returns all variable names in code, read or assigned. Raises SyntaxError if it is not valid Python."""
    return {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}


def methods(code: str) -> tuple[str, ...]:
    """Returns the names of methods and attributes that code defines on classes and objects; empty if it is not valid Python."""
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
