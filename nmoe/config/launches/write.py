"""Writes an imported launch as TOML: the lists of what the user has to look at, then the tables, with the origin of each value."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from nmoe.config.commands import COMMANDS
from nmoe.config.launches.convert import Imported, nested
from nmoe.config.loader import load_with
from nmoe.config.problems import ConfigError
from nmoe.config.toml import toml_value
from nmoe.parsing import toml_of

_WRAPPER = textwrap.TextWrapper(
    130, initial_indent="#   - ", subsequent_indent="#     ", break_long_words=False, break_on_hyphens=False
)

# The characters of an origin that still fit behind its value.
_LONGEST_BEHIND = 90

LISTS: Mapping[str, str] = {
    "to_fill": "To fill in: nmoe needs this, and the launch does not say it",
    "refused": "Refused: nmoe does not start with this configuration",
    "unknown": "Unknown: in no table of this trainer, and not read",
    "differs": "Learns otherwise than the launch",
    "without": "Without counterpart, and why",
}
"""The lists above the tables, in order, each with its heading."""


def lines_of(imported: Imported) -> dict[str, list[str]]:
    """Returns the lines of each list that has any."""
    to_fill = [f"{key}: {text}" for key, text in imported.to_fill.items()]
    found = {
        "to_fill": to_fill,
        "refused": imported.refused,
        "unknown": imported.unknown,
        "differs": imported.differs,
        "without": imported.without,
    }
    return {name: found[name] for name in LISTS if found[name]}


def written(imported: Imported) -> str:
    """Returns the configuration as TOML with comments."""
    program = imported.program
    head = [
        f"# A launch of {program.name} in nmoe's keys, for `nmoe {program.command}`. Written by `nmoe config import`.",
        f"# Defaults of {program.trainer}: {program.source}.",
    ]
    for name, lines in lines_of(imported).items():
        head += ["#", f"# {LISTS[name]}:"]
        for line in lines:
            head += _WRAPPER.wrap(line)
    return "\n".join(head) + "\n" + "\n".join(_tables(imported)) + "\n"


def _tables(imported: Imported) -> Iterator[str]:
    values = nested(imported.values)
    order = list(COMMANDS[imported.program.command].model_fields)
    for name in sorted(values, key=order.index):
        yield from _table((name,), (name,), values[name], imported)


def _table(title: tuple[str, ...], path: tuple[str, ...], table: Any, imported: Imported) -> Iterator[str]:
    """Yields a table with its own keys first, then the tables in it. `title` stands in brackets; `path` has indices, too."""
    if isinstance(table, list):
        for index, one in enumerate(table):
            yield from _table(title, (*path, str(index)), one, imported)
        return
    own = {key: one for key, one in table.items() if ".".join((*path, key)) in imported.values}
    if own or not table:
        opened, closed = ("[[", "]]") if path[-1].isdigit() else ("[", "]")
        yield f"\n{opened}{'.'.join(title)}{closed}"
    before = ""
    for key, value in own.items():
        full = ".".join((*path, key))
        said = imported.origins[full]
        shown, before = "" if said == before else said, said
        mark = "TO FILL IN" if full in imported.to_fill else ""
        if len(shown) > _LONGEST_BEHIND:
            yield from textwrap.wrap(shown, 126, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
            shown = ""
        comment = f"{mark} ({shown})" if mark and shown else mark or shown
        yield f"{key} = {toml_value(value)}" + (f"  # {comment}" if comment else "")
    for key, value in table.items():
        if key not in own:
            yield from _table((*title, key), (*path, key), value, imported)


def check(imported: Imported) -> None:
    """Checks the configuration by its command's schema; what the schema refuses goes into `imported.refused`."""
    schema = COMMANDS[imported.program.command]
    try:
        load_with(None, schema, toml_of(written(imported)), "launch")
    except ConfigError as error:
        imported.refused = [str(problem).removeprefix("launch: ") for problem in error.problems]
