"""Prompts as users write them: a text, or a list of messages that ends with the user's."""

from __future__ import annotations

from nmoe.data.messages import held, read_messages, text_or_messages
from nmoe.errors import UserError, shown
from nmoe.text.conversation import ChatMessage
from nmoe.types import Message


def split_prompt(prompt: object, field: str) -> tuple[tuple[Message, ...], str]:
    """Returns the messages before the question, and the question. Raises UserError, naming `field`, for anything else."""
    value = text_or_messages(prompt, field)
    if not isinstance(value, list | tuple):
        return (), checked_text(field, value)
    *history, last = read_messages(value, field)
    if last.role != "user":
        raise UserError(
            f"field {field!r} ends with a message by {last.role!r}; it is the user's that the policy answers"
        )
    messages = tuple(_message(message, f"{field}[{place}]") for place, message in enumerate(history))
    return messages, checked_text(f"{field}[{len(history)}]", last.content)


def checked_text(field: str, value: object) -> str:
    """Returns the value if it is a text that is not blank. Raises UserError otherwise."""
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
    """Returns a message of the history. The assistant's are answers: earlier reasoning is not shown again."""
    if message.calls or message.role == "tool":
        raise UserError(f"{where}: calls of tools in a prompt have no place in a task pool; drop the record")
    if message.role == "assistant" and not message.content.strip():
        raise UserError(f"{where}: the assistant says nothing; fill it in or remove the record")
    checked_text(f"{where}.content", message.content)
    return Message(message.role, message.content, channel="final" if message.role == "assistant" else None)
