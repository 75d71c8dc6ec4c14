"""Reads a dataset's records as problems: finds the fields, extracts the gold answer, and checks everything before a run starts.

The first invalid record ends the load with an error that names its file and line. Question and gold are read from the fields that a
pool names, or from the known fields of the first record. Known layouts are:

    {"problem": "...", "answer": "..."}   or "question"
    {"input": "...", "label": "..."}                                          OpenRLHF
    {"prompt": ..., "reward_spec": {"method": "rule", "ground_truth": "..."}} SkyRL
    {"prompt": ..., "reward_model": {"style": "rule", "ground_truth": "..."}} verl

A question is a text or a list of messages that ends with the user's; the messages before it become the problem's history. A program
may make the records: a list of dicts, or a function that returns or yields them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from typing import Any

from nmoe.config.registry import POOLS
from nmoe.config.tables.pools import DatasetKeys
from nmoe.data.rows import Row
from nmoe.envs.pools.pool import EasyFirst, Order, Shuffled, fingerprint_of
from nmoe.envs.tasks import TASKS
from nmoe.envs.tasks.record_fields import checked_text, split_prompt
from nmoe.envs.tasks.task import RecordTask
from nmoe.envs.tasks.text import OpenTask
from nmoe.errors import UserError
from nmoe.grading.extraction import extract_gold
from nmoe.grading.math.question import DEFAULT, POLICY_KEYS
from nmoe.types import Message, Problem


def called_rows(name: str) -> Iterator[Row]:
    """Yields the records of a user's function or list, registered or importable as `name`, for a pool of type `python`.

    Each record comes with its location: ("my_module:problems, record 0", {...}). Raises UserError for a function that
    fails and for records that are not dicts.
    """
    part = POOLS.get(name)
    try:
        records = part() if callable(part) else part
        if not isinstance(records, Iterable) or isinstance(records, str | bytes | Mapping):
            raise UserError(f"pool {name}: it gives {type(records).__name__}, not a list of records")
        for number, record in enumerate(records):
            if not isinstance(record, Mapping):
                raise UserError(f"pool {name}, record {number}: {record!r} is not a dict")
            yield f"{name}, record {number}", record
    except UserError:
        raise
    except Exception as error:  # the program may raise anything
        raise UserError(f"pool {name}: it raised {type(error).__name__}: {error}") from error


QUESTION_FIELDS = ("problem", "question", "prompt", "input")
GOLD_FIELDS = ("answer", "label", "reward_spec.ground_truth", "reward_model.ground_truth")


@dataclass(frozen=True)
class Fields:
    """The names of the fields that hold question and gold: `Fields("prompt", "reward_spec.ground_truth")`; `gold` is None if
    records have no gold answer.
    """

    question: str
    gold: str | None

    def __str__(self) -> str:
        return f"question from {self.question!r}" + ("" if self.gold is None else f", gold from {self.gold!r}")


def fields_of(settings: DatasetKeys, record: Mapping[str, Any], has_gold: bool) -> Fields:
    """Returns the names of a record's question and gold fields: as the settings name them, or else the known names that the record
    has.

    Raises UserError if the record has none of the known fields, or several.
    """
    question = settings.problem_field or _found(record, QUESTION_FIELDS, "problem_field")
    if not has_gold:
        return Fields(question, None)
    return Fields(question, settings.answer_field or _found(record, GOLD_FIELDS, "answer_field"))


def has_gold(record: Mapping[str, Any]) -> bool:
    """Returns whether a record has a value in one of the known fields of gold answers."""
    return any(_at(record, field) is not None for field in GOLD_FIELDS)


def question_of(record: Mapping[str, Any], field: str) -> tuple[tuple[Message, ...], str]:
    """Returns the messages before the question, and the question, from the record's prompt field."""
    return split_prompt(_value(record, field, "problem_field"), field)


def gold_of(record: Mapping[str, Any], field: str, types: tuple[type, ...] = (str,)) -> str:
    """Returns a record's gold answer as text. Raises UserError if its type is not one of `types`, or the text is blank."""
    value = _value(record, field, "answer_field")
    # Python's True is an int but hardly a gold answer; nan is a float and never one.
    if isinstance(value, bool):
        fits = bool in types
    else:
        fits = isinstance(value, types) and (not isinstance(value, float) or math.isfinite(value))
    if fits:
        # Written in full: the form 1e-07 is Python's, not the dataset's.
        value = format(Decimal(repr(value)), "f") if isinstance(value, float) else str(value)
    return checked_text(field, value)


def _found(record: Mapping[str, Any], known: Sequence[str], setting: str) -> str:
    there = [field for field in known if _at(record, field) is not None]
    or_none = ', or task_type = "open" where no answer is the right one' if setting == "answer_field" else ""
    if len(there) > 1:
        raise UserError(
            f"the fields {' and '.join(map(repr, there))} may both be meant: set {setting} to one of them{or_none}"
        )
    if not there and (null := [field for field in known if field in record]):
        raise UserError(f"the field {null[0]!r} is null; fill it in or remove the record")
    if not there:
        raise UserError(
            f"no field {' or '.join(map(repr, known))}; the fields are {_names(record)}: set {setting} to one of them{or_none}"
        )
    return there[0]


def _value(record: Mapping[str, Any], field: str, setting: str) -> Any:
    whole, _, inner = field.partition(".")
    if field not in record and not (inner and isinstance(record.get(whole), Mapping) and inner in record[whole]):
        raise UserError(
            f"no field {field!r}; the fields are {_names(record)}: set {setting} to one of them, or complete the record"
        )
    return _at(record, field)


def _at(record: Mapping[str, Any], field: str) -> Any:
    """Returns the value of a field; None if it is missing. `a.b` is the field b of the object a, unless the record has a field
    named "a.b".
    """
    if field in record:
        return record[field]
    whole, _, inner = field.partition(".")
    value = record.get(whole)
    return value.get(inner) if inner and isinstance(value, Mapping) else None


def _names(record: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, record)) or "none"


# Fields that select the commits of a record's workspace.
COMMITS = ("base_commit", "target_commit")


def record_order(
    name: str, settings: DatasetKeys, records: Iterable[Row], origin: str, *, columns: bool = False
) -> Order:
    """Builds an order that cycles through the problems of the first `max_examples` records, of those only the `levels` that the
    settings name, reshuffled each epoch; with `easy_first`, the first epoch goes from easy to hard. With `columns`, problems keep
    all fields of their records.

    `origin` names the source of the records. Raises UserError for an invalid record, and if there are no records.
    """
    task = TASKS[settings.task_type]
    problems: list[Problem] = []
    difficulties: list[float] = []
    fields: Fields | None = None
    for number, (where, record) in enumerate(islice(records, settings.max_examples)):
        record = {**settings.record_defaults, **record}
        try:
            if fields is None and not isinstance(task, RecordTask):
                fields = fields_of(settings, record, has_gold=not isinstance(task, OpenTask))
            problem = _problem(name, settings, fields, number, record, columns)
            if settings.levels and level_of(problem) not in settings.levels:
                continue
            problems.append(problem)
            if settings.easy_first is not None:
                difficulties.append(_difficulty(settings.easy_first, record))
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
    if not problems:
        lacking = f"no record of level {' or '.join(settings.levels)}" if settings.levels else "no records"
        raise UserError(f"{origin}: {lacking}; a task pool needs at least one problem")
    # Hash the content, not the path: moved data is the same data, changed data is not.
    content = fingerprint_of(*(_content(problem) for problem in problems))
    read_as = "" if fields is None else f"{origin}: {fields}"
    if difficulties:
        return EasyFirst(name, difficulties, problems.__getitem__, settings.seed, content, read_as)
    return Shuffled(name, len(problems), problems.__getitem__, settings.seed, content, read_as)


def _difficulty(easy_first: str, record: Mapping[str, Any]) -> float:
    """Returns the first number in the field that `easy_first` names: 5.0 for `level` in {"level": "Level 5"}. With "-" before the
    name it is negated, for a rate that is high where problems are easy. Raises UserError if there is no number.

    """
    field = easy_first.removeprefix("-")
    found = re.search(r"-?\d+(?:\.\d+)?", str(record.get(field, "")))
    if found is None:
        has = f"has {record[field]!r}" if field in record else "is not there"
        raise UserError(f"easy_first = {easy_first!r}: the field {field!r} {has}, which is no number")
    return -float(found[0]) if easy_first.startswith("-") else float(found[0])


def level_of(problem: Problem) -> str:
    """Returns the problem's level without the word "Level", which MATH writes before it: "5" for "Level 5" and 5; empty without a
    level.
    """
    return str(problem.metadata.get("level", "")).strip().removeprefix("Level").strip()


def _content(problem: Problem) -> tuple[object, ...]:
    content: tuple[object, ...] = (problem.task_type, problem.question, problem.gold)
    # For a task's own records, also the rest: tests, files.
    if isinstance(TASKS[problem.task_type], RecordTask):
        content = (*content, *sorted(problem.metadata.items()))
    if problem.history:
        content = (*content, *problem.history)
    return (*content, json.dumps(problem.columns, sort_keys=True)) if problem.columns else content


def _problem(
    name: str, settings: DatasetKeys, fields: Fields | None, index: int, record: Mapping[str, Any], columns: bool
) -> Problem:
    task = TASKS[settings.task_type]
    history: tuple[Message, ...] = ()
    if isinstance(task, RecordTask):
        question, gold, metadata = task.read_record(record)
    else:
        assert fields is not None, "the fields are known from the first record"
        history, asked = question_of(record, fields.question)
        answer = ""
        if fields.gold is not None:
            answer = extract_gold(settings.gold_extractor, gold_of(record, fields.gold, task.gold_types))
        question, gold, metadata = task.pose(asked, answer, record)
    commits = {key: record[key] for key in COMMITS if isinstance(record.get(key), str)}
    # Only settings that differ from the defaults.
    policy = {key: getattr(settings, key) for key in POLICY_KEYS if getattr(settings, key) != getattr(DEFAULT, key)}
    metadata = {"record": index, **commits, **policy, **metadata}
    # Bytes, such as pictures, have no JSON form.
    kept = {name: _plain(value) for name, value in record.items() if columns and not isinstance(value, bytes)}
    problem = Problem(f"{name}/{index}", settings.task_type, question, gold, name, metadata, kept, history)
    task.check_gold(problem)
    return problem


def _plain(value: Any) -> Any:
    """Converts a value to plain JSON, so that a replay gives a reward the same value as the run.

    Dates become text, numbers that are not finite become null, and lone surrogates, which no request could carry, are
    replaced.
    """
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    return str(value).encode("utf-8", "replace").decode()


def columns_of(settings: DatasetKeys) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Returns the names of the required and the optional fields of a record, so that no others are loaded; None if only the records
    show which are needed.
    """
    task = TASKS[settings.task_type]
    fields = (settings.problem_field, settings.answer_field)
    needed = () if isinstance(task, RecordTask) else fields[:1] if isinstance(task, OpenTask) else fields
    if not all(field is not None and "." not in field for field in needed):
        return None
    hard = () if settings.easy_first is None else (settings.easy_first.removeprefix("-"),)
    return (*filter(None, needed), *hard), (*task.record_fields, *COMMITS)
