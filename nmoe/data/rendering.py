"""Records as tokens and what is learned of them: the assistant's turns, each with the token that ends it.

By Harmony, by the tokenizer's chat template, or as plain text. A conversation becomes one sequence wherever the form lets it.
What a turn shows only while it is the last (its reasoning, which later turns do not see) is learned in a sequence of its own,
that ends with the turn: every learned token is predicted from what a policy would have before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

from nmoe.data.messages import ChatMessage, ToolCall
from nmoe.data.records import Conversation, Messages, PromptCompletion, Record, Text, Tools
from nmoe.errors import UserError
from nmoe.text.chat import END_THINK, THINK, ChatTemplate
from nmoe.text.harmony import Harmony, HarmonyTokenizer
from nmoe.text.harmony_format import END, END_OF_TEXT, RETURN
from nmoe.text.harmony_tools import NAMESPACE, declare_tools
from nmoe.text.natural_format import natural_format
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message

IGNORED = -100
"""The label of a token that is not learned, as in transformers."""

Pieces = Sequence[tuple[list[int], int | None]]
"""Ids, and the index of the message that samples them, None for what is read."""

RenderFormat = Literal["auto", "harmony", "chat", "text"]


@dataclass
class Rendered:
    """One sequence: `Rendered([5, 6, 7, 2], [-100, -100, 7, 2])` learns 7 and 2.

    A label is the token to predict at its place. It is the token that stands there, except where a turn's stop token becomes
    another in the history: a final message ends in <|return|> when it is sampled, and in <|end|> when more follows.
    """

    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)

    def read(self, ids: Sequence[int]) -> None:
        """Goes on with what is not learned."""
        self.ids += ids
        self.labels += [IGNORED] * len(ids)

    def learn(self, ids: Sequence[int], learned: bool = True) -> None:
        self.ids += ids
        self.labels += ids if learned else [IGNORED] * len(ids)

    @property
    def learned(self) -> int:
        """How many tokens are learned."""
        return sum(label != IGNORED for label in self.labels)

    def copy(self) -> Rendered:
        return Rendered(list(self.ids), list(self.labels))


class Renderer(Protocol):
    """One of the three forms. `name` is that of the configuration."""

    name: str

    def conversation(self, messages: Messages, tools: Tools = (), first: int = 0) -> list[Rendered]:
        """The conversation as sequences that learn the assistant's messages from index `first` on, but for those of weight 0.
        Raises UserError, without the record's place, where the form has no way to say it."""


def make_renderer(tokenizer: Tokenizer, form: RenderFormat = "auto") -> Renderer:
    """The form asked for, or the one that the tokenizer is made for: Harmony where it has the control tokens, then its chat
    template. Raises UserError where it has neither."""
    if form == "auto":
        natural = natural_format(tokenizer)
        if natural is None:
            raise UserError(
                'the tokenizer has neither Harmony\'s control tokens nor a chat template; use another one, or format = "text", '
                "which puts completions behind prompts as they are"
            )
        form = natural
    forms: dict[str, type[HarmonyRenderer] | type[ChatRenderer] | type[TextRenderer]]
    forms = {"harmony": HarmonyRenderer, "chat": ChatRenderer, "text": TextRenderer}
    return forms[form](tokenizer)


def render(record: Record, renderer: Renderer, tokenizer: Tokenizer) -> list[Rendered]:
    """The sequences that a text, conversation or completion is learned by. Raises UserError, with the record's place."""
    try:
        match record:
            case Text():
                sequence = Rendered()
                sequence.learn([*tokenizer.encode(record.text), end_of_text(tokenizer)])
                return [sequence]
            case Conversation():
                return renderer.conversation(record.messages, record.tools)
            case PromptCompletion():
                messages = (*record.prompt, *record.completion)
                return renderer.conversation(messages, record.tools, len(record.prompt))
    except UserError as error:
        raise UserError(f"{record.where}: {error}") from None
    raise AssertionError(f"a {type(record).__name__} is not learned as it stands")


def end_of_text(tokenizer: Tokenizer) -> int:
    """The token that ends a text which is no conversation."""
    if tokenizer.has_special(END_OF_TEXT):
        return tokenizer.special_id(END_OF_TEXT)
    end = tokenizer.named_tokens.get("eos_token")
    if end is None:
        raise UserError(f"the tokenizer has neither {END_OF_TEXT} nor an eos_token to end a text with")
    return tokenizer.special_id(end)


class TextRenderer:
    """No form at all: the completion's text behind the prompt's, then the end of the text."""

    name = "text"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._end = end_of_text(tokenizer)

    def conversation(self, messages: Messages, tools: Tools = (), first: int = 0) -> list[Rendered]:
        asked, said = messages[0], messages[-1]
        if [message.role for message in messages] != ["user", "assistant"] or tools or said.calls or said.reasoning:
            raise UserError('format = "text" is for one prompt and one completion; conversations need harmony or chat')
        sequence = Rendered()
        sequence.read(self._tokenizer.encode(asked.content))
        sequence.learn([*self._tokenizer.encode(said.content), self._end], said.trained)
        return [sequence]


class ChatRenderer:
    """The tokenizer's chat template (`nmoe.text.chat`)."""

    name = "chat"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)

    def conversation(self, messages: Messages, tools: Tools = (), first: int = 0) -> list[Rendered]:
        taken = [self._as_template_takes(message) for message in messages]
        learned = {
            index
            for index, message in enumerate(messages)
            if message.role == "assistant" and message.trained and index >= first
        }
        pieces = self._template.conversation(taken, tools)
        for index, message in enumerate(messages):
            # Without the call, what is learned is to say nothing.
            if _is_piece(pieces, index) and any(call.name not in self._text(pieces, index) for call in message.calls):
                raise UserError(
                    f"messages[{index}] calls tools, and the chat template does not write it; use a template that does, or "
                    "leave the record out"
                )
        alone: list[Rendered] = []
        for index in sorted(learned):
            if self._says(messages[index], pieces, index):
                continue
            # What the template writes like this only while the turn is the last is learned while it is.
            until = self._template.conversation(taken[: index + 1], tools)
            there = _is_piece(pieces, index)
            if self._says(messages[index], until, index) or (not there and _is_piece(until, index)):
                alone.append(_joined(until, {index}))
                learned.remove(index)
            elif not there:
                raise UserError(
                    f"messages[{index}] is the assistant's, and the chat template does not open its turn there as it does when the "
                    "turn is asked for; leave the message out, or give it weight 0"
                )
        whole = _joined(pieces, learned)
        return [*alone, whole] if whole.learned else alone

    @cached_property
    def _reads_reasoning(self) -> bool:
        """Whether the template writes reasoning that has a field of its own."""
        probe = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "!", "reasoning_content": "because"},
        ]
        ids = [token_id for piece, _ in self._template.conversation(probe) for token_id in piece]
        return "because" in self._tokenizer.decode(ids)

    def _says(self, message: ChatMessage, pieces: Pieces, index: int) -> bool:
        """Whether the message is a turn among the pieces, with its reasoning where it has some."""
        reasoning = (split_reasoning(message)[0] or "").strip()
        return _is_piece(pieces, index) and (not reasoning or reasoning in self._text(pieces, index))

    def _text(self, pieces: Pieces, index: int) -> str:
        """What a message's turn says among the pieces."""
        return self._tokenizer.decode([token_id for piece, of in pieces if of == index for token_id in piece])

    def _as_template_takes(self, message: ChatMessage) -> dict[str, Any]:
        content, reasoning = message.content, message.reasoning
        taken: dict[str, Any] = {"role": message.role, "content": content}
        if reasoning is not None and self._reads_reasoning:
            taken["reasoning_content"] = reasoning
        elif reasoning is not None:
            taken["content"] = f"{THINK}\n{reasoning}\n{END_THINK}\n\n{content}"
        if message.calls:
            taken["tool_calls"] = [_as_function_call(call) for call in message.calls]
        for key, value in (("name", message.name), ("tool_call_id", message.call_id)):
            if value is not None:
                taken[key] = value
        return taken


class HarmonyRenderer:
    """Harmony: reasoning on `analysis`, calls on `commentary`, the answer on `final`, unless the data names the channels."""

    name = "harmony"

    def __init__(self, tokenizer: HarmonyTokenizer) -> None:
        self._harmony = Harmony(tokenizer)
        self._return, self._end = (tokenizer.special_id(token) for token in (RETURN, END))
        self._start = len(self._harmony.render_prompt([]))

    def conversation(self, messages: Messages, tools: Tools = (), first: int = 0) -> list[Rendered]:
        parts = _turns(_in_sequence(messages), first)
        sequence, alone = Rendered(), list[Rendered]()
        for number, part in enumerate(parts):
            if isinstance(part, _Turn):
                if number == len(parts) - 1:
                    self._append(sequence, part)
                    continue
                if part.hides_analysis:
                    if part.learned:
                        branch = sequence.copy()
                        self._append(branch, part)
                        alone.append(branch)
                    sequence.read(self._harmony.render(part.history()))
                else:
                    self._append(sequence, part)
                    if sequence.ids[-1] == self._return:
                        sequence.ids[-1] = self._end
            else:
                sequence.read(self._harmony.render(declare_tools(part, tools) if number == 0 else part))
        return [*alone, sequence] if sequence.learned else alone

    def _append(self, sequence: Rendered, turn: _Turn) -> None:
        """The turn as a policy samples it, between the answers of its tools."""
        for sampled, answers in turn.rounds:
            sequence.read(self._harmony.render_prompt([]))
            said = [message for message, _ in sampled]
            if not said[-1].is_call and said[-1].channel != "final":
                raise UserError(
                    f"the assistant's turn ends on the channel {said[-1].channel!r}, with neither answer nor call"
                )
            ids = self._harmony.render_completion(said)
            if len({learned for _, learned in sampled}) == 1:
                sequence.learn(ids, sampled[0][1])
            else:
                # Where in it each message ends: the first one's start is in the prompt already.
                ends = [len(self._harmony.render(said[: number + 1])) - self._start for number in range(len(said))]
                for start, end, (_, learned) in zip([0, *ends[:-1]], ends, sampled, strict=True):
                    sequence.learn(ids[start:end], learned)
            sequence.read(self._harmony.render(answers))


@dataclass
class _Turn:
    """What the assistant says between two messages of others: rounds of messages, each with whether it is learned, and the answers
    of the tools that they called."""

    rounds: list[tuple[list[tuple[Message, bool]], list[Message]]] = field(default_factory=list)

    @property
    def _messages(self) -> Iterator[Message]:
        for sampled, answers in self.rounds:
            yield from (*(message for message, _ in sampled), *answers)

    @property
    def learned(self) -> bool:
        return any(learned for sampled, _ in self.rounds for _, learned in sampled)

    @property
    def hides_analysis(self) -> bool:
        channels = {message.channel for message in self._messages}
        return {"analysis", "final"} <= channels

    def history(self) -> list[Message]:
        """The turn as later ones see it: without its analysis."""
        return [message for message in self._messages if message.channel != "analysis"]


def _turns(messages: Iterable[tuple[int, ChatMessage]], first: int) -> list[_Turn | list[Message]]:
    """The conversation, its turns and what lies between; a turn is there once the assistant has spoken."""
    parts: list[_Turn | list[Message]] = [[]]
    names: dict[str, str] = {}
    pending: list[str] = []
    for index, message in messages:
        last = parts[-1]
        if message.role == "assistant":
            if not isinstance(last, _Turn):
                last = _Turn()
                parts.append(last)
            if not last.rounds or last.rounds[-1][1]:
                last.rounds.append(([], []))
            for call in message.calls:
                names[call.call_id or ""] = call.name
                pending.append(call.name)
            learned = message.trained and index >= first
            last.rounds[-1][0].extend((one, learned) for one in _spoken(message))
        elif message.role == "tool":
            if not isinstance(last, _Turn) or not last.rounds[-1][0][-1][0].is_call:
                raise UserError("a tool answers where the assistant has called none")
            name = message.name or names.get(message.call_id or "") or (pending[-1] if pending else None)
            if name is None:
                raise UserError("a tool's answer has neither a `name` nor the `tool_call_id` of a call before it")
            full = name if "." in name else f"{NAMESPACE}.{name}"
            last.rounds[-1][1].append(Message("tool", message.content, "commentary", "assistant", full))
        else:
            if isinstance(last, _Turn):
                last = []
                parts.append(last)
            last.append(Message(message.role, message.content, name=message.name))
    if not isinstance(parts[-1], _Turn):
        parts.pop()  # nobody answers it
    return parts


def _in_sequence(messages: Messages) -> Iterator[tuple[int, ChatMessage]]:
    """The messages with their indices, where each call is followed by its answer: Harmony calls one tool at a time, and what others
    call at once it calls one after the other."""
    index = 0
    while index < len(messages):
        message = messages[index]
        if len(message.calls) < 2:
            yield index, message
            index += 1
            continue
        answers = list(messages[index + 1 : index + 1 + len(message.calls)])
        if [answer.role for answer in answers] != ["tool"] * len(message.calls):
            raise UserError(
                f"messages[{index}] calls {len(message.calls)} tools at once, which Harmony does one after the other, and not "
                "all of their answers follow"
            )
        for number, call in enumerate(message.calls):
            said = ChatMessage("assistant", "", calls=(call,), trained=message.trained)
            if number == 0:
                said = ChatMessage(
                    "assistant",
                    message.content,
                    message.reasoning,
                    (call,),
                    channel=message.channel,
                    trained=message.trained,
                )
            yield index, said
            matching = [answer for answer in answers if answer.call_id is not None and answer.call_id == call.call_id]
            yield index, (matching or answers)[0]
            answers.remove((matching or answers)[0])
        index += 1 + len(message.calls)


def _spoken(message: ChatMessage) -> Iterator[Message]:
    reasoning, content = split_reasoning(message)
    if message.channel is not None and not message.calls:
        if message.reasoning and message.reasoning.strip():
            yield Message("assistant", message.reasoning.strip("\n"), "analysis")
        yield Message("assistant", message.content, message.channel)
        return
    if reasoning is not None and reasoning.strip():
        yield Message("assistant", reasoning.strip("\n"), "analysis")
    if content.strip():
        # What is said before a call is no answer yet.
        yield Message("assistant", content, "commentary" if message.calls else "final")
    for call in message.calls:
        arguments = call.arguments
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        yield Message("assistant", text, "commentary", f"{NAMESPACE}.{call.name}", content_type="json")


def split_reasoning(message: ChatMessage) -> tuple[str | None, str]:
    """Reasoning and the rest of the content: from a field of its own, or from between the tags at the content's start."""
    if message.reasoning is not None or message.role != "assistant":
        return message.reasoning, message.content
    head, closed, rest = message.content.partition(END_THINK)
    if not closed or not head.lstrip().startswith(THINK):
        return None, message.content
    return head.lstrip().removeprefix(THINK), rest.lstrip("\n")


def _is_piece(pieces: Pieces, index: int) -> bool:
    return any(of == index for _, of in pieces)


def _joined(pieces: Pieces, learned: set[int]) -> Rendered:
    sequence = Rendered()
    for ids, index in pieces:
        sequence.learn(ids, index in learned)
    return sequence


def _as_function_call(call: ToolCall) -> dict[str, Any]:
    """Templates write arguments as JSON, so that those which come as JSON already would be written twice over."""
    arguments = call.arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, Mapping) else arguments
    taken: dict[str, Any] = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    return taken if call.call_id is None else {"id": call.call_id} | taken
