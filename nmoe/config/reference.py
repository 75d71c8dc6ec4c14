"""Print the reference of all settings as Markdown, from the schema itself:

python -m nmoe.config.reference > docs/reference/configuration.md
"""

import json
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic_core import PydanticUndefined

from nmoe.config.base import Section
from nmoe.config.commands import COMMANDS
from nmoe.config.environment import EnvironmentSettings

_INTRODUCTION = """# Configuration

A run is one TOML file; `--section.key=value` (or `--section.key value`) on the command line takes the place of a value in it, and a
command's `--help` lists its keys. Each command has the tables named below, and refuses any other. An environment is a
file of its own, named by `[environment] path`, or that table itself. Relative paths start from the working directory, except
the one that names an environment and those in an environment's own file: these start from the file they stand in. This page is
printed by `python -m nmoe.config.reference`.
"""


def reference() -> str:
    """The whole page."""
    parts = [_INTRODUCTION, "# Commands\n", _commands(), "# Tables\n"]
    for name in dict.fromkeys(name for schema in COMMANDS.values() for name in schema.model_fields):
        # Commands that share a table may have less of it: the one with the most keys is shown.
        shown = {command: _section(schema, name) for command, schema in COMMANDS.items() if name in schema.model_fields}
        fullest = max(shown.values(), key=lambda section: len(section.model_fields))
        if fullest is EnvironmentSettings:
            continue
        parts += _tables(name, fullest)
        parts += _less(shown, fullest)
    parts += ["# An environment\n", *_tables("", EnvironmentSettings)]
    return "\n".join(parts)


def _commands() -> str:
    rows = [
        f"| `nmoe {command}` | {' '.join(f'`[{name}]`' for name in schema.model_fields)} |"
        for command, schema in COMMANDS.items()
    ]
    return "| command | its tables |\n|---|---|\n" + "\n".join(rows) + "\n"


def _section(schema: type[Section], name: str) -> type[Section]:
    return next(_sections(schema.model_fields[name].annotation))


def _less(shown: Mapping[str, type[Section]], fullest: type[Section]) -> Iterator[str]:
    """A line for all commands that have only these keys of a table."""
    commands: dict[tuple[str, ...], list[str]] = {}
    for command, section in shown.items():
        if len(section.model_fields) < len(fullest.model_fields):
            commands.setdefault(tuple(section.model_fields), []).append(f"`nmoe {command}`")
    for keys, those in commands.items():
        yield f"{', '.join(those)}: {', '.join(f'`{key}`' for key in keys)} alone.\n"


def _tables(path: str, section: type[Section]) -> Iterator[str]:
    """A section's table, then those of the sections in it."""
    title = f"[{path}]" if path else "(top level)"
    rows, inner = [], []
    for name, field in section.model_fields.items():
        sections = list(_sections(field.annotation))
        if sections and sections != [EnvironmentSettings]:
            inner += [(f"{path}.{name}".strip("."), one) for one in sections]
            continue
        default = "required" if field.is_required() else _shown(field.default)
        description = (field.description or "which kind this is").replace("|", "\\|")
        rows.append(f"| `{name}` | {_type(field.annotation)} | {default} | {description} |")
    if rows:
        summary = (section.__doc__ or "").splitlines()[0].removeprefix(f"{title}: ").capitalize()
        yield (
            f"## `{title}`\n\n{summary}\n\n| key | type | default | meaning |\n|---|---|---|---|\n"
            + "\n".join(rows)
            + "\n"
        )
    for inner_path, one in inner:
        yield from _tables(inner_path, one)


def _sections(annotation: Any) -> Iterator[type[Section]]:
    """The sections that a field's type names, wherever in it they stand."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    else:
        for argument in get_args(annotation):
            yield from _sections(argument)


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(argument) for argument in arguments if argument is not type(None))
    if origin is tuple:
        return f"[{', '.join(_type(argument) for argument in arguments if argument is not Ellipsis)}]"
    if annotation is EnvironmentSettings:
        return "an environment, or its `path`"
    names = {str: "string", int: "integer", float: "number", bool: "true or false"}
    return names.get(annotation, str(annotation))


def _shown(default: Any) -> str:
    if default is None or default is PydanticUndefined:
        return "none"
    return f"`{json.dumps(default)}`"


if __name__ == "__main__":
    print(reference(), end="")
