"""Reads the fields of a record strictly: texts, files and prompts. Errors name the field that is missing or has the wrong type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nmoe.data.layouts import held, json_word, read_messages, text_or_messages
from nmoe.errors import UserError, shown
from nmoe.text.conversation import ChatMessage
from nmoe.types import Message

Record = Mapping[str, object]


def text(record: Record, *names: str, default: str | None = None) -> str:
    """Returns the text in the first of these fields that is present and not None, else the default. Raises UserError for a missing
    field or another type.
    """
    value = _field(record, names, default)
    if not isinstance(value, str):
        raise UserError(f"field {names[0]!r} holds {json_word(value)}, not text")
    return value


def texts(record: Record, *names: str, default: Sequence[str] | None = None) -> list[str]:
    value = _field(record, names, default)
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(one, str) for one in value):
        raise UserError(f"field {names[0]!r} holds {json_word(value)}, not a list of texts")
    return list(value)


def files(record: Record, *names: str, default: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the files in the first of these fields that is present: relative path -> content. Raises UserError for anything
    else."""
    value = _field(record, names, default)
    if not isinstance(value, Mapping):
        raise UserError(f"field {names[0]!r} holds {json_word(value)}, not an object of paths and contents")
    # In an Arrow column, each row has the keys of all rows.
    found = {path: content for path, content in value.items() if content is not None}
    for path, content in found.items():
        if not isinstance(path, str) or not isinstance(content, str):
            raise UserError(f"field {names[0]!r}: {path!r} holds {json_word(content)}, not text")
        if not path or path.startswith("/") or ".." in path.split("/") or "\0" in path:
            raise UserError(f"field {names[0]!r}: {path!r} is not a path within a workspace")
    return found


def _field(record: Record, names: Sequence[str], default: object) -> object:
    for name in names:
        if record.get(name) is not None:
            return record[name]
    if default is None:
        there = ", ".join(map(repr, record)) or "none"
        raise UserError(f"no field {' or '.join(map(repr, names))}; the fields are {there}")
    return default


def split_prompt(prompt: object, field: str) -> tuple[tuple[Message, ...], str]:
    """Splits a prompt, a text or a list of messages, into the messages before the question and the question. Raises UserError,
    naming `field`, for anything else.
    """
    value = text_or_messages(prompt, field)
    if not isinstance(value, list | tuple):
        return (), checked_text(field, value)
    *history, last = read_messages(value, field)
    if last.role != "user":
        raise UserError(
            f"field {field!r} ends with a message by {last.role!r}; the policy answers a message of the user"
        )
    messages = tuple(_message(message, f"{field}[{index}]") for index, message in enumerate(history))
    return messages, checked_text(f"{field}[{len(history)}]", last.content)


def checked_text(field: str, value: object) -> str:
    """Returns the value if it is a non-blank text without lone surrogates. Raises UserError, which names the field, otherwise."""
    if value is None:
        raise UserError(f"field {field!r} is null; fill it in or remove the record")
    if not isinstance(value, str):
        raise UserError(f"field {field!r} holds {held(value)}, not text; write it as a string")
    if not value.strip():
        raise UserError(f"field {field!r} is empty; fill it in or remove the record")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(f"field {field!r} holds a lone surrogate, which is not a character: {shown(value)}") from None
    return value


def _message(message: ChatMessage, where: str) -> Message:
    """Converts a message of the history; an assistant's message becomes a final answer, since earlier reasoning is not shown again.
    Raises UserError for tool calls and blank texts.
    """
    if message.calls or message.role == "tool":
        raise UserError(f"{where}: calls of tools in a prompt have no place in a task pool; drop the record")
    if message.role == "assistant" and not message.content.strip():
        raise UserError(f"{where}: the assistant says nothing; fill it in or remove the record")
    checked_text(f"{where}.content", message.content)
    return Message(message.role, message.content, channel="final" if message.role == "assistant" else None)
