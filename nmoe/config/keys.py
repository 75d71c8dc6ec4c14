"""The keys of a command's configuration, as its --help lists them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic_core import PydanticUndefined

from nmoe.config.base import Section
from nmoe.config.environment import EnvironmentSettings
from nmoe.config.schema import choices_of, item_of, sections_of
from nmoe.config.toml import toml_value

_WIDTH, _INDENT = 110, 6


def key_lines(schema: type[Section], table: str = "") -> Iterator[str]:
    """Each key with its default, `--run.seed=0`, and its meaning on the next line; a key without a value is required. An
    environment is listed by its path only, because it has its own file and reference."""
    for name, known in schema.model_fields.items():
        key = f"{table}.{name}" if table else name
        below = sections_of(known.annotation)
        if items := sections_of(item_of(known.annotation, 0)):
            below, key = items, f"{key}.0"
        if below == (EnvironmentSettings,):
            yield f"  --{key}.path"
            yield from _wrapped(f"{known.description}; for its keys see docs/reference/configuration.md")
        elif below:
            for section in below:
                yield from key_lines(section, key)
        else:
            default = None if known.is_required() else _shown(known.default)
            yield f"  --{key}" + ("" if default is None else f"={default}")
            choices = choices_of(known.annotation)
            yield from _wrapped((known.description or "") + (f" ({', '.join(choices)})" if choices else ""))


def _wrapped(text: str) -> Iterator[str]:
    yield from textwrap.wrap(text, _WIDTH, initial_indent=" " * _INDENT, subsequent_indent=" " * _INDENT)


def _shown(default: Any) -> str | None:
    """The default as TOML has it; None for a key that is left out unless it is given."""
    return None if default is None or default is PydanticUndefined else toml_value(default)
