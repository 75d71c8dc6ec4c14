"""Writes settings back as TOML that reloads to an equal object; the standard library reads TOML and does not write it."""

import json
import re
from typing import Any

from nmoe.config.base import Section

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(settings: Section) -> str:
    """The TOML text of `settings`, defaults included. Values that are None are left out, TOML has no word for them."""
    lines: list[str] = []
    _write_table(settings.model_dump(exclude_none=True), (), lines)
    return "\n".join(lines).lstrip("\n") + "\n"


def toml_value(value: Any) -> str:
    """One value as TOML writes it: `0.1`, `"sort"`, `[1, 8]`, `{name = "format"}`."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            # JSON's escapes are TOML's, but for the one control character that JSON leaves as it is.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return "[" + ", ".join(toml_value(item) for item in value) + "]"
        case dict():
            return "{" + ", ".join(f"{_key(key)} = {toml_value(item)}" for key, item in value.items()) + "}"
    return str(value)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else toml_value(key)


def _write_table(table: dict[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    """Plain values first: in TOML whatever follows a sub-table's header belongs to the sub-table."""
    name = ".".join(_key(key) for key in path)
    tables = {key: value for key, value in table.items() if isinstance(value, dict)}
    arrays = {key: value for key, value in table.items() if _is_array_of_tables(value)}
    lines.extend(
        f"{_key(key)} = {toml_value(value)}" for key, value in table.items() if key not in tables and key not in arrays
    )
    for key, value in tables.items():
        lines.extend(["", f"[{name}.{_key(key)}]" if name else f"[{_key(key)}]"])
        _write_table(value, (*path, key), lines)
    for key, items in arrays.items():
        for item in items:
            lines.extend(["", f"[[{name}.{_key(key)}]]" if name else f"[[{_key(key)}]]"])
            _write_table(item, (*path, key), lines)


def _is_array_of_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(item, dict) for item in value)
