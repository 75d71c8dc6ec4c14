r"""Converts common layouts of datasets to nmoe's columns: messages of OpenAI's chat format and of ShareGPT, and the following.

{"conversations": [{"from": "human", "value": "..."}, ...], "system": "..."}    ShareGPT: messages
{"instruction": "...", "input": "...", "output": "..."}                         Alpaca: prompt, completion
{"question": "...", "choices": ["4", "5"], "answer": 1}                        MMLU: prompt with lettered choices, completion
{"question": "...", "answer": "6 * 7 = <<6*7=42>>42\n#### 42"}                  GSM8K: prompt, completion without calculations
{"chosen": "\n\nHuman: ...\n\nAssistant: ...", "rejected": "..."}             hh-rlhf: message lists with a common start
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from nmoe.errors import UserError, shown
from nmoe.parsing import json_of
from nmoe.text.conversation import ChatMessage, FunctionCall, ToolDefinition
from nmoe.text.harmony import CHANNELS, ROLES

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
# Tool calls of ShareGPT-like datasets, and of OpenAI's format before `tool_calls`.
_ROLES_OF_CALLS = {"function_call": "assistant", "observation": "tool", "function_response": "tool", "function": "tool"}
_REASONING = ("reasoning_content", "reasoning", "thinking")
_OBJECTS = re.compile(r"\s*\[\s*\{.*\}\s*\]\s*", re.DOTALL)
_PRINTED_ROLE = re.compile(r"'(?:role|from)': '(?:system|user|human|assistant|gpt)'")


def read_messages(value: object, column: str) -> tuple[ChatMessage, ...]:
    """Parses a list of messages, which may be given as JSON text (as in CSV). Raises UserError, without file and line."""
    if not isinstance(value, list | tuple | str):
        raise UserError(f"{column!r} holds {held(value)}, neither a text nor a list of messages")
    messages = listed(value, column)
    if not messages:
        raise UserError(f"{column!r} is an empty list; a conversation has messages")
    return tuple(_message(message, f"{column}[{number}]") for number, message in enumerate(messages))


def read_tools(value: object) -> tuple[ToolDefinition, ...]:
    """Parses tool definitions in OpenAI's form (JSON schemas), with or without the enclosing `{"type": "function", "function":
    ...}`."""
    return tuple(_tool(tool, f"tools[{number}]") for number, tool in enumerate(listed(value, "tools")))


def listed(value: object, column: str) -> Sequence[Any]:
    """Returns a list, which may be written as JSON text. Raises UserError, without file and line."""
    if isinstance(value, str):
        try:
            value = json_of(value)
        except ValueError:
            raise UserError(f"{column!r} is the text {shown(value)}, not a list nor the JSON of one") from None
    if not isinstance(value, list | tuple):
        raise UserError(f"{column!r} holds {held(value)}, not a list")
    return value


def text_or_messages(value: object, column: str) -> object:
    """Returns the value, parsed if it is a list of messages as JSON text. Raises UserError for a list as Python prints it, which
    pandas writes into a CSV: training on it is a mistake."""
    if not isinstance(value, str) or not _OBJECTS.fullmatch(value):
        return value
    try:
        objects = json_of(value)
    except ValueError:
        if _PRINTED_ROLE.search(value):
            raise UserError(
                f"{column!r} is {shown(value)}, messages as Python prints them; write them as JSON"
            ) from None
        return value
    # Other lists of objects are content for the model to read or write.
    are_messages = all(
        isinstance(one, dict) and ({"role", "content"} <= one.keys() or {"from", "value"} <= one.keys())
        for one in objects
    )
    return objects if are_messages else value


def text_of(value: object, column: str) -> str:
    """Returns a text that is not blank. Raises UserError, without file and line."""
    if not isinstance(value, str):
        raise UserError(f"{column!r} holds {held(value)}, not text")
    if not value.strip():
        raise UserError(f"{column!r} is empty; fill it in or remove the record")
    return value


def json_word(value: object) -> str:
    """Names the JSON type of a value, for messages: "a number"."""
    words = {dict: "an object", list: "an array", str: "a text", int: "a number", float: "a number", bool: "a boolean"}
    return "null" if value is None else words.get(type(value), f"a {type(value).__name__}")


def held(value: object) -> str:
    """Describes a value in an error message: "null", or "the number 3"."""
    word = json_word(value)
    return word if value is None else f"the {word.partition(' ')[2]} {shown(value)}"


def _message(value: object, where: str) -> ChatMessage:
    if not isinstance(value, Mapping):
        raise UserError(f'{where} is {shown(value)}, not a message such as {{"role": "user", "content": "..."}}')
    role, content = value.get("role"), value.get("content")
    if role is None and content is None and "from" in value:
        role, content = _SHAREGPT_ROLES.get(str(value["from"]), value["from"]), value.get("value")
    calls = tuple(
        _call(call, f"{where}.tool_calls[{number}]")
        for number, call in enumerate(listed(value.get("tool_calls") or [], f"{where}.tool_calls"))
    )
    if value.get("function_call") is not None:
        calls = (*calls, _call(value["function_call"], f"{where}.function_call"))
    if role == "function_call":
        calls, content = _written_calls(content, where), ""
    role = _ROLES_OF_CALLS.get(str(role), role)
    if role not in ROLES:
        raise UserError(f"{where}: the role is {shown(role)}; the roles are {', '.join(ROLES)}")
    channel = value.get("channel")
    if channel is not None and channel not in CHANNELS:
        raise UserError(f"{where}: the channel is {shown(channel)}; the channels are {', '.join(CHANNELS)}")
    weight = value.get("weight", 1)
    if weight not in (0, 1, None):
        raise UserError(f"{where}: the weight is {shown(weight)}; a message is trained, 1, or not, 0")
    thoughts = [value[key] for key in _REASONING if value.get(key) is not None]
    reasoning = next(filter(None, thoughts), thoughts[0] if thoughts else None)
    if role != "assistant" and not reasoning:
        reasoning = None  # from a column that all messages share
    message = ChatMessage(
        role,
        _content(content, where, needed=not calls and reasoning is None),
        reasoning=None if reasoning is None else _text(reasoning, f"{where}: the reasoning"),
        calls=calls,
        name=_optional(value, "name", where),
        call_id=_optional(value, "tool_call_id", where),
        channel=channel,
        trained=weight != 0,
    )
    if role != "assistant" and (calls or reasoning is not None):
        raise UserError(
            f"{where}: a message by {role!r} has tool calls or reasoning, which only the assistant may have"
        )
    if role == "assistant" and message.is_empty:
        raise UserError(f"{where}: the assistant says nothing; fill it in or remove the record")
    return message


def _content(value: object, where: str, *, needed: bool) -> str:
    if value is None and not needed:
        return ""
    if isinstance(value, list | tuple):  # content parts, as in messages with images
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in value):
            raise UserError(f"{where}: a part of the content is not text; nmoe trains on text only")
        return "".join(part["text"] for part in value)
    return _text(value, f"{where}: the content")


def _written_calls(content: object, where: str) -> tuple[FunctionCall, ...]:
    """Parses the calls in the content of a message with the role `function_call`: JSON of one call or a list."""
    try:
        written = json_of(content) if isinstance(content, str) else content
    except ValueError:
        raise UserError(
            f'{where}: a function_call is {shown(content)}, not the JSON of {{"name": "f", "arguments": {{}}}}'
        ) from None
    return tuple(_call(one, where) for one in (written if isinstance(written, list | tuple) else [written]))


def _call(value: object, where: str) -> FunctionCall:
    body = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(body, Mapping) or not isinstance(body.get("name"), str) or not body["name"]:
        raise UserError(
            f'{where} is {shown(value)}, not a call such as {{"function": {{"name": "f", "arguments": {{}}}}}}'
        )
    assert isinstance(value, Mapping), "its body was found"
    arguments = body.get("arguments")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping | str):
        raise UserError(f"{where}: the arguments are {shown(arguments)}, neither an object nor a text")
    return FunctionCall(body["name"], arguments, _optional(value, "id", where))


def _tool(value: object, where: str) -> ToolDefinition:
    body = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(body, Mapping) or not isinstance(body.get("name"), str) or not body["name"]:
        raise UserError(
            f"{where} is {shown(value)}, not a tool with a name, a description and the schema of its parameters"
        )
    parameters = body.get("parameters")
    if parameters is not None:
        _check_schema(parameters, f"{where}.parameters")
    return ToolDefinition(body["name"], _text(body.get("description") or "", f"{where}: the description"), parameters)


def _check_schema(schema: object, where: str) -> None:
    """Checks the parts of a JSON schema that tool declarations use. Raises UserError."""
    if not isinstance(schema, Mapping):
        raise UserError(f"{where} is {shown(schema)}, not a JSON schema, which is an object")
    kind, properties = schema.get("type"), schema.get("properties", {})
    for key, fits in (
        ("type", kind is None or isinstance(kind, str) or all(isinstance(one, str) for one in listed(kind, where))),
        ("properties", isinstance(properties, Mapping)),
        ("enum", isinstance(schema.get("enum", []), list | tuple)),
        ("required", isinstance(schema.get("required", []), list | tuple)),
    ):
        if not fits:
            raise UserError(f"{where}: its {key!r} is {shown(schema.get(key))}, which is not valid in a JSON schema")
    for name, below in properties.items():
        _check_schema(below, f"{where}.properties.{name}")
    if schema.get("items"):
        _check_schema(schema["items"], f"{where}.items")


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{what} is {held(value)}, not text")
    return value


def _optional(value: Mapping[str, Any], key: str, where: str) -> str | None:
    return None if value.get(key) is None else _text(value[key], f"{where}: {key!r}")


# GSM8K's last line, and its calculations for a calculator, which repeat what the text says.
_HASH = re.compile(r"^#### [^\n]+\s*\Z", re.MULTILINE)
_CALCULATION = re.compile(r"<<[^<>\n]*>>")
_TURN = re.compile(r"\n\n(Human|Assistant): ?")


def plain_columns(row: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Converts the columns of a common layout to nmoe's. Returns the row, and which columns were made from which: `{"messages":
    "conversations"}`. Columns that have nmoe's names stay, except transcripts in `chosen` and `rejected`, which become messages,
    and Alpaca's `text`, which is left out. Raises UserError for a dialogue that does not end with the assistant, and for a column
    of a layout that is no text or list."""
    columns = {name: value for name, value in row.items() if value is not None}
    made: dict[str, str] = {}
    if "conversations" in columns and "messages" not in columns:
        columns["messages"] = _with_system(columns.pop("conversations"), columns.pop("system", None))
        made["messages"] = "conversations"
    if {"instruction", "output"} <= columns.keys() and not {"prompt", "completion"} & columns.keys():
        asked = [_plain_text(columns.pop(name), name) for name in ("instruction", "input") if name in columns]
        columns["completion"] = columns.pop("output")
        columns.pop("text", None)  # Alpaca's own: the three again, in one text
        columns["prompt"] = "\n\n".join(one for one in asked if one.strip())
        made |= {"prompt": "instruction and input", "completion": "output"}
    if {"question", "choices", "answer"} <= columns.keys() and not {"prompt", "completion"} & columns.keys():
        columns["prompt"], columns["completion"] = _multiple_choice(
            *(columns.pop(name) for name in ("question", "choices", "answer"))
        )
        made |= {"prompt": "question and choices", "completion": "answer"}
    worked = columns.get("answer")
    if (
        "question" in columns
        and isinstance(worked, str)
        and _HASH.search(worked)
        and not {"prompt", "completion"} & columns.keys()
    ):
        columns["prompt"] = _plain_text(columns.pop("question"), "question")
        columns["completion"] = _CALCULATION.sub("", columns.pop("answer"))
        made |= {"prompt": "question", "completion": "answer"}
    for side in ("chosen", "rejected"):
        if isinstance(said := columns.get(side), str) and said.startswith("\n\nHuman:"):
            columns[side] = _dialogue(said, side)
            made[side] = side
    return columns, made


def _with_system(conversations: object, system: object) -> Sequence[Any]:
    """Returns ShareGPT's messages, preceded by the system prompt if it has its own column."""
    messages = listed(conversations, "conversations")
    if system is None or not _plain_text(system, "system").strip():
        return messages
    return [{"role": "system", "content": system}, *messages]


def _multiple_choice(question: object, choices: object, answer: object) -> tuple[str, str]:
    """Returns the question with its lettered choices below, in the form of the task `multiple_choice`, and the letter of the
    answer. `answer` is a letter or an index from 0."""
    texts = [_plain_text(choice, "choices") for choice in listed(choices, "choices")]
    letters = ascii_uppercase[: len(texts)]
    letter = letters[answer] if isinstance(answer, int) and 0 <= answer < len(letters) else answer
    if not isinstance(letter, str) or len(letter) != 1 or letter not in letters:
        raise UserError(f"'answer' is {answer!r}, which is none of {len(texts)} choices: an index from 0, or a letter")
    lines = [f"{letter}. {text}" for letter, text in zip(letters, texts, strict=True)]
    return "\n".join([_plain_text(question, "question"), "", *lines]), letter


def _plain_text(value: object, column: str) -> str:
    """Returns the text of a column that becomes part of the prompt.

    Raises UserError if it is not a text, since the question would be incomplete.
    """
    if not isinstance(value, str):
        raise UserError(f"{column!r} has to be a text, and is {value!r}")
    return value


def _dialogue(text: str, column: str) -> list[dict[str, str]]:
    """Parses an hh-rlhf transcript into messages. Raises UserError if it does not end with the assistant."""
    _, *pieces = _TURN.split(text)
    roles = {"Human": "user", "Assistant": "assistant"}
    messages = [
        {"role": roles[who], "content": said.strip()} for who, said in zip(pieces[::2], pieces[1::2], strict=True)
    ]
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise UserError(f"{column!r} is a dialogue that does not end with the assistant")
    return messages
