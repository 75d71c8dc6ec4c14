"""Loads settings from a TOML file and overrides. One error lists every problem."""

import copy
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from nmoe.config.base import DataPath, FromFile, Section, split_path
from nmoe.config.commands import COMMANDS, AdaptableConfig, RunConfig
from nmoe.config.environment import EnvironmentSettings
from nmoe.config.kinds import of_another_kind
from nmoe.config.locate import KeyPath, Locator, Place, locate
from nmoe.config.overrides import indexed, lay_over, malformed, override_document, read_override
from nmoe.config.packaged import find_configuration, find_environment, find_preparation
from nmoe.config.preparation import PreparationSettings
from nmoe.config.problems import ConfigError, Mistake, at, explain, key_meant
from nmoe.config.schema import follow, has_several_types, item_of, section_for, sections_of
from nmoe.config.tables.model import LORA_LEARNING_RATE_FACTOR
from nmoe.errors import MissingInputError, UserError
from nmoe.parsing import toml_of

S = TypeVar("S", bound=Section)
C = TypeVar("C", bound=RunConfig)

_SYNTAX_PLACE = re.compile(r"(.*) \(at line (\d+), column (\d+)\)", re.DOTALL)


def load(path: Path, schema: type[S], overrides: Sequence[str] = ()) -> S:
    """Reads the TOML file `path`, applies `overrides` ("--section.key=value"; of several for one key the last counts), and returns
    the checked settings.

    Sections in separate files (`FromFile`) are read and checked too. Raises ConfigError with all problems: a file that cannot be
    read, TOML syntax, malformed overrides, unknown keys, wrong types and values, missing keys, conflicts.
    """
    data, where, problems = _laid_over(path, schema, overrides)
    return _check(data, schema, where, problems)


def places(path: Path, schema: type[Section], overrides: Sequence[str] = ()) -> tuple[dict[str, Any], Locator]:
    """Returns the data that `load` would check, and the file and line of every value. Raises ConfigError if a file cannot be
    read."""
    data, where, _ = _laid_over(path, schema, overrides)
    _read_sections(data, schema, where, (), [])
    return data, where


def located(error: UserError, path: Path, overrides: Sequence[str], schema: type[Section]) -> UserError:
    """Returns the error extended by the lines of the file `path`, and the overrides, that name the missing input. Returns the
    error itself if it is about no missing input, or if only a default names the input."""
    missing: BaseException | None = error
    while missing is not None and not isinstance(missing, MissingInputError):
        missing = missing.__cause__ or missing.__context__
    if missing is None:
        return error
    data, where = places(path, schema, overrides)
    found = {key: value for key, value in _texts((), data) if _names(value, missing.named)}
    if not found:
        return error
    message = re.sub(rf"^(\w+ ){{0,2}}{re.escape(missing.named)}: ", "", str(error))
    *others, last = found
    beside = "".join(f"{at(where, key, '', found[key])}".removesuffix(": ") + ", " for key in others)
    return UserError(beside + str(at(where, last, message, found[last])))


def _names(value: str, named: str) -> bool:
    """Returns whether a value names the input `named`: exactly, with a slice behind it, or after a source's name
    (`jsonl:problems.jsonl`)."""
    return named in (value, split_path(value)[0], str(Path(value)), value.partition(":")[2])


def _texts(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, str]]:
    """Yields all strings in a nested value, with their key paths."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping | list | tuple):
        for key, below in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _texts((*path, key), below)


def _laid_over(
    path: Path, schema: type[Section], overrides: Sequence[str]
) -> tuple[dict[str, Any], Locator, list[Mistake]]:
    """Returns the parsed file with the overrides applied, the file and line of every value, and the mistakes in the overrides.
    Raises ConfigError, with these mistakes, if the file cannot be read."""
    problems = [Mistake(Place(text, is_override=True), _no_override(text, schema)) for text in malformed(overrides)]
    try:
        data, where = _read(path, schema)
    except ConfigError as error:
        raise ConfigError(error.problems + problems) from None
    overridden = {str(override[0][0]) for text in overrides if (override := read_override(text)) is not None}
    _refuse_another_kind(path, data, overridden, schema)
    _start_paths(data, schema, path.parent)
    for text in overrides:
        if (override := read_override(text)) is None:
            continue
        if isinstance(key := indexed(override[0], schema, data), str):
            problems.append(Mistake(Place(text, is_override=True), key))
        else:
            lay_over(data, where, *override_document(key, override[1], text))
    return data, where, problems


def load_with(path: Path | None, schema: type[S], tables: Mapping[str, Any], source: str) -> S:
    """Returns the settings in a file (defaults if `path` is None) with `tables` from a program applied over it; messages name the
    program by `source`.

    Raises ConfigError with all problems.
    """
    data, where = ({}, Locator(Place(source))) if path is None else _read(path, schema)
    if path is not None:
        _refuse_another_kind(path, data, tables.keys(), schema)
        _start_paths(data, schema, path.parent)
    lay_over(data, where, copy.deepcopy(dict(tables)), Locator(Place(source)))
    return _check(data, schema, where, [])


def load_run(path: Path, schema: type[C], overrides: Sequence[str] = ()) -> C:
    """Loads a run's configuration: a file, or a packaged name (`Path("sort_grpo")`).

    A run without a name gets its file's name; a LoRA run without a learning rate gets ten times the command's default. Raises
    ConfigError with all problems, and UserError for an unknown name.
    """
    path = find_configuration(str(path))
    return _completed(load(path, schema, overrides), path.stem)


def load_run_with(path: Path | None, schema: type[C], tables: Mapping[str, Any], source: str, name: str) -> C:
    """Loads a run's configuration as `load_run`, with `tables` from a program applied over the file, if there is one. Messages
    name the program's tables by `source`; `name` is the name of a run without a file."""
    path = None if path is None else find_configuration(str(path))
    return _completed(load_with(path, schema, tables, source), name if path is None else path.stem)


def _completed(config: C, stem: str) -> C:
    """Fills in defaults that depend on other keys: the run's name, and the learning rate of an adapter."""
    if "learning_rate" not in config.optimizer.model_fields_set:
        adapts = isinstance(config, AdaptableConfig) and config.lora is not None
        rate = config.optimizer.learning_rate * (LORA_LEARNING_RATE_FACTOR if adapts else 1)
        optimizer = config.optimizer.model_copy(update={"learning_rate": rate})
        config = config.model_copy(update={"optimizer": optimizer})
    if "name" in config.run.model_fields_set:
        return config
    name = re.sub(r"^\W|[^\w.+=-]", "_", stem)
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


def load_environment(named: Path) -> EnvironmentSettings:
    """Loads an environment: a TOML file, the environment.toml of a directory, or a packaged name. Raises UserError."""
    return load(find_environment(str(named)), EnvironmentSettings)


def load_preparation(named: Path, overrides: Sequence[str] = ()) -> PreparationSettings:
    """Loads the configuration of a data preparation: a TOML file, or a packaged name (`Path("numina")`). Raises UserError."""
    return load(find_preparation(str(named)), PreparationSettings, overrides)


def parse(data: dict[str, Any], schema: type[S], where: Locator) -> S:
    """Checks data that is already parsed and returns the settings. `where` has the line of each value, or one name for the whole
    source: `Locator(Place("metadata"))`.

    Raises ConfigError with all problems.
    """
    return _check(copy.deepcopy(data), schema, where, [])


def _check(data: dict[str, Any], schema: type[S], where: Locator, problems: list[Mistake]) -> S:
    commands = COMMANDS if schema in COMMANDS.values() else {}
    unread = _read_sections(data, schema, where, (), problems)
    try:
        settings = schema.model_validate(data)
    except ValidationError as errors:
        of_several_types = set()
        for error in errors.errors(include_url=False):
            path, annotations = follow(schema, error["loc"])
            if has_several_types(annotations[-1]):  # each type has its own error
                if path in of_several_types:
                    continue
                of_several_types.add(path)
            if not _follows_from(unread, path, error["type"]):
                problems.extend(explain(error, schema, where, commands))
    if problems:
        raise ConfigError(problems, first=where.root.source)
    return settings


def _follows_from(unread: list[KeyPath], path: KeyPath, kind: str) -> bool:
    """Returns whether an error at `path` is only a consequence of a section that could not be read: an error in that section, or a
    conflict in a section around it."""
    return any(
        path[: len(section)] == section or (kind == "value_error" and section[: len(path)] == path)
        for section in unread
    )


def _read_sections(
    data: dict[str, Any], schema: type[Section], where: Locator, table: KeyPath, problems: list[Mistake]
) -> list[KeyPath]:
    """Replaces each section that names a separate file by the file's contents, in `data` and in `where`; returns the paths of
    sections whose file could not be read."""
    unread = []
    for key, known in schema.model_fields.items():
        path, value, sections = (*table, key), data.get(key), sections_of(known.annotation)
        if not any(isinstance(mark, FromFile) for mark in known.metadata):
            if len(sections) == 1 and isinstance(value, dict):
                unread += _read_sections(value, sections[0], where, path, problems)
            items = sections_of(item_of(known.annotation, 0))
            if len(items) == 1 and isinstance(value, list):
                for index, item in enumerate(value):
                    if isinstance(item, dict):
                        unread += _read_sections(item, items[0], where, (*path, index), problems)
        elif isinstance(value, dict) and "path" in value:
            mark = next(mark for mark in known.metadata if isinstance(mark, FromFile))
            try:
                data[key] = _read_section(value, sections[0], mark, where, path)
            except ConfigError as error:
                problems.extend(error.problems)
                del data[key]
                unread.append(path)
    return unread


def _read_section(
    beside: dict[str, Any], section: type[Section], mark: FromFile, where: Locator, path: KeyPath
) -> dict[str, Any]:
    """Returns the contents of the file that the table at `path` names, overridden by the keys beside its `path`. Raises ConfigError
    if there is no such file, or it cannot be read."""
    file, place = beside.pop("path"), where.place((*path, "path"))
    if not isinstance(file, str):
        problem = at(where, (*path, "path"), "expected the path of a TOML file, as a string", file)
        raise ConfigError([problem])
    try:
        found = mark.find(file, place.directory)
    except UserError as error:
        raise ConfigError([Mistake(place, str(error))]) from None
    data, where_file = _read(found, section, named_at=str(place))
    _refuse_another_kind(found, data, beside.keys(), section, named_at=str(place))
    _start_paths(data, section, found.parent)
    where_file = where_file.below(path)
    lay_over(data, where_file, beside, where, path)
    where.adopt(path, where_file)
    return data


def _start_paths(data: dict[str, Any], section: type[Section], directory: Path) -> None:
    """Resolves the data paths of a section with its own file (`own_file`) against that file's directory."""
    if section.own_file:
        _start_paths_below(data, section, directory)


def _start_paths_below(value: Any, annotation: Any, directory: Path) -> None:
    if isinstance(value, list):
        for item in value:
            _start_paths_below(item, item_of(annotation, 0), directory)
    section = section_for(annotation, value)
    if section is None:
        return
    for key in value.keys() & section.model_fields.keys():
        known = section.model_fields[key]
        marks = [mark for mark in known.metadata if isinstance(mark, DataPath)]
        if not marks:
            _start_paths_below(value[key], known.annotation, directory)
        elif isinstance(value[key], str) and (
            not marks[0].may_be_name or _exists(directory / split_path(value[key])[0])
        ):
            value[key] = str(directory / value[key])


def _refuse_another_kind(
    path: Path, data: dict[str, Any], beside: Collection[str], schema: type[Section], named_at: str = ""
) -> None:
    """Raises ConfigError for a file that is meant for another schema, such as an environment in place of a run."""
    if (said := of_another_kind(path, data, {*data, *beside}, schema)) is not None:
        by = f" (named at {named_at})" if named_at else ""
        raise ConfigError([Mistake(Place(str(path)), said + by)])


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except ValueError:  # a null character in it
        return False


def _no_override(text: str, schema: type[Section]) -> str:
    """Returns the message for an argument that is not an override, with the override that was most likely meant."""
    bare = text.lstrip("-")
    if not malformed([f"--{bare}"]):
        return f"not an override; did you mean --{bare}?"
    if text.startswith("-") and not malformed([f"--{bare}="]):
        key = key_meant((bare,), schema)
        return f"has no value; write --{'.'.join(key) if key else bare}=VALUE"
    return "not an override; those are written --section.key=value"


# Where a schema names data, in the order in which they are looked for: for the hint at a data file in a configuration's place.
_DATA_KEYS = (
    ("environment", '[environment.task_pool] type = "{type}", path = "{file}" and task_type = "math"'),
    ("task_pool", '[task_pool] type = "{type}", path = "{file}" and task_type = "math"'),
    ("records", '[records] path = "{file}"'),
    ("verifier", '[verifier] prm_source = "{file}"'),
    ("data", '[data] documents = "{file}"'),
)
_DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".gz")


def _data_hint(path: Path, schema: type[Section]) -> str:
    """Returns the message for a data file given in place of a configuration."""
    kind = path.suffix[1:] if path.suffix in (".csv", ".parquet") else "jsonl"
    named = next((hint for key, hint in _DATA_KEYS if key in schema.model_fields), 'path = "{file}"')
    return f"is data, and no TOML file of settings; name it in one: {named.format(type=kind, file=path)}"


def _in_directory(path: Path) -> str:
    """Returns a hint for a directory given in place of a configuration: the file in it that was probably meant. Empty if there
    is none."""
    for name, said in (
        ("config.toml", "; {} is what a run there was configured by"),
        ("config.json", "; a model's is named by --model.path={}"),
    ):
        if (path / name).is_file():
            return said.format(path / name if name == "config.toml" else path)
    return ""


def _read(path: Path, schema: type[Section], named_at: str = "") -> tuple[dict[str, Any], Locator]:
    """Returns the parsed file `path`, meant to fit `schema`, and the file and line of every value. `named_at` is the file and line
    that names `path`, empty if the user named it on the command line. Raises ConfigError for a file that cannot be read or is no
    TOML."""
    place = Place(str(path))
    by = f" (named at {named_at})" if named_at else ""
    if path.suffix in _DATA_SUFFIXES and path.is_file():
        raise ConfigError([Mistake(place, _data_hint(path, schema) + by)])
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError([Mistake(place, f"no such file{by}")]) from None
    except IsADirectoryError:
        raise ConfigError([Mistake(place, f"is a directory, not a TOML file{_in_directory(path)}{by}")]) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError([Mistake(Place(str(path), line), f"not UTF-8 text: {error.reason}{by}")]) from None
    except (OSError, ValueError) as error:  # a ValueError if the name holds a null character
        raise ConfigError([Mistake(place, f"cannot be read: {error}{by}")]) from None
    try:
        return toml_of(text), locate(text, path)
    except RecursionError:
        raise ConfigError([Mistake(place, f"arrays or tables nested too deeply{by}")]) from None
    except ValueError as error:  # a TOMLDecodeError, or an integer of more digits than Python reads
        match = _SYNTAX_PLACE.fullmatch(str(error))
        message, at_line = (match[1], f":{match[2]}:{match[3]}") if match else (str(error), "")
        raise ConfigError([Mistake(Place(f"{path}{at_line}"), f"TOML syntax: {message}{by}")]) from None
