"""Finds a record's question and gold answer: in the fields that a pool names, or in the known fields of the first record.

Known layouts are:

    {"problem": "...", "answer": "..."}   or "question"
    {"input": "...", "label": "..."}                                          OpenRLHF
    {"prompt": ..., "reward_spec": {"method": "rule", "ground_truth": "..."}} SkyRL
    {"prompt": ..., "reward_model": {"style": "rule", "ground_truth": "..."}} verl

A question is a text or a list of messages that ends with the user's; the messages before it become the problem's history.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from nmoe.config.tables.pools import DatasetKeys
from nmoe.envs.tasks.record_fields import checked_text, split_prompt
from nmoe.errors import UserError
from nmoe.types import Message

QUESTION_FIELDS = ("problem", "question", "prompt", "input")
GOLD_FIELDS = ("answer", "label", "reward_spec.ground_truth", "reward_model.ground_truth")


@dataclass(frozen=True)
class Fields:
    """The fields of question and gold: `Fields("prompt", "reward_spec.ground_truth")`; without a gold answer `Fields("prompt",
    None)`.
    """

    question: str
    gold: str | None

    def __str__(self) -> str:
        return f"question from {self.question!r}" + ("" if self.gold is None else f", gold from {self.gold!r}")


def fields_of(settings: DatasetKeys, record: Mapping[str, Any], has_gold: bool) -> Fields:
    """Takes the fields that the settings name and detects the others in the record.

    Raises UserError if the record has none of the known fields, or several.
    """
    question = settings.problem_field or _found(record, QUESTION_FIELDS, "problem_field")
    if not has_gold:
        return Fields(question, None)
    return Fields(question, settings.answer_field or _found(record, GOLD_FIELDS, "answer_field"))


def has_gold(record: Mapping[str, Any]) -> bool:
    """Whether one of the known fields of a gold answer has a value."""
    return any(_at(record, field) is not None for field in GOLD_FIELDS)


def question_of(record: Mapping[str, Any], field: str) -> tuple[tuple[Message, ...], str]:
    """Returns the messages before the question, and the question."""
    return split_prompt(_value(record, field, "problem_field"), field)


def gold_of(record: Mapping[str, Any], field: str, types: tuple[type, ...] = (str,)) -> str:
    """Returns the gold answer as text; `types` are its permitted types."""
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
    """Returns the value of a field; None if it is missing. `a.b` is field b of the object a, unless a field is called that."""
    if field in record:
        return record[field]
    whole, _, inner = field.partition(".")
    value = record.get(whole)
    return value.get(inner) if inner and isinstance(value, Mapping) else None


def _names(record: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, record)) or "none"
