"""The base class of all tables, frozen and strict, and the marks of their fields. Errors name the key at fault."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Strict, model_validator

from nmoe.config.registry import Registry

T = TypeVar("T")

MAX_SEED = 2**63 - 1

# What any other integer is at most: nothing that a run counts, steps, tokens, records or megabytes, comes to more.
MOST = 10**12

# A file with a slice behind it, as the datasets library has it behind the name of a split.
_SLICED_FILE = re.compile(r"(?P<file>.+\.\w+)(?P<slice>\[-?[\d%]*:-?[\d%]*\])", re.DOTALL)

Array = Annotated[tuple[T, ...], Strict(False)]
"""A TOML array as an immutable tuple. TOML readers give lists, which a strict tuple would refuse; the items stay strict."""


@dataclass(frozen=True)
class FromFile:
    """Marks a section that may lie in its own TOML file: `Annotated[Settings | None, FromFile(find)]`.

    Where that table has a `path = "file.toml"`, the loader puts the named file's contents in its place: `find` gets that
    text and the directory of the file that says so, and returns the file or raises UserError. Keys that stand beside
    `path`, overrides among them, replace the file's.
    """

    find: Callable[[str, Path], Path]


@dataclass(frozen=True)
class DataPath:
    """Marks a string that is a path to data: `path: Annotated[str, DataPath()]`. In the file of a section with `own_file` a
    relative one starts from that file's directory, so that file and data can be moved together; everywhere else from the
    working directory. With `may_be_name` it is a path only where a file or directory exists there, and otherwise stays unchanged.
    """

    may_be_name: bool = False


@dataclass(frozen=True)
class NameIn:
    """Marks a string that names a part of a registry: `loss: Annotated[str, NameIn(LOSSES)]`. `among` limits nmoe's names to some;
    names of packages, of the program and of modules are always accepted.
    """

    registry: Registry
    among: tuple[str, ...] | None = None

    def refusal(self, name: str) -> str | None:
        """Why the name is refused, if it is."""
        if name in self.registry and (self.among is None or name in self.among or name not in self.registry.builtin):
            return None
        return self.registry.refusal(name, self.among)


class Conflict(NamedTuple):
    """Keys that are valid one by one but not together.

    Example: `Conflict("kv_heads", "must divide heads = 6")`. `key` is the key to point at, dotted when it lies in a
    section below, as in `stages.1.gate`, and empty for the section itself.
    """

    key: str
    message: str


class ConflictError(ValueError):
    """All conflicts of one section. A ValueError, so that pydantic reports it beside the errors of other sections."""

    def __init__(self, conflicts: list[Conflict]) -> None:
        super().__init__("; ".join(f"{key}: {message}" if key else message for key, message in conflicts))
        self.conflicts = conflicts


class Section(BaseModel):
    """A table of settings: unknown keys are refused, nothing is coerced, nothing changes after it was checked.

    The only widening is an integer where a number is wanted. `nan` and `inf` are refused: no setting means them, and
    every comparison that would catch one lets `nan` pass.

    The docstring under a key is its description in `--help`, in the reference and in errors (`nmoe.config.schema.description_of`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    own_file: ClassVar[bool] = False
    """Whether a file that holds this section alone is the start of the paths in it: see `DataPath`."""

    def conflicts(self) -> Iterator[Conflict]:
        """Yields every combination of values that cannot work. A section's are added to its bases'."""
        yield from ()

    @model_validator(mode="after")
    def _check_conflicts(self) -> Self:
        each = (vars(base)["conflicts"] for base in reversed(type(self).__mro__) if "conflicts" in vars(base))
        conflicts = [
            *self._paths_that_are_none(),
            *self._names_of_nothing(),
            *self._numbers_of_nothing(),
            *(one for own in each for one in own(self)),
        ]
        if conflicts:
            raise ConflictError(conflicts)
        return self

    def _names_of_nothing(self) -> Iterator[Conflict]:
        """Conflicts of fields that name a part which does not exist."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            for mark in field.metadata:
                if isinstance(mark, NameIn) and isinstance(value, str) and (refusal := mark.refusal(value)) is not None:
                    yield Conflict(name, refusal)

    def _numbers_of_nothing(self) -> Iterator[Conflict]:
        """Conflicts of integers above any sensible value, in fields that set no bound."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            bounded = any(hasattr(mark, "le") or hasattr(mark, "lt") for mark in field.metadata)
            if isinstance(value, int) and value > MOST and not bounded:
                yield Conflict(name, f"must be at most {MOST:,}")

    def _paths_that_are_none(self) -> Iterator[Conflict]:
        """Conflicts of paths that cannot be opened as meant: with a null character, for which Python's error would name no key;
        with a `~` that only a shell expands; with a slice that lacks its @."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if not isinstance(value, str):
                continue
            if value == "~" or value.startswith("~/"):
                whole = str(Path(value).expanduser())
                yield Conflict(name, f"~ stands for a home in a shell alone; write {whole}")
            if not any(isinstance(mark, DataPath) for mark in field.metadata):
                continue
            if "\0" in value:
                yield Conflict(name, "is a path, and has a null character")
            elif (sliced := _SLICED_FILE.fullmatch(value)) is not None and not Path(value).exists():
                yield Conflict(name, f"a slice stands behind @; write {sliced['file']}@{sliced['slice']}")


def duplicates(key: str, names: Iterable[str]) -> Iterator[Conflict]:
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            yield Conflict(f"{key}.{index}.name", "is used before; names must be unique")
        seen.add(name)


Slice = tuple[str | None, str | None]
"""First and last bound as they are written: digits, with a minus in front or a percent sign behind, or None."""

_BOUND = r"-?\d+%?"
_SLICE = rf"\[(?P<start>{_BOUND})?:(?P<stop>{_BOUND})?\]"
_PATH = re.compile(rf"(?P<name>.+)@{_SLICE}", re.DOTALL)
_SPLIT = re.compile(rf"(?P<name>\w[\w.-]*)(?:{_SLICE})?")


def split_path(path: str) -> tuple[str, Slice]:
    """A path without the slice behind it, and the slice: `("train.jsonl", (None, "1024"))`."""
    match = _PATH.fullmatch(path)
    return (path, (None, None)) if match is None else (match["name"], (match["start"], match["stop"]))


def split_name(split: str) -> tuple[str, Slice] | None:
    """A split's name and its slice; None for anything else, such as a sum of splits."""
    match = _SPLIT.fullmatch(split)
    return None if match is None else (match["name"], (match["start"], match["stop"]))


def rows_of(part: Slice, length: int) -> range:
    """The selected ones of `length` rows: as Python slices, with percents rounded to the nearest row as the datasets library
    does."""

    def bound(text: str | None) -> int | None:
        if text is None or not text.endswith("%"):
            return None if text is None else int(text)
        return round(int(text[:-1]) * length / 100)

    return range(*slice(bound(part[0]), bound(part[1])).indices(length))
