"""Base class of all configuration tables (frozen, strictly typed), and markers for the fields of these tables."""

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

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""The name of an environment variable."""

# A file with a slice behind it, as the datasets library has it behind the name of a split.
_SLICED_FILE = re.compile(r"(?P<file>.+\.\w+)(?P<slice>\[-?[\d%]*:-?[\d%]*\])", re.DOTALL)

Array = Annotated[tuple[T, ...], Strict(False)]
"""A TOML array as an immutable tuple. TOML parsers return lists, which a strict tuple would refuse; the items stay strictly
typed."""


@dataclass(frozen=True)
class FromFile:
    """Marks a section that may be written in a separate TOML file: `Annotated[Settings | None, FromFile(find)]`.

    If the table has a key `path = "file.toml"`, the loader replaces the table by that file's contents. `find` gets the value of
    `path` and the directory of the file that contains it, and returns the file or raises UserError. Keys beside `path`, and
    overrides, take precedence over the file.
    """

    find: Callable[[str, Path], Path]


@dataclass(frozen=True)
class DataPath:
    """Marks a string that is a path to data: `path: Annotated[str, DataPath()]`. A relative path starts from the working
    directory, but in the separate file of a section with `own_file` from that file's directory, so that file and data can be
    moved together. With `may_be_name` the string is a path only if a file or directory exists there, and otherwise a name that
    stays unchanged."""

    may_be_name: bool = False


@dataclass(frozen=True)
class NameIn:
    """Marks a string that must be a name in a registry: `loss: Annotated[str, NameIn(LOSSES)]`. `among` limits the built-in
    names to some; names from installed packages, from the running program and of the form `module:name` are always accepted."""

    registry: Registry
    among: tuple[str, ...] | None = None

    def refusal(self, name: str) -> str | None:
        """Returns the error message for a name that is not allowed; None if the name is allowed."""
        if name in self.registry and (self.among is None or name in self.among or name not in self.registry.builtin):
            return None
        return self.registry.refusal(name, self.among)


class Conflict(NamedTuple):
    """A combination of values that are valid one by one but not together, and the key to report it at.

    Example: `Conflict("kv_heads", "must divide heads = 6")`. `key` is dotted if it lies in a section below, as in `stages.1.gate`,
    and empty for the section itself.
    """

    key: str
    message: str


class ConflictError(ValueError):
    """All conflicts of one section. It is a ValueError, so that pydantic reports it together with the errors of other sections."""

    def __init__(self, conflicts: list[Conflict]) -> None:
        super().__init__("; ".join(f"{key}: {message}" if key else message for key, message in conflicts))
        self.conflicts = conflicts


class Section(BaseModel):
    """A table of settings: unknown keys are refused, values are not coerced, and nothing can be changed after validation.

    The only conversion is from an integer to a float where a float is expected. `nan` and `inf` are refused: no setting needs them,
    and `nan` passes every comparison that would detect it.

    The docstring under a key is its description in `--help`, in the reference and in errors (`nmoe.config.schema.description_of`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    own_file: ClassVar[bool] = False
    """Whether relative data paths in a separate file with this section start from the file's directory (see `DataPath`)."""

    def conflicts(self) -> Iterator[Conflict]:
        """Yields every combination of values that cannot work. The conflicts of base classes are yielded too, by each base's own
        method."""
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
        """Yields a conflict for each field that names a part (task, loss, ...) that its registry does not have."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            for mark in field.metadata:
                if isinstance(mark, NameIn) and isinstance(value, str) and (refusal := mark.refusal(value)) is not None:
                    yield Conflict(name, refusal)

    def _numbers_of_nothing(self) -> Iterator[Conflict]:
        """Yields a conflict for each integer above `MOST` (10^12) in a field without an upper bound."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            bounded = any(hasattr(mark, "le") or hasattr(mark, "lt") for mark in field.metadata)
            if isinstance(value, int) and value > MOST and not bounded:
                yield Conflict(name, f"must be at most {MOST:,}")

    def _paths_that_are_none(self) -> Iterator[Conflict]:
        """Yields a conflict for each value that cannot be opened as a path in the way that it is meant: any string that begins with
        `~/` (only shells expand it), and data paths with a null character (Python's error would not name the key) or with a slice
        that lacks its `@`."""
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
"""Lower and upper bound of a slice, as written: digits, optionally with a leading minus or a trailing percent sign; None if left
out."""

_BOUND = r"-?\d+%?"
_SLICE = rf"\[(?P<start>{_BOUND})?:(?P<stop>{_BOUND})?\]"
_PATH = re.compile(rf"(?P<name>.+)@{_SLICE}", re.DOTALL)
_SPLIT = re.compile(rf"(?P<name>\w[\w.-]*)(?:{_SLICE})?")


def split_path(path: str) -> tuple[str, Slice]:
    """Splits a path into the file and the slice after `@`: `"train.jsonl@[:1024]"` gives `("train.jsonl", (None, "1024"))`. Without
    a slice both bounds are None."""
    match = _PATH.fullmatch(path)
    return (path, (None, None)) if match is None else (match["name"], (match["start"], match["stop"]))


def split_name(split: str) -> tuple[str, Slice] | None:
    """Splits the name of a dataset split from its slice: `"train[:100]"` gives `("train", (None, "100"))`. None if `split` has
    another form, such as a sum of splits."""
    match = _SPLIT.fullmatch(split)
    return None if match is None else (match["name"], (match["start"], match["stop"]))


def rows_of(part: Slice, length: int) -> range:
    """Returns the indices that a slice selects from `length` rows: as in Python, with percentages rounded to the nearest row, as
    the datasets library does."""

    def bound(text: str | None) -> int | None:
        if text is None or not text.endswith("%"):
            return None if text is None else int(text)
        return round(int(text[:-1]) * length / 100)

    return range(*slice(bound(part[0]), bound(part[1])).indices(length))
