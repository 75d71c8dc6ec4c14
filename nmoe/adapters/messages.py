"""A conversation format whose text is the messages of chat APIs, for policies that another trainer samples.

A message that the policy reads is one JSON object between two control tokens. A turn of the policy is its text as it is:
reasoning between think tags, calls between <tool_call> tags, the rest its answer. Such a trainer renders the messages by its own
chat template, so that token ids here mean nothing but bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import takewhile
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from nmoe.errors import UserError
from nmoe.text.conversation import CALL, END_CALL, END_THINK, THINK, ToolDefinition
from nmoe.text.tokenizer import Tokenizer

Said = str | Mapping[str, Any]
"""A turn of the policy: its text, or an assistant's message of a chat API."""

_TAGS = re.compile(f"{THINK}|{END_THINK}")
_READ, _TURN, _END = "<|read|>", "<|turn|>", "<|end_of_turn|>"
_TEMPLATE = (
    "{% if tools %}" + _READ + '{{ {"tools": tools} | tojson }}' + _END + "{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}" + _TURN + "{{ m.content }}" + _END
    + "{% else %}" + _READ + "{{ m | tojson }}" + _END + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}" + _TURN + "{% endif %}"
)  # fmt: skip


@cache
def message_tokenizer() -> Tokenizer:
    """Returns the tokenizer of the format: a token for each byte, and the control tokens around messages."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    controls = (_READ, _TURN, _END, "<|endoftext|>")
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in controls])
    config = {"eos_token": _END, "chat_template": _TEMPLATE}
    return Tokenizer(backend, {"tokenizer_config.json": json.dumps(config)}, "the format of messages")


def turn_ids(text: str, ended: bool) -> list[int]:
    """Returns a turn of the policy as tokens of the format. `ended` says that it ended by itself."""
    tokenizer = message_tokenizer()
    return [*tokenizer.encode(text), *([tokenizer.special_id(_END)] if ended else [])]


def text_with_reasoning(said: Said, opened: bool | None) -> str:
    """Returns the text of a turn with the think tag that its prompt may have opened: templates of reasoning models end there, so
    that the policy only closes it. A server that took the reasoning out of the message has read both tags.

    `opened` says whether the prompt opened it; None if it is unknown. Raises UserError for a turn which then leaves it open
    whether its beginning is reasoning, and as `text_of` does.
    """
    text = text_of(said)
    if opened:
        apart = not isinstance(said, str) and _reasoning(said)
        return text if apart else THINK + text
    first = _TAGS.search(text.partition(CALL)[0])
    if opened is None and first is not None and first[0] == END_THINK:
        raise UserError(
            f"the turn {text!r:.80} closes reasoning that it has not opened: say by `opens_reasoning` whether the chat template "
            f"ends every prompt in {THINK}, so that what stands before {END_THINK} is reasoning (true), or not (false)"
        )
    return text


def _reasoning(said: Mapping[str, Any]) -> Any:
    return said.get("reasoning_content") or said.get("reasoning")


def text_of(said: Said) -> str:
    """Returns the text of a turn. Reasoning and calls that a server took out of a message's content stand in tags again.

    Raises UserError for other values than an assistant's message.
    """
    if isinstance(said, str):
        return said
    content: Any = said.get("content") or ""
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "".join(part["text"] for part in content if part.get("type") == "text")
    if said.get("role", "assistant") != "assistant" or not isinstance(content, str):
        raise UserError(f"{said!r:.200} is no assistant's message with a text")
    thought = _reasoning(said)
    opening = f"{THINK}\n{thought}\n{END_THINK}\n\n" if thought else ""
    return opening + "\n".join([*([content] if content else []), *map(_call, said.get("tool_calls") or ())])


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    name, arguments = function["name"], function["arguments"]
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{CALL}\n{{"name": {json.dumps(name)}, "arguments": {written}}}\n{END_CALL}'


def asked_last(prompt_ids: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the messages of a prompt that follow the policy's last turn."""
    tokenizer = message_tokenizer()
    read, turn = tokenizer.special_id(_READ), tokenizer.special_id(_TURN)
    pieces: list[tuple[bool, list[int]]] = []
    for id_ in prompt_ids[:-1]:  # the last one opens the policy's next turn
        if id_ in (read, turn):
            pieces.append((id_ == read, []))
        else:
            pieces[-1][1].append(id_)
    last = list(takewhile(lambda piece: piece[0], reversed(pieces)))
    messages = [json.loads(tokenizer.decode(ids[:-1])) for _, ids in reversed(last)]
    return [message for message in messages if "role" in message]


def as_users(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Returns messages by the user alone, as Qwen's templates write the answers of tools: not every template knows their role."""
    answers = [one["content"] for one in messages if one["role"] == "tool"]
    if not answers:
        return [{"role": one["role"], "content": one["content"]} for one in messages]
    return [{"role": "user", "content": "\n".join(f"<tool_response>\n{one}\n</tool_response>" for one in answers)}]


def tools_in_words(tools: Sequence[ToolDefinition]) -> str:
    """Returns the paragraph by which Hermes and Qwen declare tools, for trainers whose chat template is not given any."""
    declared = "\n".join(json.dumps(tool.as_function()) for tool in tools)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function "
        f"signatures within <tools></tools> XML tags:\n<tools>\n{declared}\n</tools>\n\nFor each function call, return a json "
        f"object with function name and arguments within {CALL}{END_CALL} XML tags:\n{CALL}\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n' + END_CALL
    )
