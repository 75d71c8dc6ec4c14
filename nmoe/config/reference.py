"""Generates the reference of all settings from the schemas: the documentation page, and the keys that a command's --help lists.

python -m nmoe.config.reference > docs/reference/configuration.md
"""

import textwrap
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from nmoe.config.base import Section
from nmoe.config.commands import COMMANDS, RunConfig
from nmoe.config.environment import EnvironmentSettings
from nmoe.config.pipeline import PipelineSettings
from nmoe.config.preparation import PreparationSettings
from nmoe.config.schema import TAG, choices_of, description_of, item_of, sections_of, tag_of
from nmoe.config.tables.pools import MixturePool, SourceKeys
from nmoe.config.toml import toml_value

_INTRODUCTION = """# Configuration

A run is one TOML file. Every command lists its keys in its `--help`, and takes `--table.key=value` (or `--table.key value`)
in place of a value in the file. A command refuses keys that it does not have.

An environment is its own file, named by `[environment] path`, or the table `[environment]` itself. Relative paths start
from the working directory. Two kinds start from the file that holds them instead: the path of an environment, and the paths
in an environment's own file.

`python -m nmoe.config.reference` prints this page.
"""


class Table(NamedTuple):
    """One table of a configuration file: `Table("task_pool", JsonlPool, True, False)` is `[task_pool]` with `type = "jsonl"`."""

    path: str
    section: type[Section]
    has_variants: bool
    is_array: bool

    @property
    def title(self) -> str:
        name = f"`[[{self.path}]]`" if self.is_array else f"`[{self.path}]`"
        return f"{name} `type = {toml_value(tag_of(self.section))}`" if self.has_variants else name


def reference() -> str:
    """Returns the text of docs/reference/configuration.md."""
    parts = [
        _INTRODUCTION,
        "## Commands\n\nKeys in bold are required. `key = value` is a default of this command alone.\n",
    ]
    tables = {command: list(_tables("", schema)) for command, schema in COMMANDS.items()}
    fullest: dict[str, Table] = {}
    for table in (table for one in tables.values() for table in one):
        # Commands that share a table may have less of it: the one with the most keys is shown.
        if table.path not in fullest or len(table.section.model_fields) > len(fullest[table.path].section.model_fields):
            fullest[table.path] = table
    for command, schema in COMMANDS.items():
        parts.append(_command(command, schema, tables[command], fullest))
    parts.append("## Tables\n")
    for table in fullest.values():
        commands = [f"`nmoe {command}`" for command, one in tables.items() if any(table.path == t.path for t in one)]
        every = "every command" if len(commands) == len(COMMANDS) else ", ".join(commands)
        parts += _table(table, f"Of: {every}.")
    parts += ["## Environment\n", "The keys of an environment's file, or of `[environment]`.\n"]
    parts += [_rows(EnvironmentSettings)]
    for table in _tables("", EnvironmentSettings):
        if not issubclass(table.section, SourceKeys):
            parts += _table(table)
        if table.section is MixturePool:
            parts.append("### `[[task_pool.sources]]`\n\nThe keys of a `[task_pool]` of the source's `type`, and:\n")
            parts.append(_rows(SourceKeys))
    others: tuple[tuple[str, str, type[Section]], ...] = (
        ("Preparation of data", "nmoe data prepare", PreparationSettings),
        ("Pipelines", "nmoe speedrun", PipelineSettings),
    )
    for title, command, other in others:
        parts += [f"## {title}\n", f"The keys of a file that `{command}` reads.\n", _rows(other)]
        for table in _tables("", other):
            parts += _table(table)
    return "\n".join(parts)


def _command(command: str, schema: type[RunConfig], tables: list[Table], fullest: dict[str, Table]) -> str:
    rows = []
    for table in tables:
        shown, keys = fullest[table.path].section.model_fields, []
        for name, field in _keys(table.section).items():
            if field.is_required():
                keys.append(f"**`{name}`**")
            elif field.default != shown[name].default:
                keys.append(f"`{name} = {toml_value(field.default)}`")
            else:
                keys.append(f"`{name}`")
        if keys:
            rows.append(f"| [{table.title}](#{table.path.replace('.', '')}) | {' '.join(keys)} |")
    rows += [f"| `[{path}]` | an [environment](#environment), or its `path` |" for path in _environments("", schema)]
    return f"### `nmoe {command}`\n\n| table | keys |\n|---|---|\n" + "\n".join(rows) + "\n"


def _tables(path: str, section: type[Section], is_array: bool = False, has_variants: bool = False) -> Iterator[Table]:
    """Yields the table of a section and all tables below it, in the order of their keys; environments are left out."""
    if path:
        yield Table(path, section, has_variants, is_array)
    for name, field in section.model_fields.items():
        below = list(_sections(field.annotation))
        if below != [EnvironmentSettings]:
            for one in below:
                yield from _tables(f"{path}.{name}".strip("."), one, _is_array(field.annotation), len(below) > 1)


def _environments(path: str, section: type[Section]) -> Iterator[str]:
    for name, field in section.model_fields.items():
        for one in _sections(field.annotation):
            if one is EnvironmentSettings:
                yield f"{path}.{name}".strip(".")
            else:
                yield from _environments(f"{path}.{name}".strip("."), one)


def _table(table: Table, used_by: str = "") -> Iterator[str]:
    if not _keys(table.section):
        return
    summary = (table.section.__doc__ or "").split("\n\n")[0].replace("\n    ", " ")
    summary = summary.removeprefix(f"[{table.path}]: ").removeprefix(f"[[{table.path}]]: ")
    yield f"### {table.title}\n\n{summary[0].upper()}{summary[1:]}\n"
    if used_by:
        yield f"{used_by}\n"
    yield _rows(table.section)


def _rows(section: type[Section]) -> str:
    rows = []
    for name, field in _keys(section).items():
        default = "required" if field.is_required() else _shown(field.default)
        description = description_of(section, name).replace("|", "\\|")
        rows.append(f"| `{name}` | {_type(field.annotation)} | {default} | {description} |")
    return "| key | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def _keys(section: type[Section]) -> dict[str, FieldInfo]:
    """Returns the keys of a table with scalar or array values: without the tables below it and without `type`."""
    return {
        name: field
        for name, field in section.model_fields.items()
        if not list(_sections(field.annotation)) and name != TAG
    }


def _sections(annotation: Any) -> Iterator[type[Section]]:
    """Yields the section classes in a field's type, at any depth."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    else:
        for argument in get_args(annotation):
            yield from _sections(argument)


def _is_array(annotation: Any) -> bool:
    return get_origin(annotation) is tuple or any(_is_array(argument) for argument in get_args(annotation))


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{toml_value(value)}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(argument) for argument in arguments if argument is not type(None))
    if origin is tuple:
        return f"[{', '.join(_type(argument) for argument in arguments if argument is not Ellipsis)}]"
    if origin is dict:
        return "table"
    names = {str: "string", int: "integer", float: "number", bool: "true or false"}
    return names[annotation]


def _shown(default: Any) -> str:
    if default is None or default is PydanticUndefined:
        return "none"
    return f"`{toml_value(default)}`"


_WIDTH, _INDENT = 110, 6


def key_lines(schema: type[Section], table: str = "") -> Iterator[str]:
    """Yields the help lines of each key: `--run.seed=0`, and its meaning on the next line; a key without `=value` is required.
    An environment is listed only by its path, since it has a separate reference."""
    for name, known in schema.model_fields.items():
        key = f"{table}.{name}" if table else name
        below = sections_of(known.annotation)
        if items := sections_of(item_of(known.annotation, 0)):
            below, key = items, f"{key}.0"
        if below == (EnvironmentSettings,):
            yield f"  --{key}.path"
            yield from _wrapped(f"{description_of(schema, name)}; for its keys see docs/reference/configuration.md")
        elif below:
            for section in below:
                yield from key_lines(section, key)
        else:
            default = None if known.is_required() else _default(known.default)
            yield f"  --{key}" + ("" if default is None else f"={default}")
            choices = choices_of(known.annotation)
            yield from _wrapped(description_of(schema, name) + (f" ({', '.join(choices)})" if choices else ""))


def _wrapped(text: str) -> Iterator[str]:
    yield from textwrap.wrap(text, _WIDTH, initial_indent=" " * _INDENT, subsequent_indent=" " * _INDENT)


def _default(default: Any) -> str | None:
    """Returns the default in TOML notation; None if there is no default value to write."""
    return None if default is None or default is PydanticUndefined else toml_value(default)


if __name__ == "__main__":
    print(reference(), end="")
