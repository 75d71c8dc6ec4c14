"""Writes docs/reference/python.md from the docstrings of the names in `nmoe.__all__`: python scripts/python_reference.py"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import nmoe
from nmoe.envs.grade import Grader
from nmoe.envs.prompts import PromptBuilder

PAGE = Path(__file__).parents[1] / "docs/reference/python.md"

ATTRIBUTES = {"Environment": {"prompts": PromptBuilder, "grader": Grader}}
"""Attributes of public classes whose methods users call."""

HEAD = """# Python

Written from the docstrings by `python scripts/python_reference.py`. Each example is executed by a test; `checkpoint` in them is the
directory of a tiny model. The [guide to the library](../guides/library.md) shows how the names work together.
"""


def page() -> str:
    """The page, one section per public name in alphabetical order."""
    return "\n".join([HEAD, *(part for name in nmoe.__all__ for part in _section(name))])


def _section(name: str) -> Iterator[str]:
    part = getattr(nmoe, name)
    yield f"## {name}\n"
    yield f"```python\n{_signature(name, part)}\n```\n"
    yield f"{inspect.getdoc(part)}\n"
    if inspect.isclass(part):
        yield from _methods(name, part)
    for attribute, kind in ATTRIBUTES.get(name, {}).items():
        yield from _methods(f"{name}.{attribute}", kind)


def _methods(name: str, kind: type) -> Iterator[str]:
    for method_name, method in vars(kind).items():
        function = getattr(method, "__func__", method)
        if not method_name.startswith("_") and inspect.isfunction(function) and function.__doc__:
            yield f"### {name}.{method_name}\n"
            yield f"```python\n{_signature(method_name, function)}\n```\n"
            yield f"{inspect.getdoc(function)}\n"


def _signature(name: str, part: object) -> str:
    """The signature, over several lines where one is too long."""
    if not callable(part):
        raise TypeError(f"{name} is neither a class nor a function")
    signature = inspect.signature(part)
    if inspect.isclass(part):
        signature = signature.replace(return_annotation=inspect.Signature.empty)
    shown = [parameter for parameter in signature.parameters.values() if parameter.name not in ("self", "cls")]
    signature = signature.replace(parameters=shown)
    line = f"{name}{signature}".replace("'", "")
    if len(line) <= 100:
        return line
    lines, keyword_only = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            lines.append("    *,")
            keyword_only = True
        lines.append(f"    {parameter},".replace("'", ""))
    result = "" if signature.return_annotation is inspect.Signature.empty else f" -> {signature.return_annotation}"
    return "\n".join([f"{name}(", *lines, ")" + result.replace("'", "")])


def main() -> int:
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
