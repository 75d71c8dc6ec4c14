"""JSON Lines: one object per line in UTF-8; blank lines are skipped, anything else is an error with its line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from nmoe.errors import UserError
from nmoe.rl.pools.records import Record


def read_jsonl(path: Path) -> Iterator[Record]:
    """The objects of a file, in order. Raises UserError for what can not be read or is not an object."""
    try:
        with path.open("rb") as file:
            yield from parse_jsonl(str(path), file)
    except OSError as error:
        raise UserError(f"{path}: can not be read: {error.strerror or error}") from error


def parse_jsonl(name: str, lines: Iterable[bytes]) -> Iterator[Record]:
    """The objects of lines that come from `name`, each with where it stands ("stdin:3"). Raises UserError for any other line."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{name}:{number}"
            yield where, _object(where, line)


def _object(where: str, line: bytes) -> dict[str, object]:
    try:
        # A byte order mark may stand before the first line, as some editors write it.
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8: {error}; convert the file") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {error}; each line holds one object") from error
    if not isinstance(value, dict):
        raise UserError(f"{where}: a {type(value).__name__}, not an object; each line holds one object, {{...}}")
    return value
