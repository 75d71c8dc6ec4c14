"""Parses `--section.key=value` arguments of the command line, and applies them to the document of a file."""

import re
from collections.abc import Sequence
from typing import Any

from nmoe.config.base import Section
from nmoe.config.locate import KeyPath, Locator, Place
from nmoe.config.schema import TAG, item_of, sections_of
from nmoe.parsing import toml_of

_KEY = re.compile(r"--[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)+")
_OVERRIDE = re.compile(r"--([A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)=(.*)", re.DOTALL)


def read_override(text: str) -> tuple[KeyPath, Any] | None:
    """Returns the key path and value of `--section.key=value`; None if `text` has another form."""
    match = _OVERRIDE.fullmatch(text)
    return None if match is None else (tuple(match[1].split(".")), read_value(match[2]))


def read_value(text: str) -> Any:
    """Parses `text` as a TOML value (`1e-6`, `[1, 2]`, `true`, `"7"`); returns it unchanged, as a string, if it is not TOML
    (`grpo`)."""
    try:
        # Inside an inline table a value has to be complete: neither a comment nor a second key can follow it.
        document = toml_of("table = {value = " + text + "}")
    except ValueError:  # not TOML, an integer of more digits than Python reads, or brackets without end
        return text
    if document.keys() != {"table"} or document["table"].keys() != {"value"}:
        return text
    return document["table"]["value"]


def indexed(path: KeyPath, schema: type[Section], data: Any) -> KeyPath | str:
    """Returns the path of an override with array indices as integers, `("eval", 0, "every_steps")`; or an error message, as a
    string. An index one past the array's last table in `data` adds a table."""
    found: KeyPath = ()
    annotation: Any = schema
    for depth, key in enumerate(path):
        if sections_of(item := item_of(annotation, 0)):
            array, name = data if isinstance(data, list) else [], ".".join(map(str, path[:depth]))
            if not str(key).isdecimal():
                example = ".".join(map(str, (name, 0, *path[depth:])))
                return f"{name} is an array of tables; say which, counted from 0, as in --{example}"
            if int(key) > len(array):
                return f"{name} has {len(array)} tables, counted from 0; the next is --{name}.{len(array)}"
            found, annotation = (*found, int(key)), item
            data = array[int(key)] if int(key) < len(array) else None
            continue
        known = [one.model_fields[str(key)] for one in sections_of(annotation) if key in one.model_fields]
        found, annotation = (*found, key), known[0].annotation if known else None
        data = data.get(key) if isinstance(data, dict) else None
    return found


def override_document(path: KeyPath, value: Any, text: str) -> tuple[dict[str, Any], Locator]:
    """Returns a nested document that holds only `value` at `path`, and its locator, which names the override's text."""
    data: Any = value
    for key in reversed(path):
        data = {key: data}
    place = Place(text, root=len(path), is_override=True)
    return data, Locator(place, {path: place})


def lay_over(
    data: dict[str, Any], where: Locator, over: dict[str, Any], where_over: Locator, table: KeyPath = ()
) -> None:
    """Merges the document `over` into `data`, in place: tables are merged key by key, other values are replaced. A table with
    another `type` is replaced too, since its keys differ. A table whose only key is an integer stands for the item of an array with
    this index."""
    for key, value in over.items():
        path = (*table, key)
        below = data.get(key)
        if isinstance(value, dict) and len(value) == 1 and isinstance(index := next(iter(value)), int):
            if not isinstance(below, list):
                below = data[key] = []
            below += [{}] if index == len(below) else []
            _lay_over_item(below, where, index, value[index], where_over, path)
            continue
        if isinstance(value, dict) and not isinstance(below, dict) and path not in where_over.places:
            below = data[key] = {}  # a section that only an override's path names
        if (
            isinstance(value, dict)
            and isinstance(below, dict)
            and value.get(TAG, below.get(TAG)) == below.get(TAG, value.get(TAG))
        ):
            lay_over(below, where, value, where_over, path)
        else:
            data[key] = value
            where.adopt(path, where_over)


def _lay_over_item(
    array: list[Any], where: Locator, index: int, value: Any, where_over: Locator, table: KeyPath
) -> None:
    """Applies an override to the item at `index` of an array."""
    path = (*table, index)
    if isinstance(value, dict) and isinstance(array[index], dict) and path not in where_over.places:
        lay_over(array[index], where, value, where_over, path)
    else:
        array[index] = value
        where.adopt(path, where_over)


def joined(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with each `--section.key value` joined into `--section.key=value`. Such a key has a dot, and its
    value is the next argument, unless that starts with `--`."""
    whole: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if _KEY.fullmatch(argument) and rest and not rest[0].startswith("--"):
            argument = f"{argument}={rest.pop(0)}"
        whole.append(argument)
    return whole


def malformed(overrides: Sequence[str]) -> list[str]:
    """Returns the overrides that do not have the form `--section.key=value`."""
    return [text for text in overrides if _OVERRIDE.fullmatch(text) is None]
