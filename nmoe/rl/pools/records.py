"""Records of a dataset become problems: fields picked, the gold extracted, everything checked before a run starts.

The first record that is wrong ends the load with an error that says which one it is, down to file and line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from nmoe.config.environment import DatasetKeys
from nmoe.data.rows import Row
from nmoe.errors import UserError
from nmoe.rl.grading.gold import extract_gold
from nmoe.rl.pools.order import Order, Shuffled, fingerprint_of
from nmoe.rl.problem import Problem
from nmoe.rl.tasks import TASKS
from nmoe.rl.tasks.task import Metadata

# Of a record's workspace, where its environment has one.
COMMITS = ("base_commit", "target_commit")


def record_order(
    name: str, settings: DatasetKeys, records: Iterable[Row], origin: str, *, columns: bool = False
) -> Order:
    """Cycles through the problems of the first `max_examples` records, reshuffled each epoch; with `columns`, they keep all fields.

    `origin` names where the records come from. Raises UserError for a record that is wrong and where there is none.
    """
    problems = [
        _problem(name, settings, index, where, record, columns)
        for index, (where, record) in enumerate(islice(records, settings.max_examples))
    ]
    if not problems:
        raise UserError(f"{origin}: no records; a task pool needs at least one problem")
    # Over the content rather than the path: data that moved is the same data, and data that changed is not.
    content = fingerprint_of(*(_content(problem) for problem in problems))
    return Shuffled(name, len(problems), problems.__getitem__, settings.seed, content)


def _content(problem: Problem) -> tuple[object, ...]:
    content: tuple[object, ...] = (problem.task_type, problem.question, problem.gold)
    # Of a task's own records also the rest: tests, files.
    if TASKS[problem.task_type].own_records:
        content = (*content, *sorted(problem.metadata.items()))
    return (*content, json.dumps(problem.columns, sort_keys=True)) if problem.columns else content


def _problem(
    name: str, settings: DatasetKeys, index: int, where: str, record: Mapping[str, Any], columns: bool
) -> Problem:
    task = TASKS[settings.task_type]
    try:
        question, gold, metadata = task.read_record(record) or _posed(settings, record)
        commits = {key: record[key] for key in COMMITS if isinstance(record.get(key), str)}
        metadata = {"record": index, **commits, **metadata}
        kept = {field: _plain(value) for field, value in record.items()} if columns else {}
        problem = Problem(f"{name}/{index}", settings.task_type, question, gold, name, metadata, kept)
        task.check_gold(problem)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return problem


def _posed(settings: DatasetKeys, record: Mapping[str, Any]) -> tuple[str, str, Metadata]:
    """From the fields that the settings name."""
    task = TASKS[settings.task_type]
    question = _text(record, settings.problem_field, "problem_field")
    field = _text(record, settings.answer_field, "answer_field", task.gold_types)
    return task.pose(question, extract_gold(settings.gold_extractor, field), record)


def _plain(value: Any) -> Any:
    """The value as JSON has it, so that a replay gives a reward what the run gave it: dates and bytes as their text, no number
    that is not finite, and no lone surrogate, which no request could carry."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    return str(value).encode("utf-8", "replace").decode()


def columns_of(settings: DatasetKeys) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fields of a record that have to be there, and those that are read where they are."""
    task = TASKS[settings.task_type]
    needed = () if task.own_records else (settings.problem_field, settings.answer_field)
    return needed, (*task.record_fields, *COMMITS)


def _text(record: Mapping[str, Any], field: str, setting: str, types: tuple[type, ...] = (str,)) -> str:
    if field not in record:
        raise UserError(
            f"no field {field!r}; the fields are {', '.join(map(repr, record)) or 'none'}: set {setting} to one of them"
        )
    value = record[field]
    # True is an int to Python, and seldom a gold answer.
    if not isinstance(value, str) and isinstance(value, types) and (not isinstance(value, bool) or bool in types):
        value = str(value)
    if not isinstance(value, str):
        raise UserError(f"field {field!r} holds {type(value).__name__} {_shown(value)}, not text; write it as a string")
    if not value.strip():
        raise UserError(f"field {field!r} is empty; fill it in or remove the record")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(f"field {field!r} holds a lone surrogate, which is no character: {_shown(value)}") from None
    return value


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
