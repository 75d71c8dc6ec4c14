"""Writes the pages of docs/reference that come from the code: python scripts/reference_pages.py

configuration.md has the tables of settings (`python -m nmoe.config.reference`), imports.md the keys of other trainers, cli.md
typer's tree of commands, and python.md the docstrings of the names in `nmoe.__all__`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import typer.main

import nmoe
from nmoe.cli.command import app
from nmoe.config.launches import reference as imports
from nmoe.config.reference import reference
from nmoe.envs.grade import Grader
from nmoe.envs.prompts import PromptBuilder

REFERENCE = Path(__file__).parents[1] / "docs/reference"

CLI_HEAD = """# Command line

Add `--help` to any verb to print its section of this page. Training verbs take a TOML file and any number of `--section.key=value`
overrides; their keys are in the [configuration reference](configuration.md). Exit codes: 0 on success, 1 if the command ran and the
result is negative (a broken promise, a difference in a replay), 2 for bad input, with one message per error.
`python scripts/reference_pages.py` writes this page.
"""

ATTRIBUTES = {"Environment": {"prompts": PromptBuilder, "grader": Grader}}
"""Attributes of public classes whose methods users call."""

PYTHON_HEAD = """# Python

`python scripts/reference_pages.py` writes this page from the docstrings. Each example is executed by a test, with a tiny
model in the directory `checkpoint`. The [guide to the library](../guides/library.md) shows how the names work together.
"""


def cli_page() -> str:
    """The whole page: one section per command, groups before their commands."""
    return "\n".join([CLI_HEAD, *_commands("nmoe", typer.main.get_command(app))])


def _commands(name: str, command: Any) -> Iterator[str]:
    yield from _command(name, command)
    for inner_name, inner in sorted(getattr(command, "commands", {}).items()):
        yield from _commands(f"{name} {inner_name}", inner)


def _command(name: str, command: Any) -> Iterator[str]:
    yield f"## `{name}`\n"
    description, _, examples = inspect.cleandoc(command.help or "").partition("\b")
    yield f"{description.strip()}\n"
    if examples.strip():
        yield f"```text\n{examples.strip()}\n```\n"
    rows = [row for parameter in command.params for row in _row(parameter)]
    if rows:
        yield "| argument | default | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def _row(parameter: Any) -> Iterator[str]:
    if parameter.param_type_name == "argument":
        name = parameter.metavar or parameter.name.upper()
    else:
        name = ", ".join([*parameter.opts, *parameter.secondary_opts])
        choices = get_args(parameter.type_descriptor.annotation)
        name += f" {'|'.join(choices)}" if choices and all(isinstance(one, str) for one in choices) else ""
    default = "required" if parameter.required else _shown(parameter.default)
    meaning = " ".join((getattr(parameter, "help", None) or "").split())
    yield f"| `{_escape(name)}` | {default} | {_escape(meaning)} |"


def _shown(default: Any) -> str:
    return "" if default is None or default is False or default == () else f"`{default}`"


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def python_page() -> str:
    """The page, one section per public name in alphabetical order."""
    return "\n".join([PYTHON_HEAD, *(part for name in nmoe.__all__ for part in _name(name))])


def _name(name: str) -> Iterator[str]:
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


def pages() -> dict[str, str]:
    """The text of each page by the name of its file."""
    return {
        "configuration.md": reference(),
        "imports.md": imports.page(),
        "cli.md": cli_page(),
        "python.md": python_page(),
    }


def main() -> int:
    for name, text in pages().items():
        (REFERENCE / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
