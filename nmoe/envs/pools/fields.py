"""Where in a record its question and its gold answer are: in the fields that a pool names, or in those that its first record has.

Known without being named, as people have them:

    {"problem": "...", "answer": "..."}   or "question"
    {"input": "...", "label": "..."}                                          OpenRLHF
    {"prompt": ..., "reward_spec": {"method": "rule", "ground_truth": "..."}} SkyRL
    {"prompt": ..., "reward_model": {"style": "rule", "ground_truth": "..."}} verl

A question is a text, or a list of messages that ends with the user's: those before it become the conversation that leads up to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from nmoe.config.tables.pools import DatasetKeys
from nmoe.data.messages import read_messages, text_or_messages
from nmoe.errors import UserError
from nmoe.text.conversation import ChatMessage
from nmoe.types import Message

QUESTION_FIELDS = ("problem", "question", "prompt", "input")
GOLD_FIELDS = ("answer", "label", "reward_spec.ground_truth", "reward_model.ground_truth")


@dataclass(frozen=True)
class Fields:
    """`Fields("prompt", "reward_spec.ground_truth")`; without a gold answer `Fields("prompt", None)`."""

    question: str
    gold: str | None

    def __str__(self) -> str:
        return f"question from {self.question!r}" + ("" if self.gold is None else f", gold from {self.gold!r}")


def fields_of(settings: DatasetKeys, record: Mapping[str, Any], has_gold: bool) -> Fields:
    """What the settings name, and for the rest what the record has. Raises UserError where it has none of the known fields, or
    several."""
    question = settings.problem_field or _found(record, QUESTION_FIELDS, "problem_field")
    if not has_gold:
        return Fields(question, None)
    return Fields(question, settings.answer_field or _found(record, GOLD_FIELDS, "answer_field"))


def question_of(record: Mapping[str, Any], field: str) -> tuple[tuple[Message, ...], str]:
    """The messages before the question, and the question."""
    value = text_or_messages(_value(record, field, "problem_field"), field)
    if not isinstance(value, list | tuple):
        return (), checked_text(field, value)
    *history, last = read_messages(value, field)
    if last.role != "user":
        raise UserError(
            f"field {field!r} ends with a message by {last.role!r}; it is the user's that the policy answers"
        )
    messages = tuple(_message(message, f"{field}[{place}]") for place, message in enumerate(history))
    return messages, checked_text(f"{field}[{len(history)}]", last.content)


def gold_of(record: Mapping[str, Any], field: str, types: tuple[type, ...] = (str,)) -> str:
    """The gold's text; `types` are those that it may have."""
    value = _value(record, field, "answer_field")
    # True is an int to Python, and seldom a gold answer; nan is a float, and never one.
    if isinstance(value, bool):
        fits = bool in types
    else:
        fits = isinstance(value, types) and (not isinstance(value, float) or math.isfinite(value))
    if fits:
        # In full: 1e-07 is how Python, not a dataset, would write it.
        value = format(Decimal(repr(value)), "f") if isinstance(value, float) else str(value)
    return checked_text(field, value)


def checked_text(field: str, value: object) -> str:
    """A text with something in it. Raises UserError."""
    if not isinstance(value, str):
        raise UserError(f"field {field!r} holds {type(value).__name__} {_shown(value)}, not text; write it as a string")
    if not value.strip():
        raise UserError(f"field {field!r} is empty; fill it in or remove the record")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(f"field {field!r} holds a lone surrogate, which is no character: {_shown(value)}") from None
    return value


def _found(record: Mapping[str, Any], known: Sequence[str], setting: str) -> str:
    there = [field for field in known if _at(record, field) is not None]
    if len(there) > 1:
        raise UserError(f"the fields {' and '.join(map(repr, there))} may both be meant: set {setting} to one of them")
    if not there:
        or_none = ', or task_type = "open" where no answer is the right one' if setting == "answer_field" else ""
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
    """The value of a field; None where it is not there. Of `a.b`, unless a field is called that, field b of the object a."""
    if field in record:
        return record[field]
    whole, _, inner = field.partition(".")
    value = record.get(whole)
    return value.get(inner) if inner and isinstance(value, Mapping) else None


def _message(message: ChatMessage, where: str) -> Message:
    """A message of the history; the assistant's are answers it gave, whose reasoning nobody is shown again."""
    if message.calls or message.role == "tool":
        raise UserError(f"{where}: calls of tools in a prompt have no place in a task pool; drop the record")
    if message.role == "assistant" and not message.content.strip():
        raise UserError(f"{where}: the assistant says nothing; fill it in or remove the record")
    checked_text(f"{where}.content", message.content)
    return Message(message.role, message.content, channel="final" if message.role == "assistant" else None)


def _names(record: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, record)) or "none"


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
