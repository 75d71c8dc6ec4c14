"""Records: the typed rows of a dataset. The columns determine the kind of record, and every record is checked.

A prompt, a completion and each side of a pair may be a text or a list of messages; a text stands for one message, of the user
(prompt) or of the assistant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, get_args

from nmoe.config.tables.recipes import DatasetSettings, Kind
from nmoe.data.layouts import listed, plain_columns, read_messages, read_tools, text_of, text_or_messages
from nmoe.data.rows import Row, read_rows
from nmoe.errors import UserError, shown
from nmoe.text.conversation import ChatMessage, ToolDefinition

Messages = tuple[ChatMessage, ...]
Tools = tuple[ToolDefinition, ...]

STEP_LABELS = {
    "+": ("+", "1", "true", "correct", "positive"),
    "0": ("0", "neutral"),
    "-": ("-", "-1", "false", "incorrect", "negative"),
}
"""The labels of a solution's step, each a character that is one token, with their other spellings: PRM800K's ratings, TRL's
booleans, plain words."""
_STEP_LABEL_OF = {spelling: label for label, spellings in STEP_LABELS.items() for spelling in spellings}


@dataclass(frozen=True)
class Text:
    """A text, all of it trained on: `{"text": "Once upon a time ..."}`."""

    where: str
    text: str


@dataclass(frozen=True)
class Conversation:
    """A conversation, whose assistant messages are trained on: `{"messages": [{"role": "user", "content": "6 * 7?"}, {"role":
    "assistant", "content": "42"}], "tools": [...]}`."""

    where: str
    messages: Messages
    tools: Tools = ()


@dataclass(frozen=True)
class Prompt:
    """A prompt to be answered: `{"prompt": "6 * 7?"}`."""

    where: str
    prompt: Messages
    tools: Tools = ()


@dataclass(frozen=True)
class PromptCompletion:
    """A prompt and a completion, of which only the completion is trained on: `{"prompt": "6 * 7?", "completion": "42"}`."""

    where: str
    prompt: Messages
    completion: Messages
    tools: Tools = ()


@dataclass(frozen=True)
class Preference:
    """A prompt with a preferred and another completion: `{"prompt": "6 * 7?", "chosen": "42", "rejected": "13"}`. Without a
    `prompt`, it is the common start of the message lists `chosen` and `rejected`."""

    where: str
    prompt: Messages
    chosen: Messages
    rejected: Messages
    tools: Tools = ()


@dataclass(frozen=True)
class Stepwise:
    """A solution with labelled steps: `{"prompt": "6 * 7?", "completions": ["6 * 7 = 6 + 36.", "It is 41."], "labels": [true,
    false]}`.

    `steps` are the completions; `labels` are "+" (right), "0" (neither wrong nor a step forward), "-" (wrong), as many as there are
    steps, or None for a step without a label.
    """

    where: str
    prompt: Messages
    steps: tuple[str, ...]
    labels: tuple[str | None, ...]


Record = Text | Conversation | Prompt | PromptCompletion | Preference | Stepwise


@dataclass(frozen=True)
class _Format:
    """The required and optional columns of a type of record, and the function that reads such a record."""

    needed: tuple[str, ...]
    optional: tuple[str, ...]
    read: Callable[[str, Mapping[str, Any]], Record]


class Records:
    """The records of a dataset, read one at a time.

    `kind` is the type of all records, such as conversations or preferences. `described` is a text for the user that
    says which column was read as which field.
    """

    def __init__(self, kind: Kind, described: str, records: Iterator[Record]) -> None:
        self.kind = kind
        self.described = described
        self._records = records

    def __iter__(self) -> Iterator[Record]:
        return self._records


def read_records(settings: DatasetSettings, accepted: Sequence[Kind] = get_args(Kind)) -> Records:
    """Reads the records of a dataset, of one of the `accepted` kinds.

    Raises UserError: at once if nothing can be read, or if the first row fits no accepted kind or several; while reading, with file
    and line, for a record that lacks what its kind needs.
    """
    rows = read_rows(settings.path, subset=settings.subset, split=settings.split, data_files=settings.data_files)
    first = next(rows, None)
    if first is None:
        raise UserError(f"{settings.path}: no records")
    fields, made = _columns_of(first, settings.columns)
    row = (first[0], fields)
    null = [name for name, value in first[1].items() if value is None]
    kind = _kind_of(row, settings, accepted, null)
    known = FORMATS[kind]
    columns = [name for name in (*known.needed, *known.optional) if row[1].get(name) is not None]
    origins = {name: repr(origin) for name, origin in settings.columns.items()} | made
    read_as = ", ".join(f"{name} from {origins[name]}" if name in origins else name for name in columns)
    ignored = [repr(name) for name, value in row[1].items() if value is not None and name not in columns]
    if ignored:  # a second half of the question, perhaps, as Alpaca's `input` is
        read_as += f"; not read: {', '.join(ignored)}"
    records = _records(chain([first], rows), kind, settings)
    return Records(kind, f"{settings.path}: records of kind {kind} ({read_as})", records)


def detect(columns: Sequence[str], accepted: Sequence[Kind] = get_args(Kind), mapped: Sequence[str] = ()) -> list[Kind]:
    """Returns the accepted kinds that records with these columns can be. A kind that uses only a part of another fitting kind's
    columns is left out, and a kind has to use all columns that the user `mapped`."""
    there = set(columns)
    fitting = [kind for kind in accepted if there.issuperset(FORMATS[kind].needed) and _uses(kind, mapped)]

    def covered(kind: Kind) -> bool:
        return any(_uses(other, FORMATS[kind].needed) for other in fitting if other != kind)

    return [kind for kind in fitting if not covered(kind)]


def _uses(kind: Kind, columns: Sequence[str]) -> bool:
    return {*FORMATS[kind].needed, *FORMATS[kind].optional}.issuperset(columns)


def _kind_of(row: Row, settings: DatasetSettings, accepted: Sequence[Kind], null: Sequence[str]) -> Kind:
    """Returns the kind of a row, whose columns have nmoe's names. `null` are the file's columns that are null in it, for the error
    message."""
    where, fields = row
    there = [name for name, value in fields.items() if value is not None]
    if settings.kind is not None:
        if settings.kind not in accepted:
            raise UserError(
                f'{settings.path}: kind = "{settings.kind}" cannot be used here; {" or ".join(accepted)} is'
            )
        return settings.kind
    kinds = detect(there, accepted, list(settings.columns))
    if len(kinds) == 1:
        return kinds[0]
    columns = ", ".join(map(repr, there)) or "none"
    if not kinds and null:
        columns += f" (without {', '.join(map(repr, null))}, null in this record)"
    if kinds:
        wanted = " or ".join(f'kind = "{kind}"' for kind in kinds)
        raise UserError(f"{where}: the columns {columns} fit {' and '.join(kinds)}; choose one: {wanted}")
    formats = "; ".join(f"{kind}: {', '.join(FORMATS[kind].needed)}" for kind in accepted)
    raise UserError(
        f"{where}: the columns {columns} fit no format ({formats}); name the columns in `columns`, such as "
        '{prompt = "question", completion = "answer"} (`nmoe data show`: --column prompt=question --column completion=answer)'
    )


def _columns_of(row: Row, columns: Mapping[str, str]) -> tuple[Mapping[str, Any], dict[str, str]]:
    """Renames the columns of a row to nmoe's names: by the user's `columns`, or without them by its layout."""
    where, _ = row
    named = _renamed(row, columns)
    if columns:
        return named, {}
    try:
        return plain_columns(named)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _renamed(row: Row, columns: Mapping[str, str]) -> Mapping[str, Any]:
    where, fields = row
    for column, name in columns.items():
        if name not in fields:
            there = ", ".join(map(repr, fields)) or "none"
            raise UserError(f"{where}: {column} from {name!r}: there is no such column; the columns are {there}")
    if not columns:
        return fields
    # A column that was given away under another name is not also there under its own.
    kept = {name: value for name, value in fields.items() if name not in columns.values()}
    return kept | {column: fields[name] for column, name in columns.items()}


def _records(rows: Iterator[Row], kind: Kind, settings: DatasetSettings) -> Iterator[Record]:
    known = FORMATS[kind]
    zeros = _ZeroLabels()
    for where, raw in rows:
        row, _ = _columns_of((where, raw), settings.columns)
        fields = {name: row.get(name) for name in (*known.needed, *known.optional)}
        try:
            if absent := [name for name in known.needed if fields[name] is None]:
                there = ", ".join(repr(name) for name, value in row.items() if value is not None) or "none"
                raise UserError(
                    f"a record of kind {kind} has {', '.join(map(repr, absent))}, and this one's columns are {there}"
                )
            record = known.read(where, fields)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        if kind == "stepwise":
            zeros.see(where, fields["labels"])
        yield record
    zeros.check()


class _ZeroLabels:
    """Refuses ambiguous labels: in a dataset whose labels are only 0 and 1, 0 may mean wrong or neutral; among -1, 0 and 1 it is
    neutral."""

    def __init__(self) -> None:
        self._first_zero: str | None = None
        self._spellings: set[str] = set()

    def see(self, where: str, labels: object) -> None:
        spellings = {_spelling(label) for label in listed(labels, "labels") if label is not None}
        self._spellings |= spellings
        if self._first_zero is None and "0" in spellings:
            self._first_zero = where

    def check(self) -> None:
        if self._first_zero is not None and self._spellings <= {"0", "1"}:
            raise UserError(
                f"{self._first_zero}: a label 0, in data of labels 0 and 1 alone, may mean wrong or neutral; write true and "
                'false, or "+", "0" and "-"'
            )


# --- the checks of each kind


def _text(where: str, fields: Mapping[str, Any]) -> Text:
    return Text(where, text_of(fields["text"], "text"))


def _conversation(where: str, fields: Mapping[str, Any]) -> Conversation:
    messages = read_messages(fields["messages"], "messages")
    if not any(message.role == "assistant" and message.trained for message in messages):
        raise UserError("no message is by the assistant (or each has weight 0), so there is nothing to train on")
    return Conversation(where, messages, _tools(fields))


def _prompt(where: str, fields: Mapping[str, Any]) -> Prompt:
    return Prompt(where, _asked(fields["prompt"], "prompt"), _tools(fields))


def _prompt_completion(where: str, fields: Mapping[str, Any]) -> PromptCompletion:
    prompt = _asked(fields["prompt"], "prompt")
    return PromptCompletion(where, prompt, _said(fields["completion"], "completion"), _tools(fields))


def _preference(where: str, fields: Mapping[str, Any]) -> Preference:
    prompt = None if fields["prompt"] is None else _asked(fields["prompt"], "prompt")
    sides = [_side(fields[column], column) for column in ("chosen", "rejected")]
    if prompt is None or all(side[0].role != "assistant" for side in sides):
        prompt = _common_prompt(prompt, *sides)
        sides = [side[len(prompt) :] for side in sides]
    chosen, rejected = (
        _checked_completion(side, column) for side, column in zip(sides, ("chosen", "rejected"), strict=True)
    )
    if chosen == rejected:
        raise UserError("'chosen' and 'rejected' are equal, so neither is preferred; remove the record")
    return Preference(where, prompt, chosen, rejected, _tools(fields))


def _common_prompt(prompt: Messages | None, chosen: Messages, rejected: Messages) -> Messages:
    """Returns the messages that both sides begin with, up to the first that differs; assistant messages at the end of the common
    part stay in the sides. Raises UserError if there are none, or if they contradict `prompt`."""
    shared = 0
    for one, other in zip(chosen, rejected, strict=False):
        if one != other:
            break
        shared += 1
    if chosen == rejected:
        raise UserError("'chosen' and 'rejected' are equal, so neither is preferred; remove the record")
    while shared and chosen[shared - 1].role == "assistant":
        shared -= 1
    if shared == 0:
        raise UserError(
            "there is no 'prompt', and 'chosen' and 'rejected' are not message lists that begin alike with one; give the prompt "
            "in its own column"
        )
    common = chosen[:shared]
    if prompt is not None and common[-len(prompt) :] != prompt:
        raise UserError(
            f"'prompt' is {shown(prompt[-1].content)}, and 'chosen' and 'rejected' begin with {shown(common[-1].content)}; "
            "remove one of the two, or give the completions alone"
        )
    return common


def _stepwise(where: str, fields: Mapping[str, Any]) -> Stepwise:
    prompt = _asked(fields["prompt"], "prompt")
    steps = tuple(
        _step(step, f"completions[{number}]")
        for number, step in enumerate(listed(fields["completions"], "completions"))
    )
    labels = tuple(
        _label(label, f"labels[{number}]") for number, label in enumerate(listed(fields["labels"], "labels"))
    )
    if not steps:
        raise UserError("'completions' is an empty list; a solution has steps")
    if len(steps) != len(labels):
        raise UserError(
            f"there are {len(steps)} completions and {len(labels)} labels; each step has its label, or null"
        )
    return Stepwise(where, prompt, steps, labels)


def _step(value: object, column: str) -> str:
    return text_of(value, column) if isinstance(value, str) else "".join(m.content for m in _said(value, column))


def _label(value: object, column: str) -> str | None:
    if value is None:
        return None
    label = _STEP_LABEL_OF.get(_spelling(value))
    if label is None:
        raise UserError(
            f'{column} is {shown(value)}; a label is true or false, 1, 0 or -1, "+", "0" or "-", or null for no label'
        )
    return label


def _spelling(label: object) -> str:
    if isinstance(label, float) and label.is_integer():  # a column of whole numbers and nulls becomes one of floats
        label = int(label)
    return str(label).strip().casefold()


def _asked(value: object, column: str) -> Messages:
    """Parses a prompt: a text by the user, or messages that the assistant is to answer."""
    value = text_or_messages(value, column)
    if isinstance(value, str):
        return (ChatMessage("user", text_of(value, column)),)
    messages = read_messages(value, column)
    if messages[-1].role == "assistant":
        raise UserError(
            f"{column!r} ends in a message of the assistant, and should end in the question that it answers"
        )
    return messages


def _said(value: object, column: str) -> Messages:
    return _checked_completion(_side(value, column), column)


def _side(value: object, column: str) -> Messages:
    value = text_or_messages(value, column)
    if isinstance(value, str):
        return (ChatMessage("assistant", text_of(value, column)),)
    if isinstance(value, Mapping):  # one message, as some datasets have it
        value = [value]
    return read_messages(value, column)


def _checked_completion(messages: Messages, column: str) -> Messages:
    """Raises UserError unless a completion starts and ends with the assistant; returns it."""
    if not messages:
        raise UserError(f"{column!r} is empty; fill it in or remove the record")
    for end in (messages[0], messages[-1]):
        if end.role != "assistant":
            raise UserError(
                f"{column!r} has a message by {end.role!r} where the assistant's should be, at its start or end"
            )
    return messages


def _tools(fields: Mapping[str, Any]) -> Tools:
    # A CSV has an empty text where there are none.
    return () if fields["tools"] in (None, "") else read_tools(fields["tools"])


FORMATS: dict[Kind, _Format] = {
    "text": _Format(("text",), (), _text),
    "messages": _Format(("messages",), ("tools",), _conversation),
    "prompt": _Format(("prompt",), ("tools",), _prompt),
    "prompt_completion": _Format(("prompt", "completion"), ("tools",), _prompt_completion),
    "preference": _Format(("chosen", "rejected"), ("prompt", "tools"), _preference),
    "stepwise": _Format(("prompt", "completions", "labels"), (), _stepwise),
}
