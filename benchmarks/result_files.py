"""Writes and reads the files below benchmarks/results: one record or figure to a line, numbers to six significant digits.

A file holds what a table or a check reads, with the figures of each seed, the machine and the settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def rounded(value: Any) -> Any:
    """The same value with six significant digits in each float."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Writes a JSON object with a line for each key, and one for each element of a list of objects."""

    def text(value: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return "[\n  " + ",\n  ".join(map(_line, value)) + "\n ]"
        return _line(value)

    lines = ",\n".join(f" {_line(key)}: {text(value)}" for key, value in rounded(results).items())
    path.write_text("{\n" + lines + "\n}\n")


def write_records(path: Path, records: Sequence[Record]) -> None:
    """Writes records as a table: `{"all": {...}, "columns": [...], "rows": [[...], ...]}`.

    `all` holds what every record has in common. A column that a record lacks is null in its row, or missing at the row's end.
    """
    names = list(dict.fromkeys(name for record in records for name in record))
    common = {name: records[0][name] for name in names if all(one.get(name) == records[0].get(name) for one in records)}
    columns = [name for name in names if name not in common]
    rows = []
    for record in records:
        last = max((index for index, name in enumerate(columns) if name in record), default=-1)
        rows.append([rounded(record.get(name)) for name in columns[: last + 1]])
    lines = ",\n  ".join(map(_line, rows))
    path.write_text(
        f'{{\n "all": {_line(rounded(common))},\n "columns": {_line(columns)},\n "rows": [\n  {lines}\n ]\n}}\n'
    )


def read_records(path: Path) -> list[Record]:
    """The records of a table; none where the file does not exist yet."""
    if not path.exists():
        return []
    table = json.loads(path.read_text())
    rows = (zip(table["columns"], row, strict=False) for row in table["rows"])
    return [table["all"] | {name: value for name, value in row if value is not None} for row in rows]


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
