"""The reference of all settings, as Markdown, from the schema itself: python -m nmoe.config.reference > docs/configuration.md"""

import json
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic_core import PydanticUndefined

from nmoe.config.base import Section
from nmoe.config.environment import EnvironmentSettings
from nmoe.config.run import RunConfig
from nmoe.config.selfplay import SelfplaySection

_INTRODUCTION = """# Configuration

A run is one TOML file; `--section.key=value` (or `--section.key value`) on the command line takes the place of a value in it, and a
command's `--help` lists its keys. An environment is a
file of its own, named by `[environment] path`, or that table itself. Relative paths start from the working directory, except
the one that names an environment and those in an environment's own file: these start from the file they stand in. This page is
printed by `python -m nmoe.config.reference`.
"""


def reference() -> str:
    """The whole page."""
    parts = [_INTRODUCTION, "# A run\n"]
    for name, field in RunConfig.model_fields.items():
        for section in _sections(field.annotation):
            if section is not EnvironmentSettings:
                parts += _tables(name, section)
    parts += ["# Self-play\n", *_tables("selfplay", SelfplaySection)]
    parts += ["# An environment\n", *_tables("", EnvironmentSettings)]
    return "\n".join(parts)


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
