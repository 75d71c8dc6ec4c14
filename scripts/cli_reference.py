"""Print the reference of the command line as Markdown, from typer's own tree of commands:

python scripts/cli_reference.py > docs/reference/cli.md
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, get_args

import typer.main

from nmoe.cli.command import app

_INTRODUCTION = """# Command line

Add `--help` to any verb to print its section of this page. Training verbs take a TOML file and any number of `--section.key=value`
overrides; their keys are in the [configuration reference](configuration.md). Exit codes: 0 on success, 1 if the command ran and the
result is negative (a broken promise, a difference in a replay), 2 for bad input, with one message per error.
This page is printed by `python scripts/cli_reference.py`.
"""


def reference() -> str:
    """The whole page: one section per command, groups before their commands."""
    return "\n".join([_INTRODUCTION, *_sections("nmoe", typer.main.get_command(app))])


def _sections(name: str, command: Any) -> Iterator[str]:
    yield from _section(name, command)
    for inner_name, inner in sorted(getattr(command, "commands", {}).items()):
        yield from _sections(f"{name} {inner_name}", inner)


def _section(name: str, command: Any) -> Iterator[str]:
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


if __name__ == "__main__":
    print(reference(), end="")
