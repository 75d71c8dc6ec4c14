"""Reads JSON and TOML, such that too deep nesting is an ordinary error: `[` 200,000 times raises ValueError, not
RecursionError."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nmoe.errors import UserError

# A key of n parts takes n squared memory to read.
_MOST_PARTS = 100
MOST_NESTED = 100
_LONG_KEY = re.compile(rf"""(?<![\w"'-])(?:[\w"'-]++[ \t]*+\.[ \t]*+){{{_MOST_PARTS}}}""")


def json_of(text: str | bytes) -> Any:
    """Returns the value of a JSON text. Raises ValueError if the text is not valid."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("arrays or objects nested too deeply") from None


def is_deep(value: Any) -> bool:
    """Returns whether the arrays and objects of a JSON value are nested more than 100 deep: too deeply for recursion over them."""
    held = [value] if isinstance(value, Mapping | list | tuple) else []
    for _ in range(MOST_NESTED):
        inner = (item for one in held for item in (one.values() if isinstance(one, Mapping) else one))
        held = [one for one in inner if isinstance(one, Mapping | list | tuple)]
        if not held:
            return False
    return True


def json_object(path: Path, missing: str = "") -> dict[str, Any]:
    """Reads a JSON file that contains an object, and returns it as a dictionary.

    Raises UserError, with the path, if the file does not exist (`missing` then completes the message), cannot be read,
    or has other contents.
    """
    try:
        found = json_of(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file{missing and f'; {missing}'}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: not a JSON object")
    return found


def toml_of(text: str) -> dict[str, Any]:
    """Returns the tables of a TOML text. Raises tomllib.TOMLDecodeError, which is a ValueError, if the text is not valid."""
    if found := _LONG_KEY.search(text):
        raise tomllib.TOMLDecodeError(
            f"a key of more than {_MOST_PARTS} parts (at line {text.count(chr(10), 0, found.start()) + 1}, column 1)"
        )
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError("arrays or tables nested too deeply") from None
