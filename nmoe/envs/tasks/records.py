"""Reads fields of a task's own records strictly; errors name a field that is missing or has the wrong type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nmoe.data.messages import json_word
from nmoe.errors import UserError

Record = Mapping[str, object]


def text(record: Record, *names: str, default: str | None = None) -> str:
    """Returns the first of these fields that is present and not None."""
    value = _field(record, names, default)
    if not isinstance(value, str):
        raise UserError(f"field {names[0]!r} holds {json_word(value)}, not text")
    return value


def texts(record: Record, *names: str, default: Sequence[str] | None = None) -> list[str]:
    value = _field(record, names, default)
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(one, str) for one in value):
        raise UserError(f"field {names[0]!r} holds {json_word(value)}, not a list of texts")
    return list(value)


def files(record: Record, *names: str, default: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns a mapping of relative paths to contents."""
    value = _field(record, names, default)
    if not isinstance(value, Mapping):
        raise UserError(f"field {names[0]!r} holds {json_word(value)}, not an object of paths and contents")
    # In an Arrow column, each row has the keys of all rows.
    found = {path: content for path, content in value.items() if content is not None}
    for path, content in found.items():
        if not isinstance(path, str) or not isinstance(content, str):
            raise UserError(f"field {names[0]!r}: {path!r} holds {json_word(content)}, not text")
        if not path or path.startswith("/") or ".." in path.split("/") or "\0" in path:
            raise UserError(f"field {names[0]!r}: {path!r} is not a path within a workspace")
    return found


def _field(record: Record, names: Sequence[str], default: object) -> object:
    for name in names:
        if record.get(name) is not None:
            return record[name]
    if default is None:
        there = ", ".join(map(repr, record)) or "none"
        raise UserError(f"no field {' or '.join(map(repr, names))}; the fields are {there}")
    return default
