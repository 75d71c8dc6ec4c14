"""Describes each problem of a configuration in one line: file and line, the value, the error and how to fix it."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from typing import Any

from pydantic_core import ErrorDetails

from nmoe.config.base import ConflictError, Section
from nmoe.config.elsewhere import closest, keys_meant, no_counterpart, table_leaves
from nmoe.config.locate import KeyPath, Locator, Place
from nmoe.config.overrides import read_value
from nmoe.config.schema import TAG, choices_of, description_of, follow, item_of, keys_of, paths_of, sections_of, tag_of
from nmoe.config.toml import toml_value
from nmoe.errors import UserError, cut

_LONGEST_VALUE = 60

_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "tuple_type": "an array",
    "model_type": "a table",
    "model_attributes_type": "a table",
}

_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


@dataclass(frozen=True)
class Mistake:
    """One line of an error report: `configs/x.toml:12` and `[optimizer] learnng_rate = 0.1: unknown key; ...`."""

    place: Place
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


class ConfigError(UserError):
    """A configuration that cannot be used. Its text lists all problems, one per line."""

    def __init__(self, problems: list[Mistake], first: str = "") -> None:
        """Sorts the problems by file (`first` before the others), then by line; overrides come last."""
        sources = list(dict.fromkeys([first, *(problem.place.source for problem in problems)]))

        def order(problem: Mistake) -> tuple[bool, int, int]:
            place = problem.place
            return place.is_override, sources.index(place.source), place.line or 0

        self.problems = sorted(problems, key=order)
        lines = [str(problem) for problem in self.problems]
        super().__init__(lines[0] if len(lines) == 1 else f"{len(lines)} problems\n" + "\n".join(lines))


def at(where: Locator, path: KeyPath, message: str, value: Any = None) -> Mistake:
    """Returns the problem `message` at the key `path`, with the value of the key if it is given."""
    return _named(where.place(path), path, message, value)


def _named(place: Place, path: KeyPath, message: str, value: Any) -> Mistake:
    """Returns the problem with `path` written as in its source: relative to the file's contents, and left out for an override,
    whose text contains it."""
    name = key_name(path[place.root :], is_table=isinstance(value, dict))
    if name and value is not None and not isinstance(value, dict):
        name += f" = {_shown(value)}"
    return Mistake(place, f"{name}: {message}" if name else message)


def key_name(path: KeyPath, is_table: bool = False) -> str:
    """Formats a key path for messages: `("task_pool", "sources", 1, "weight")` as `[task_pool.sources[1]] weight`, a table as
    `[table]`."""
    last = len(path)
    if not is_table:
        last = max((index for index, key in enumerate(path) if isinstance(key, str)), default=0)
    table, key = _dotted(path[:last]), _dotted(path[last:])
    return " ".join(part for part in (f"[{table}]" if table else "", key) if part)


def explain(
    error: ErrorDetails, schema: type[Section], where: Locator, commands: Mapping[str, type[Section]]
) -> Iterator[Mistake]:
    """Converts one error of pydantic into mistakes: one for each conflict of a section, and one for any other error.

    `commands` has the schema of each command, to name the commands that do have an unknown key.
    """
    path, annotations = follow(schema, error["loc"])
    value, kind, context = error["input"], error["type"], error.get("ctx", {})
    conflict = context.get("error")
    if isinstance(conflict, ConflictError):
        for key, message in conflict.conflicts:
            below = tuple(int(part) if part.isdigit() else part for part in key.split(".") if part)
            yield at(where, path + below, message, _value_at(value, below))
    elif kind == "extra_forbidden":
        for place, leaves in _leaves_by_place(path, value, where).items():
            name = leaves[0] if place.is_override and len(leaves) == 1 else path
            message = _unknown_key(place, path, leaves, annotations[-2], schema, commands)
            yield _named(place, name, message, _value_at(value, name[len(path) :]))
    elif kind == "missing":
        yield _missing(path, annotations, where)
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        tags = [tag_of(section) for section in sections_of(annotations[-1])]
        missing = "required key is missing; " if kind == "union_tag_not_found" else ""
        yield at(where, (*path, TAG), missing + _one_of(value.get(TAG), tags, (*path, TAG)), value.get(TAG))
    elif kind == "literal_error":
        yield at(where, path, _one_of(value, choices_of(annotations[-1]), path), value)
    elif kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        yield at(where, path, f"must be {words} {str(context[bound]).removesuffix('.0')}", value)
    elif kind == "too_long":
        yield at(where, path, f"expected {context['max_length']} items, got {len(value)}", value)
    elif kind == "string_too_short" and context["min_length"] == 1:
        yield at(where, path, "must not be empty", value)
    elif kind == "finite_number":
        yield at(where, path, "must be a finite number", value)
    elif kind in _EXPECTED:
        yield at(where, path, _wrong_type(kind, value, path, where, annotations[-1]), value)
    else:
        yield at(where, path, error["msg"], value)


def _leaves_by_place(path: KeyPath, value: Any, where: Locator) -> dict[Place, list[KeyPath]]:
    """Groups the paths of the values at and below an unknown key by the file or override that contains them."""
    found: dict[Place, list[KeyPath]] = {}
    for leaf in table_leaves(path, value):
        place = where.place(leaf)
        found.setdefault(place if place.is_override else where.place_of_key(path), []).append(leaf)
    return found


def _unknown_key(
    place: Place,
    path: KeyPath,
    leaves: Sequence[KeyPath],
    table: Any,
    schema: type[Section],
    commands: Mapping[str, type[Section]],
) -> str:
    """Returns the message for an unknown key. It names the first of these that there is: the commands that have the key, nmoe's key
    for another framework's, why nmoe has no such key, the commands that have the table, a similar key of the same table, the same
    key in another table, and the keys of the table.

    `leaves` are the values below `path` that were written at `place`: a command that has the table may lack some of them.
    """
    keys, written = _names_alone(path), [_names_alone(leaf) for leaf in leaves]
    this = next((f"`nmoe {command}`" for command, other in commands.items() if other is schema), "this command")
    known_by = {command: set(paths_of(other, in_arrays=True)) for command, other in commands.items()}
    if owners := [f"`nmoe {command}`" for command, paths in known_by.items() if paths.issuperset(written)]:
        return f"unknown key; {this} does not have it, {_have(owners)}"
    if (meant := _from_elsewhere(place, path, leaves, schema, commands)) is not None:
        return meant
    if (instead := next(filter(None, map(no_counterpart, written)), None)) is not None:
        return f"unknown key; it has no counterpart: {instead}"
    if owners := [f"`nmoe {command}`" for command, paths in known_by.items() if keys in paths]:
        return f"unknown key; {this} has no [{'.'.join(keys)}], {_have(owners)}"
    key, known = str(path[-1]), keys_of(table)
    alike = difflib.get_close_matches(key.replace("-", "_").lower(), known, n=1)
    if alike:
        below = leaves[0][len(path) :] if len(leaves) == 1 else ()
        whole = tuple(map(str, (*path[:-1], alike[0], *below)))
        meant = _as_written(place, path, whole) if place.is_override else repr(alike[0])
        return f"unknown key; did you mean {meant}?"
    file = () if place.is_override else path[: place.root]
    elsewhere = [
        found
        for found in dict.fromkeys(paths_of(schema))
        if found[-1] == key and found[: len(file)] == file and len(found) > len(file)
    ]
    # A key that many tables have is most likely meant where it lies highest.
    elsewhere = [found for found in elsewhere if len(found) == min(map(len, elsewhere))]
    if elsewhere:
        return f"unknown key; did you mean {' or '.join(_as_written(place, path, found) for found in elsewhere)}?"
    return f"unknown key; known here: {', '.join(known)}"


def _names_alone(path: KeyPath) -> tuple[str, ...]:
    """Returns a key path without the indices of array items."""
    return tuple(key for key in path if isinstance(key, str))


def _have(owners: Sequence[str]) -> str:
    return f"{', '.join(owners)} {'has' if len(owners) == 1 else 'have'}"


def _as_written(place: Place, path: KeyPath, key: tuple[str, ...]) -> str:
    """Formats a key in the notation of the source of `path`: `--a.b` for an override, `[a] b` in a file."""
    if place.is_override:
        return f"--{'.'.join(key)}"
    inside = path[: place.root] == key[: place.root]
    numbers = (int(part) if part.isdecimal() else part for part in (key[place.root :] if inside else key))
    return key_name(tuple(numbers))


def _from_elsewhere(
    place: Place, path: KeyPath, below: Sequence[KeyPath], schema: type[Section], commands: Mapping[str, type[Section]]
) -> str | None:
    """Returns a message for a key that another framework has, such as `num_generations`: it names nmoe's key for this setting. If
    the key at `path` is a table of another framework, the message covers its keys `below`. Returns None for keys that the table of
    other frameworks' names does not have."""
    said = {}
    whole = tuple(map(str, path))
    leaves = [leaf for leaf in (tuple(map(str, one)) for one in below) if keys_meant(leaf)]
    for leaf in leaves or [whole]:
        if (found := key_meant(leaf, schema)) is not None:
            said[leaf] = _as_written(place, path, found)
        else:
            owners = [name for name, other in commands.items() for key in keys_meant(leaf) if _path_in(other, key)]
            if owners:
                return f"unknown key; {leaf[-1]} is of `nmoe {owners[0]}`"
    if len(said) == 1 and (place.is_override or whole in said):
        return f"unknown key; did you mean {next(iter(said.values()))}?"
    each = (f"for {'.'.join(leaf[len(path) :]) or leaf[-1]} write {key}" for leaf, key in said.items())
    return f"unknown table; {', '.join(each)}" if said else None


def key_meant(path: tuple[str, ...], schema: type[Section]) -> tuple[str, ...] | None:
    """Returns the schema's key for another framework's key `path`; None if there is none."""
    return next((found for key in keys_meant(path) if (found := _path_in(schema, key)) is not None), None)


def _path_in(schema: type[Section], key: str) -> tuple[str, ...] | None:
    """Returns the path of the dotted key `key` in a schema, which may be an environment's (without `environment.`); None if the
    schema lacks the key."""
    paths = set(paths_of(schema, in_arrays=True))
    for candidate in (key, key.removeprefix("environment.")):
        whole = tuple(candidate.split("."))
        if tuple(part for part in whole if not part.isdecimal()) in paths:
            return whole
    return None


def _missing(path: KeyPath, annotations: list[Any], where: Locator) -> Mistake:
    sections = sections_of(annotations[-1])
    if sections:
        required = [{key for key, known in section.model_fields.items() if known.is_required()} for section in sections]
        needed = [key for key in keys_of(sections[0]) if all(key in keys for keys in required)]
        needs = f"; it needs {', '.join(needed)}" if needed else ""
        return at(where, path, f"required table is missing{needs}", {})
    if isinstance(path[-1], int):
        return at(where, path, "required item is missing")
    owners = [section for section in sections_of(annotations[-2]) if path[-1] in section.model_fields]
    description = description_of(owners[0], path[-1]) if owners else None
    return at(where, path, "required key is missing" + (f" ({description})" if description else ""))


def _one_of(value: Any, choices: Sequence[str], path: KeyPath) -> str:
    key = ".".join(part for part in path if isinstance(part, str))
    alike = closest(value, choices, key) if isinstance(value, str) else None
    return f"must be one of {', '.join(map(toml_value, choices))}" + (f"; did you mean {alike!r}?" if alike else "")


def _wrong_type(kind: str, value: Any, path: KeyPath, where: Locator, annotation: Any) -> str:
    others = "".join(f", or {toml_value(choice)}" for choice in choices_of(annotation))
    message = f"expected {_EXPECTED[kind]}{others}, got {_type_words(value)}"
    if isinstance(value, dict) and sections_of(item_of(annotation, 0)):
        name = key_name(path[where.place(path).root :], is_table=True)
        message += f"; write [{name}], once for each table"
    meant = _value_meant(kind, value, annotation)
    if meant is not None:
        dotted, text = ".".join(map(str, path)), toml_value(meant)
        # The shell takes one pair of quotes away, and reads brackets as a pattern.
        shell = f"'{text}'" if isinstance(meant, list) else text
        message += f"; write --{dotted}={shell}" if where.place(path).is_override else f"; write {text}"
    if kind == "string_type" and isinstance(value, int | float):
        quoted = toml_value(toml_value(value))
        # The shell takes one pair of quotes away before the command sees an override.
        dotted = ".".join(map(str, path))
        message += f"; write --{dotted}='{quoted}'" if where.place(path).is_override else f"; write {quoted}"
    return message


def _value_meant(kind: str, value: Any, annotation: Any) -> Any:
    """Returns the most likely intended value for one of the wrong type: ["csv"] for "csv", 1000 for 1e3, true for "True"; None
    if unclear."""
    if kind == "tuple_type" and isinstance(value, str) and not sections_of(item_of(annotation, 0)):
        return [
            read_value(part.strip().strip("'\"")) for part in value.strip("[]()").split(",") if part.strip()
        ] or None
    if kind in ("int_type", "int_from_float") and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind == "bool_type":
        known = {**dict.fromkeys(("true", "yes", "on", "1"), True), **dict.fromkeys(("false", "no", "off", "0"), False)}
        return known.get(str(value).lower())
    return None


def _type_words(value: Any) -> str:
    match value:
        case bool():
            return "a boolean"
        case int():
            return "an integer"
        case float():
            return "a number"
        case str():
            return "a string"
        case list() | tuple():
            return "an array"
        case dict():
            return "a table"
        case date() | time():
            return "a date or time"
    return type(value).__name__


def _shown(value: Any) -> str:
    return cut(toml_value(value), _LONGEST_VALUE)


def _dotted(path: KeyPath) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def _value_at(value: Any, path: KeyPath) -> Any:
    """Returns the value at `path` below `value`; None if the data does not contain it."""
    for key in path:
        if isinstance(value, dict):
            value = value.get(key)
        else:
            value = value[key] if isinstance(value, list | tuple) and isinstance(key, int) else None
    return value
