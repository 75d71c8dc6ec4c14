"""Convert rows of common dataset layouts to nmoe's own columns.

{"conversations": [{"from": "human", "value": "..."}, ...], "system": "..."}    ShareGPT: messages
{"instruction": "...", "input": "...", "output": "..."}                         Alpaca: prompt, completion
{"question": "...", "choices": ["4", "5"], "answer": 1}                        MMLU: prompt with lettered choices, completion
{"chosen": "\\n\\nHuman: ...\\n\\nAssistant: ...", "rejected": "..."}             hh-rlhf: message lists with a common start
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from nmoe.data.messages import listed
from nmoe.errors import UserError

_TURN = re.compile(r"\n\n(Human|Assistant): ?")


def plain_columns(row: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The row with the columns of its layout as nmoe's, and what they were made of: `{"messages": "conversations"}`. Columns of
    nmoe's own that are there stay as they are. Raises UserError for a dialogue that does not begin with a human."""
    columns = {name: value for name, value in row.items() if value is not None}
    made: dict[str, str] = {}
    if "conversations" in columns and "messages" not in columns:
        columns["messages"] = _with_system(columns.pop("conversations"), columns.pop("system", None))
        made["messages"] = "conversations"
    if {"instruction", "output"} <= columns.keys() and not {"prompt", "completion"} & columns.keys():
        asked = [_text(columns.pop(name), name) for name in ("instruction", "input") if name in columns]
        columns["completion"] = columns.pop("output")
        columns.pop("text", None)  # Alpaca's own: the three again, in one text
        columns["prompt"] = "\n\n".join(one for one in asked if one.strip())
        made |= {"prompt": "instruction and input", "completion": "output"}
    if {"question", "choices", "answer"} <= columns.keys() and not {"prompt", "completion"} & columns.keys():
        columns["prompt"], columns["completion"] = _multiple_choice(
            *(columns.pop(name) for name in ("question", "choices", "answer"))
        )
        made |= {"prompt": "question and choices", "completion": "answer"}
    for side in ("chosen", "rejected"):
        if isinstance(said := columns.get(side), str) and said.startswith("\n\nHuman:"):
            columns[side] = _dialogue(said, side)
            made[side] = side
    return columns, made


def _with_system(conversations: object, system: object) -> Sequence[Any]:
    """ShareGPT's messages, preceded by the system prompt if it has its own column."""
    messages = listed(conversations, "conversations")
    if system is None or not _text(system, "system").strip():
        return messages
    return [{"role": "system", "content": system}, *messages]


def _multiple_choice(question: object, choices: object, answer: object) -> tuple[str, str]:
    """The question with its lettered choices below, as the task `multiple_choice` poses it, and the letter of the answer, which is
    a letter or an index counted from 0."""
    texts = [_text(choice, "choices") for choice in listed(choices, "choices")]
    letters = ascii_uppercase[: len(texts)]
    letter = letters[answer] if isinstance(answer, int) and 0 <= answer < len(letters) else answer
    if not isinstance(letter, str) or len(letter) != 1 or letter not in letters:
        raise UserError(f"'answer' is {answer!r}, which is none of {len(texts)} choices: an index from 0, or a letter")
    lines = [f"{letter}. {text}" for letter, text in zip(letters, texts, strict=True)]
    return "\n".join([_text(question, "question"), "", *lines]), letter


def _text(value: object, column: str) -> str:
    """A column that becomes part of the prompt; without it, the question would be incomplete."""
    if not isinstance(value, str):
        raise UserError(f"{column!r} has to be a text, and is {value!r}")
    return value


def _dialogue(text: str, column: str) -> list[dict[str, str]]:
    """The messages of an hh-rlhf transcript."""
    _, *pieces = _TURN.split(text)
    roles = {"Human": "user", "Assistant": "assistant"}
    messages = [
        {"role": roles[who], "content": said.strip()} for who, said in zip(pieces[::2], pieces[1::2], strict=True)
    ]
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise UserError(f"{column!r} is a dialogue that does not end with the assistant")
    return messages
