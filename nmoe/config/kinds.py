"""Recognises by its tables for what a TOML file is written (a command's run, an environment, a data preparation), so that a file in
the wrong position gives a single error line."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from nmoe.config.base import Section
from nmoe.config.commands import COMMANDS
from nmoe.config.environment import EnvironmentSettings
from nmoe.config.overrides import read_override
from nmoe.config.packaged import find_configuration
from nmoe.config.pipeline import PipelineSettings
from nmoe.config.preparation import PreparationSettings
from nmoe.parsing import toml_of

_KINDS: Mapping[str, type[Section]] = {
    "an environment": EnvironmentSettings,
    "a configuration of `nmoe data prepare`": PreparationSettings,
    "a pipeline of `nmoe speedrun`": PipelineSettings,
    **{f"a configuration of `nmoe {command}`": schema for command, schema in COMMANDS.items()},
}
"""The schema of each kind of file, by the name of the kind in messages."""


def command_for(path: Path, overrides: Sequence[str] = ()) -> str:
    """Returns the command that a configuration is written for: the one whose schema has the fewest unknown and missing tables,
    at a tie the first in `COMMANDS`. Raises UserError if no configuration has that name."""
    path = find_configuration(str(path))
    try:
        tables = set(toml_of(path.read_text()))
    except (OSError, ValueError):
        tables = set()  # loading it raises the error
    tables |= {str(override[0][0]) for text in overrides if (override := read_override(text)) is not None}

    def misfit(command: str) -> int:
        fields = COMMANDS[command].model_fields
        lacking = {name for name, field in fields.items() if field.is_required()} - tables
        return len(tables - fields.keys()) + len(lacking)

    return min(COMMANDS, key=misfit)


def of_another_kind(path: Path, tables: Mapping[str, Any], keys: Collection[str], schema: type[Section]) -> str | None:
    """Returns the message for a file `path` that is written for another schema than `schema`. It names the file's kind (an
    environment, say) and where the file belongs. None if the file may fit `schema`.

    `tables` is the parsed file, and `keys` are the top-level keys of file and overrides. The file is of another kind if `schema`
    has none of its keys and the other kind has most of them. It is so, too, if a table is missing that only `schema` requires,
    while every table is there that the other kind requires, and the other kind knows more of the file's tables.
    """
    own = next((name for name, other in _KINDS.items() if other is schema), None)
    if own is None or not tables:
        return None

    def unknown(kind: type[Section], among: Collection[str]) -> set[str]:
        return set(among) - kind.model_fields.keys()

    def lacking(kind: type[Section], among: Collection[str]) -> set[str]:
        return {key for key, known in kind.model_fields.items() if known.is_required()} - set(among)

    best = min(_KINDS, key=lambda name: len(unknown(_KINDS[name], tables)) + len(lacking(_KINDS[name], tables)))
    strangers = unknown(_KINDS[best], tables)
    foreign = unknown(schema, tables) == tables.keys() and 2 * len(strangers) < len(tables)
    for_another_command = (
        bool(lacking(schema, keys) - _KINDS[best].model_fields.keys())
        and not lacking(_KINDS[best], tables)
        and len(strangers) < len(unknown(schema, tables))
    )
    if best == own or not (foreign or for_another_command):
        return None
    return f"is {best}, not {own}{_remedy(path, tables, best, schema)}"


def _remedy(path: Path, tables: Mapping[str, Any], kind: str, schema: type[Section]) -> str:
    """Returns a hint for the message: the key under which a file of this kind is named, or the file that was most likely meant."""
    if kind == "an environment":
        return f'; name it by [environment] path = "{path}"' if "environment" in schema.model_fields else ""
    named = tables.get("environment")
    if "env_id" in schema.model_fields and isinstance(named, Mapping) and isinstance(named.get("path"), str):
        return f"; its environment is {named['path']}"
    return ""
