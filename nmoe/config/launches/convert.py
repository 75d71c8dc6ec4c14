"""Converts a launch by the catalogue of its program: nmoe's keys, and the lists of what differs, is to be filled in, has no
counterpart, or is unknown."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from nmoe.config.commands import COMMANDS
from nmoe.config.launches.read import Given, Launch
from nmoe.config.launches.rows import NOTHING, Program, Reading, Row, is_unset
from nmoe.config.schema import default_of
from nmoe.errors import UserError, shown


@dataclass
class Imported:
    """A launch in nmoe's keys. `values` and `origins` are by nmoe's keys, with dots; the lists are lines for the user."""

    program: Program
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    differs: list[str] = field(default_factory=list)
    to_fill: dict[str, str] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    """The given keys that a value or a remark comes from. A key that no row used is named as one without effect."""


def convert(launch: Launch, program: Program) -> Imported:
    """Returns the launch in nmoe's keys. Raises UserError for two spellings of one key."""
    _refuse_two_spellings(launch, program)
    reading = Reading.of(launch, program)
    found = Imported(program)
    for row in program.rows:
        if row.convert is not None:
            _apply(row, reading, found)
    for row in program.rows:
        _unset(row, reading, found)
    for key, one in reading.given.items():
        _account(key, one, found)
    for key, one in launch.starter.items():
        found.without.append(_of_starter(key, one, key in reading.counted))
    for row in program.rows:
        _differences(row, reading, found)
    found.differs = [*map(_without_keys, reading.notes), *found.differs, *program.always]
    found.to_fill = reading.to_fill
    return found


def _refuse_two_spellings(launch: Launch, program: Program) -> None:
    seen: dict[str, Given] = {}
    for key, one in launch.given.items():
        if (other := seen.get(name := program.canonical(key))) is not None:
            raise UserError(f"{one.where}: {key} and {other.key} ({other.where}) are the same key; leave one out")
        seen[name] = one


def _apply(row: Row, reading: Reading, found: Imported) -> None:
    reading.read.clear()
    remarks = len(reading.notes) + len(reading.to_fill)
    values = {key: value for key, value in _converted(row, reading).items() if value is not None}
    if values or len(reading.notes) + len(reading.to_fill) > remarks:
        found.used |= reading.read
    given = [key for key in reading.given if key in reading.read]
    for key, value in values.items():
        assert key not in found.values, f"{key} has two rows"
        if not given and key not in _ALWAYS and value == default_of(COMMANDS[found.program.command], key):
            continue
        found.values[key] = value
        found.origins[key] = _origin(row, given, reading)


def _converted(row: Row, reading: Reading) -> Mapping[str, Any]:
    """Returns nmoe's keys for a row. Raises UserError for values that the other trainer could not take either."""
    assert row.convert is not None, "chosen by it"
    try:
        return row.convert(reading)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        named = [one for key, one in reading.given.items() if key in row.theirs]
        read = named or [one for key, one in reading.given.items() if key in reading.read]
        values = ", ".join(_written(one, row.secret) for one in read[:6])
        raise UserError(f"{read[0].where}: {values}: not values of such keys ({error}); correct them") from error


# What the defaults of nmoe's commands depend on other keys for, and what a reader looks for first.
_ALWAYS = frozenset(
    {"optimizer.learning_rate", "algorithm.advantage", "algorithm.aggregation", "optimizer.min_lr_ratio"}
)


def _origin(row: Row, given: Sequence[str], reading: Reading) -> str:
    """Returns from which of the trainer's keys a value comes, for the comment behind it."""
    if given:
        return ", ".join(_written(reading.given[name], _is_secret(name, reading.program)) for name in given)
    defaults = [name for name in row.theirs if reading.program.defaults.get(name) is not None]
    shown_defaults = ", ".join(f"{name} = {_text(reading.program.defaults[name])}" for name in defaults[:3])
    return f"default of {reading.program.trainer}" + (f": {shown_defaults}" if shown_defaults else "")


# Names that may hold a key, in a trainer's catalogue and in tables of variables; a count of tokens is none.
_SECRET = re.compile(
    r"runtime.?env|env_vars|(api|access|auth|private|wandb).?key|passw|secret|credential|authorization|token$",
    re.IGNORECASE,
)
_IN_TEXT = (
    (re.compile(r"(://)[^/@\s]+@"), r"\1...@"),  # user and password of a URL
    (re.compile(r"(bearer\s+)[^\s\"']+", re.IGNORECASE), r"\1..."),
    (re.compile(r"([\w-]*(?:key|token|secret|passw\w*)[\"']?\s*[=:]\s*[\"']?)[^\s\"',}]+", re.IGNORECASE), r"\1..."),
    (re.compile(r"\b(sk-|hf_|ghp_)\w{8,}"), r"\1..."),
)


def _written(one: Given, secret: bool) -> str:
    is_shown = not (one.value is True or secret or _SECRET.search(one.key))
    return f"{one.key} = {_text(one.value)}" if is_shown else _without_keys(one.key)


def _without_keys(value: Any) -> Any:
    """Returns a value as it may be printed: without keys and passwords, at any depth."""
    if isinstance(value, dict):
        return {name: "..." if _SECRET.search(str(name)) else _without_keys(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_keys(one) for one in value]
    if isinstance(value, str):
        for pattern, kept in _IN_TEXT:
            value = pattern.sub(kept, value)
    return value


def _text(value: Any) -> str:
    value = _without_keys(value)
    if isinstance(value, bool):
        return str(value).lower()
    return (
        "null"
        if value is None
        else shown(value, 60)
        if isinstance(value, list | tuple | dict)
        else str(value).replace("\n", "\\n")[:60]
    )


def _unset(row: Row, reading: Reading, found: Imported) -> None:
    """Says to fill in the keys that come from variables which the script does not set."""
    unset = [
        reading.given[name] for name in row.theirs if name in reading.given and is_unset(reading.given[name].value)
    ]
    if row.convert is None or not unset:
        return
    values = ", ".join(_written(one, row.secret) for one in unset)
    for ours in [key for key in row.ours if key in found.values] or row.ours[:1]:
        reading.fill(ours, f"{values}: the script does not set this variable")


def _account(key: str, one: Given, found: Imported) -> None:
    """Names a given key that has no counterpart, has no effect here, or is unknown."""
    row = found.program.row_of(key)
    if key.startswith("${"):
        found.without.append(f"{one.where}: {key}: an array that the script does not set; its keys are not read")
    elif row is None:
        found.unknown.append(
            f"{one.where}: {_written(one, _is_secret(key, found.program))}{_closest(key, found.program)}"
        )
    elif row.convert is None:
        found.without.append(f"{_written(one, row.secret)}: {row.text}")
    elif not is_unset(one.value) and key not in found.used:
        found.without.append(f"{_written(one, row.secret)}: has no effect beside the other keys ({row.text})")


def _is_secret(key: str, program: Program) -> bool:
    if (row := program.row_of(key)) is not None:
        return row.secret
    return any(part in key.lower() for part in ("token", "api_key", "wandb_key", "password", "secret"))


def _closest(key: str, program: Program) -> str:
    names = [name for row in program.rows for name in row.theirs if "*" not in name] + list(program.aliases)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.8)
    return f" (closest: {near[0]})" if near else ""


def _of_starter(key: str, one: Given, is_counted: bool) -> str:
    """Returns the line for an option of what starts the program, or a variable set in front of it."""
    if is_counted:
        return f"{key} {_text(one.value)}: counts in the size of a step, and in [placement]"
    if "-" not in key:
        return f"{key}: a variable of the environment; set it in front of nmoe's command if your code reads it"
    value = "" if one.value is True or _SECRET.search(key) else f" {_text(one.value)}"
    return f"{key}{value}: an option of what starts the trainer; nmoe starts its processes by [placement]"


def _differences(row: Row, reading: Reading, found: Imported) -> None:
    """Says that a key without counterpart changes the run, where its value (given, or the trainer's default) is not neutral."""
    if row.neutral is NOTHING or row.convert is not None:
        return
    for name in row.theirs:
        if name not in reading.given and name not in reading.program.defaults:
            continue
        value = reading[name]
        if value is None or value == row.neutral:
            continue
        how = (
            _written(reading.given[name], row.secret)
            if name in reading.given
            else f"{name} = {_text(value)} (default of {reading.program.trainer})"
        )
        found.differs.append(f"{how}: {row.text}")


def recognised(launch: Launch, programs: Sequence[Program], asked: str | None) -> Program:
    """Returns the program of a launch: the one that `asked` names, else by its module or script, else by its keys.

    Raises UserError if no program, or more than one, fits.
    """
    names = [program.name for program in programs]
    if asked is not None:
        if asked not in names:
            raise UserError(f"--program={asked}: unknown; one of {', '.join(names)}")
        return programs[names.index(asked)]
    known = {one.name: sum(one.knows(key) for key in launch.given) for one in programs}
    dotted = launch.program.removesuffix(".py").replace("/", ".")
    # The name of a module decides; a script's name only where the keys are the program's.
    fitting = {
        module: one
        for one in programs
        for module in one.modules
        if module in dotted and ("." in module or " " in module or 2 * known[one.name] >= len(launch.given))
    }
    if fitting:
        return fitting[max(fitting, key=len)]
    best = max(known.values(), default=0)
    fits = [name for name in names if known[name] == best]
    started = f" of {launch.program}" if launch.program else ""
    if best == 0 or 2 * best < len(launch.given):
        raise UserError(
            f"{launch.where}: the launch{started} is of no trainer that is known ({best} of its {len(launch.given)} keys "
            f"are); name it with --program, one of " + ", ".join(names)
        )
    if len(fits) > 1:
        raise UserError(f"{launch.where}: the keys{started} fit {', '.join(fits)}; name one with --program")
    return programs[names.index(fits[0])]


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keys with dots as nested tables; a number in a key is the index of an array of tables."""
    root: dict[str, Any] = {}
    for key, value in values.items():
        parts, table = key.split("."), root
        for part, after in pairwise(parts):
            if part.isdigit():
                continue
            below: Any = table.setdefault(part, [] if after.isdigit() else {})
            if isinstance(below, list):
                while len(below) <= int(after):
                    below.append({})
                below = below[int(after)]
            table = below
        table[parts[-1]] = value
    return root
