"""Writes settings as TOML: a whole configuration for a file, or a single value for help and messages."""

import re
from typing import Any

import tomli_w

from nmoe.config.base import Section

_EXPONENT = re.compile(r"e([+-])0*(\d)")


def to_toml(settings: Section) -> str:
    """Returns `settings` as TOML text, defaults included; loading it gives an equal object. Keys with the value None are left
    out, because TOML has no null."""
    return tomli_w.dumps(settings.model_dump(exclude_none=True))


def toml_value(value: Any) -> str:
    """Formats one value as TOML in one line, as people write it: `1e-6`, `"sort"`, `[1, 8]`, `{name = "format"}`."""
    match value:
        case float():
            return _EXPONENT.sub(lambda match: f"e{match[1].strip('+')}{match[2]}", repr(value))
        case list() | tuple():
            return "[" + ", ".join(toml_value(item) for item in value) + "]"
        case dict():
            return "{" + ", ".join(f"{_key(key)} = {toml_value(item)}" for key, item in value.items()) + "}"
    return tomli_w.dumps({"_": value}).removeprefix("_ = ").rstrip("\n")


def _key(key: str) -> str:
    return tomli_w.dumps({key: 0}).removesuffix(" = 0\n")
