"""The parts of a catalogue: rows, each of which says what some keys of another trainer are in nmoe's configuration, or why there
is no counterpart. `docs/reference/imports.md` is generated from the same rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from nmoe.config.launches.read import Given, Launch

NOTHING: Any = object()
"""No value: the trainer has no default of this key."""

Converted = Mapping[str, Any]
"""nmoe's keys with dots, each with its value; None leaves a key out."""


@dataclass(frozen=True)
class Row:
    """One line of a catalogue.

    `keys` are the trainer's keys, each with the keys of nmoe that it decides, the nearest one first; `convert` gives nmoe's keys
    with their values, from all of them together. `*` stands for any ending. Without `convert` the keys have no counterpart, and
    `text` is the reason. If their value is not `neutral`, the run learns otherwise in nmoe, and the import says so. `secret` values
    are never printed.
    """

    keys: Mapping[str, tuple[str, ...]]
    text: str
    convert: Callable[[Reading], Converted] | None = None
    neutral: Any = NOTHING
    secret: bool = False

    def converted(self, reading: Reading) -> Converted:
        """Returns nmoe's keys with their values, of a row that has a counterpart."""
        assert self.convert is not None, "a row without a counterpart"
        return self.convert(reading)

    @property
    def theirs(self) -> tuple[str, ...]:
        """The trainer's keys."""
        return tuple(self.keys)

    @property
    def ours(self) -> tuple[str, ...]:
        """nmoe's keys."""
        return tuple(dict.fromkeys(key for keys in self.keys.values() for key in keys))


@dataclass(frozen=True)
class Program:
    """One program of a trainer: how its launches are recognised, and what its keys are in nmoe.

    `defaults` are the trainer's values of keys that a launch leaves out, from its source (`source` names package and files).
    `aliases` are other spellings of keys, of older versions. `always` are differences between the two programs that no key decides.
    """

    trainer: str
    name: str
    command: str
    source: str
    modules: tuple[str, ...]
    rows: tuple[Row, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    always: tuple[str, ...] = ()

    def canonical(self, key: str) -> str:
        """Returns the catalogue's spelling of a key: by a name, else by a pattern."""
        spelled = key.replace("-", "_")
        if key not in self._by_name and (
            spelled in self.aliases or self.row_of(key) is None or self.row_of(spelled) not in (None, self.row_of(key))
        ):
            key = spelled
        plain = key if self._is_listed(key) else key.removeprefix("no_")
        return self.aliases.get(plain, plain)

    def knows(self, key: str) -> bool:
        """Whether a key, as a launch spells it, is in the catalogue."""
        return self.row_of(self.canonical(key)) is not None

    def read(self, key: str, one: Given) -> Given:
        """Returns a given key with its value; `--no_name` and `--no-name` switch a name off."""
        plain = key.replace("-", "_")
        is_negation = plain.startswith("no_") and not self._is_listed(plain) and one.value is True
        return Given(one.key, False, one.where) if is_negation else one

    def _is_listed(self, key: str) -> bool:
        return key in self.aliases or self.row_of(key) is not None

    def row_of(self, key: str) -> Row | None:
        """Returns the row that has a key: by its name, else by the longest pattern."""
        if key in self._by_name:
            return self._by_name[key]
        return next((row for name, row in self._patterns if fnmatchcase(key, name)), None)

    @cached_property
    def _by_name(self) -> dict[str, Row]:
        return {name: row for row in reversed(self.rows) for name in row.theirs if "*" not in name}

    @cached_property
    def _patterns(self) -> list[tuple[str, Row]]:
        found = [(name, row) for row in self.rows for name in row.theirs if "*" in name]
        return sorted(found, key=lambda one: -len(one[0]))


@dataclass
class Reading:
    """The values of a launch, given or by the trainer's default, as conversions read them."""

    program: Program
    given: Mapping[str, Given]
    starter: Mapping[str, Given] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    to_fill: dict[str, str] = field(default_factory=dict)
    counted: set[str] = field(default_factory=set)
    module: str = ""
    read: set[str] = field(default_factory=set)
    """The given keys that conversions looked at since `read` was last emptied: those that a value can come from."""

    @classmethod
    def of(cls, launch: Launch, program: Program) -> Reading:
        """Reads a launch by a program's spelling of keys."""
        given = {program.canonical(key): program.read(key, one) for key, one in launch.given.items()}
        return cls(program, given, launch.starter, module=launch.program)

    def __getitem__(self, key: str) -> Any:
        """Returns the value of a key: given, else the trainer's default, else None."""
        if key in self.given:
            self.read.add(key)
            return self.given[key].value
        return self.program.defaults.get(key)

    def below(self, table: str) -> dict[str, Any]:
        """Returns the keys of a table, given one by one (`table.key`) or as the table itself."""
        whole = self[table]
        found = dict(whole) if isinstance(whole, Mapping) else {}
        below = [key for key in self.given if key.startswith(f"{table}.")]
        return found | {key.removeprefix(f"{table}."): self[key] for key in below}

    def has(self, *keys: str) -> bool:
        """Whether the launch gives one of these keys."""
        return any(key in self.given for key in keys)

    def number(self, key: str, default: float = 0) -> float:
        """Returns a key's value as a number; `default` without one, and for a variable that the script does not set, which the
        import names. Raises ValueError for a given value that is no number."""
        value = self[key]
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
        if key in self.given and value is not None and not is_unset(value):
            raise ValueError(f"{key} takes a number")
        usual = self.program.defaults.get(key)
        return usual if isinstance(usual, int | float) and not isinstance(usual, bool) else default

    def whole(self, key: str, default: int = 0) -> int:
        return int(self.number(key, default))

    def yes(self, key: str) -> bool:
        """Returns whether a switch is on."""
        return bool(self[key]) and str(self[key]).lower() not in ("false", "no", "none", "0")

    def option(self, *names: str) -> Any:
        """Returns an option of what starts the program, by its name at the end of a key: `--num_processes`; None without it."""
        found = next((key for name in names for key in self.starter if key.split()[-1].lstrip("-") == name), None)
        if found is None:
            return None
        self.counted.add(found)
        return self.starter[found].value

    def differs(self, text: str) -> None:
        """Says that the run learns otherwise in nmoe."""
        if text not in self.notes:
            self.notes.append(text)

    def fill(self, key: str, text: str) -> None:
        """Says that the user has to fill in nmoe's `key`."""
        self.to_fill.setdefault(key, text)


def _decimal(value: Any) -> Any:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def is_unset(value: Any) -> bool:
    """Whether a value has a variable in it that the script does not set."""
    if isinstance(value, list | tuple):
        return any(is_unset(one) for one in value)
    return isinstance(value, str) and "$" in value


def same(theirs: str, ours: str, text: str = "the same") -> Row:
    """The value as it is."""
    return together({theirs: ours}, lambda reading: {ours: reading[theirs]}, text)


def whole(theirs: str, ours: str, text: str = "the same; -1 and 0 leave it out") -> Row:
    """A count, which other trainers switch off by -1 or 0."""

    def convert(reading: Reading) -> Converted:
        number = reading.whole(theirs)
        return {ours: number if number > 0 else None}

    return together({theirs: ours}, convert, text)


def number(theirs: str, ours: str, text: str = "the same") -> Row:
    """A number with decimals, also where it was written as a whole one."""
    return together({theirs: ours}, lambda reading: {ours: _decimal(reading[theirs])}, text)


def switch(theirs: str, ours: str, text: str = "the same") -> Row:
    """true or false."""
    return together({theirs: ours}, lambda reading: {ours: reading.yes(theirs)}, text)


def together(
    keys: Mapping[str, str | tuple[str, ...]], convert: Callable[[Reading], Converted], text: str, secret: bool = False
) -> Row:
    """Several keys that decide one or several of nmoe's together; each of them with the nearest ones."""
    named = {theirs: (ours,) if isinstance(ours, str) else ours for theirs, ours in keys.items()}
    return Row(named, text, convert, secret=secret)


def without(reason: str, *theirs: str, neutral: Any = NOTHING, secret: bool = False) -> Row:
    """Keys without a counterpart, and the reason."""
    return Row(dict.fromkeys(theirs, ()), reason, None, neutral, secret)
