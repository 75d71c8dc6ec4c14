"""Renders and parses conversations by a tokenizer's chat template."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from nmoe.errors import UserError
from nmoe.parsing import json_of
from nmoe.text.calls.families import FAMILIES, family_of
from nmoe.text.calls.family import Family, FamilyName, Turn
from nmoe.text.calls.pieces import TurnReader
from nmoe.text.calls.reader import Marks, TemplateReader, TextTurn
from nmoe.text.chat_template import ChatTemplate, ToolAnswer
from nmoe.text.conversation import (
    END_THINK,
    THINK,
    ChatMessage,
    FunctionCall,
    ToolDefinition,
    split_reasoning,
)
from nmoe.text.harmony import HarmonyTokenizer
from nmoe.text.renderers.base import Messages, ParsedAnswer, ReasoningEffort, Rendered, Round, Tools
from nmoe.text.streaming import decoder_of
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Given, Message, ToolCall, ToolEvent

Pieces = Sequence[tuple[list[int], int | None]]
"""A rendered conversation as pairs of ids and the index of the message that a model samples them for, None for ids that it
reads."""


_OPENING = 16
_END_OF_CALLS = "<|eom_id|>"


class ChatRenderer:
    """Renders and parses by the tokenizer's chat template, for models without Harmony. Calls have the form of the template's family
    (`nmoe.text.calls.families`), of Hermes and Qwen3 where it has none:

        <think>...</think>Let me see.<tool_call>{"name": "python", "arguments": {"code": "print(6 * 7)"}}</tool_call>

    In a well-formed answer reasoning comes first and is closed, and every turn ends by itself. Where the template's prompt opens
    the reasoning (Qwen3-Thinking, DeepSeek-R1), a turn closes it and opens none. The last turn has no call; its text after the
    reasoning, not blank, is the answer. A call inside the reasoning is only a thought.
    """

    name = "chat"

    def __init__(
        self,
        tokenizer: HarmonyTokenizer,
        tools: Sequence[ToolDefinition] = (),
        effort: ReasoningEffort | None = None,
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Prepares the tokenizer's chat template, which gets `effort` and `arguments`. Raises UserError as `ChatTemplate` does."""
        assert isinstance(tokenizer, Tokenizer), "only a tokenizer of Hugging Face files has a chat template"
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, tools, effort, arguments)
        self._tools = {tool.name: tool for tool in tools}
        self._family = family_of(tokenizer.chat_template or "", tokenizer.added_tokens)
        # Llama 3 ends a turn with calls in another token, which not every checkpoint names among the ends.
        own = [_END_OF_CALLS] if self._family.name == "llama3" and tokenizer.has_special(_END_OF_CALLS) else []
        ends = (*self._template.stop_ids, *map(tokenizer.special_id, own))
        self.stop_ids = tuple(dict.fromkeys(ends))
        self._marks = Marks(tokenizer, self._family, self.stop_ids)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        return self._template.prompt_ids(messages)

    def chat_ids(self, messages: Messages, tools: Tools = ()) -> list[int]:
        taken = [self._as_template_takes(message) for message in messages]
        if self._family.name == "mistral":
            _shorten_ids(taken)
        return self._template.chat_ids(taken, tools)

    def reader(self, prompt_ids: Sequence[int], tools: Tools = ()) -> TurnReader:
        # A prompt opens the reasoning at its end, in few tokens.
        opened = self._tokenizer.decode(prompt_ids[-_OPENING:]).rstrip().endswith(THINK)
        family = self._family if tools else None
        turn = TextTurn(family, {tool.name: tool for tool in tools}, self._marks.tags, opened=opened)
        return TemplateReader(decoder_of(self._tokenizer), self._marks, turn)

    def calls(self, turn: int, token_ids: Sequence[int]) -> list[ToolCall]:
        said, _ = self._read(token_ids)
        return [self._call(body, f"{turn}/{position}") for position, body in enumerate(said.calls)]

    def answer_calls(self, messages: Sequence[Message], rounds: Sequence[Sequence[ToolEvent]]) -> list[int]:
        answers = [[ToolAnswer(self._known(one), one.output, one.call.call_id) for one in events] for events in rounds]
        return self._template.continuation_ids(messages, answers)

    def follow_up(self, messages: Sequence[Message], rounds: Sequence[Round]) -> tuple[Given, list[int]]:
        """Continues the branch if the template does not rewrite earlier turns, else begins a new branch without their reasoning."""
        history = list(messages)
        for one in rounds:
            (token_ids,) = one.turns
            history += [Message("assistant", self._read(token_ids)[0].content), Message("user", one.user)]
        given = self._template.user_ids(history)
        return ("prompt", self.prompt_ids(history)) if given is None else ("user", given)

    def parse(self, turns: Sequence[Sequence[int]]) -> ParsedAnswer:
        *calling, (last, ended) = [self._read(token_ids) for token_ids in turns]
        parses = all(said.well_formed for said, _ in calling) and last.well_formed
        answered = bool(last.content) and not last.calls
        reasoned = any((said.reasoning or "").strip() for said, _ in (*calling, (last, ended)))
        # Without its end, a turn of a template has nothing that is sure to be a part of the form.
        structure = (parses + ended + answered) / 3 if ended else 0.0
        return ParsedAnswer(last.content if answered else "", parses and ended and answered, structure, reasoned)

    def transcript(self, token_ids: Sequence[int]) -> list[dict[str, str | None]]:
        said, _ = self._read(token_ids)
        messages: list[dict[str, str | None]] = [{"reasoning": said.reasoning, "content": said.content}]
        return messages + [{"call": self._marks.names(body)} for body in said.calls]

    def said(self, token_ids: Sequence[int]) -> tuple[str | None, str]:
        said, _ = self._read(token_ids)
        return said.reasoning, said.content

    @property
    def family(self) -> FamilyName:
        """The family whose form the calls have."""
        return self._family.name

    @property
    def default_system(self) -> str:
        return self._template.default_system

    @cached_property
    def has_reasoning(self) -> bool:
        """Whether the template supports reasoning: in a message's text, or as a separate field."""
        return self._template.opens_reasoning or self._reads_reasoning or self._template.names(END_THINK)

    def completion_ids(self, reasoning: str, answer: str) -> list[int]:
        if not reasoning and not self._template.opens_reasoning:
            return self._template.completion_ids(answer)
        opening = "" if self._template.opens_reasoning else f"{THINK}\n"
        return self._template.completion_ids(f"{opening}{reasoning}\n{END_THINK}\n\n{answer}")

    def supervise(self, messages: Messages, tools: Tools = (), first: int = 0) -> list[Rendered]:
        taken = [self._as_template_takes(message) for message in messages]
        learned = {
            index
            for index, message in enumerate(messages)
            if message.role == "assistant" and message.trained and index >= first
        }
        pieces = self._template.conversation(taken, tools)
        for index, message in enumerate(messages):
            # Without the call, the policy would learn to say nothing.
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
            elif not there and (sampled := self._sampled(messages, taken, index, tools)) is not None:
                alone.append(_joined([(sampled[0], None), (sampled[1], index)], {index}))
                learned.remove(index)
            elif not there:
                raise UserError(
                    f"messages[{index}] is the assistant's, and the chat template does not open its turn there as it does when the "
                    "turn is asked for; leave the message out, or give it weight 0"
                )
        whole = _joined(pieces, learned)
        return [*alone, whole] if whole.learned else alone

    def _known(self, event: ToolEvent) -> str:
        # Another name, written by the policy as it liked, could hold control tokens: templates write names as they are.
        return event.call.name if event.call.name in self._tools else "unknown"

    def _read(self, token_ids: Sequence[int]) -> tuple[ChatTurn, bool]:
        """Parses a turn; returns it, and whether it ended by itself, with a token that ends turns. A turn with a control token
        inside is not well-formed."""
        ended = bool(token_ids) and token_ids[-1] in self.stop_ids
        body = token_ids[:-1] if ended else token_ids
        text = self._marks.spelled(body, self._tokenizer)
        said = read_turn(text, self._template.opens_reasoning, self._family, self._tools, self._marks.tags)
        is_text = self._own_controls.isdisjoint(body) and all(0 <= one < self._tokenizer.vocab_size for one in body)
        return replace(said, well_formed=said.well_formed and is_text), ended

    def _call(self, body: str, call_id: str) -> ToolCall:
        """Parses a tool call from its text; a malformed one has an empty name and the reason."""
        call = self._family.call(body, Turn(self._tools, self._marks.tags))
        if call.fault:
            return ToolCall("", self._marks.names(body).strip(), call_id, call.fault)
        return ToolCall(call.name, call.text, call_id)

    @cached_property
    def _own_controls(self) -> frozenset[int]:
        """The ids of the tokens that a well-formed turn does not contain."""
        return self._template.control_ids - {self._tokenizer.added_tokens[tag] for tag in self._marks.tags}

    @cached_property
    def _reads_reasoning(self) -> bool:
        """Whether the template writes a message's field `reasoning_content`."""
        probe = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "!", "reasoning_content": "because"},
        ]
        return "because" in self._template.text(probe)

    @cached_property
    def _wants_text(self) -> bool:
        """Whether the template writes calls only in messages whose content is None, with arguments as JSON text, as an API gives
        them (DeepSeek-V3). Most templates write calls after an empty content, and take an object."""
        return not self._writes_calls(as_text=False) and self._writes_calls(as_text=True)

    def _writes_calls(self, as_text: bool) -> bool:
        call = _as_function_call(FunctionCall("square", {"side": "length"}), as_text)
        calling = {"role": "assistant", "content": None if as_text else "", "tool_calls": [call]}
        try:
            return "length" in self._template.text([{"role": "user", "content": "?"}, calling])
        except UserError:
            return False

    def _says(self, message: ChatMessage, pieces: Pieces, index: int) -> bool:
        """Returns whether the pieces contain the message as a turn, with its reasoning if it has any."""
        reasoning = (split_reasoning(message)[0] or "").strip()
        return _is_piece(pieces, index) and (not reasoning or reasoning in self._text(pieces, index))

    def _sampled(
        self, messages: Messages, taken: Sequence[dict[str, Any]], index: int, tools: Tools
    ) -> tuple[list[int], list[int]] | None:
        """Returns prompt and turn for a message that the template never writes in the form in which a model samples it (see
        `ChatTemplate.sampled`); None if a model cannot sample it at all."""
        if index == 0:
            return None
        reasoning = split_reasoning(messages[index])[0] or ""
        sampled = self._template.sampled(taken[: index + 1], reasoning, tools)
        called = "" if sampled is None else self._tokenizer.decode(sampled[1])
        return None if any(call.name not in called for call in messages[index].calls) else sampled

    def _text(self, pieces: Pieces, index: int) -> str:
        """Decodes the pieces of one message's turn."""
        return self._tokenizer.decode([token_id for piece, of in pieces if of == index for token_id in piece])

    def _as_template_takes(self, message: ChatMessage) -> dict[str, Any]:
        content, reasoning = message.content, message.reasoning
        taken: dict[str, Any] = {"role": message.role, "content": content}
        if reasoning is not None and self._reads_reasoning:
            taken["reasoning_content"] = reasoning
        elif reasoning is not None:
            taken["content"] = f"{THINK}\n{reasoning}\n{END_THINK}\n\n{content}"
        if message.calls:
            taken["tool_calls"] = [_as_function_call(call, self._wants_text) for call in message.calls]
            if self._wants_text and not taken["content"]:
                taken["content"] = None
        for key, value in (("name", message.name), ("tool_call_id", message.call_id)):
            if value is not None:
                taken[key] = value
        return taken


def _shorten_ids(messages: Sequence[dict[str, Any]]) -> None:
    """Replaces the ids of calls by ids of nine letters and digits, which alone Mistral's templates take."""

    def short(call_id: str) -> str:
        return call_id if re.fullmatch("[a-zA-Z0-9]{9}", call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]

    for message in messages:
        for one in [message, *message.get("tool_calls", ())]:
            for key in ("id", "tool_call_id"):
                if key in one:
                    one[key] = short(one[key])


def _is_piece(pieces: Pieces, index: int) -> bool:
    return any(of == index for _, of in pieces)


def _joined(pieces: Pieces, learned: set[int]) -> Rendered:
    sequence = Rendered()
    for ids, index in pieces:
        sequence.learn(ids, index in learned)
    return sequence


def _as_function_call(call: FunctionCall, as_text: bool) -> dict[str, Any]:
    """Returns the call as templates take it, with arguments as an object, because most templates write them as JSON, or
    `as_text`."""
    arguments = call.arguments
    if as_text:
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    elif isinstance(arguments, str):
        try:
            parsed = json_of(arguments)
        except ValueError:
            parsed = None
        arguments = parsed if isinstance(parsed, Mapping) else arguments
    taken: dict[str, Any] = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    return taken if call.call_id is None else {"id": call.call_id} | taken


@dataclass(frozen=True)
class ChatTurn:
    """A turn that the policy sampled, parsed as text: the reasoning between the think tags, the remaining content, and the text of
    each call.

    `well_formed` says whether the think tags open and close at most once, before everything else. A call without a closing tag runs
    to the end. Inside the strings of a call, tags are text.
    """

    reasoning: str | None
    content: str
    calls: tuple[str, ...]
    well_formed: bool


_THOUGHT = re.compile(f"{THINK}|{END_THINK}")


def read_turn(
    text: str,
    opened: bool = False,
    family: Family = FAMILIES["hermes"],
    tools: Mapping[str, ToolDefinition] = MappingProxyType({}),
    marks: Mapping[str, str] = MappingProxyType({}),
) -> ChatTurn:
    """Parses a turn with the calls of a family; never raises. `opened` says that the prompt has opened the reasoning.

    Where tags do not pair up, the content is the text after the last </think>, or empty where <think> is never closed.
    """
    begins = text.lstrip().startswith(THINK)
    well_formed = not (opened and begins)
    reasoning: str | None = None
    if opened or begins:
        head = text.lstrip().removeprefix(THINK) if begins else text
        reasoning, closed, rest = head.partition(END_THINK)
        if not closed:
            return ChatTurn(reasoning, "", (), False)
        well_formed = well_formed and THINK not in reasoning
    else:
        rest = text
    content, calls, strays = _split_calls(rest, family, tools, marks)
    if closings := [position for tag, position in strays if tag == END_THINK]:
        well_formed = False
        thought, rest = rest[: closings[-1]], rest[closings[-1] + len(END_THINK) :]
        reasoning = thought if reasoning is None else f"{reasoning}{END_THINK}{thought}"
        content, calls, strays = _split_calls(rest, family, tools, marks)
    if strays:
        well_formed = False
        if reasoning is None:
            return ChatTurn(rest[strays[0][1] + len(THINK) :], "", (), False)
    return ChatTurn(reasoning, content.strip(), calls, well_formed)


def _split_calls(
    text: str, family: Family, tools: Mapping[str, ToolDefinition], marks: Mapping[str, str]
) -> tuple[str, tuple[str, ...], list[tuple[str, int]]]:
    """Splits text into the text outside calls, the bodies of the calls, and the think tags outside calls with their positions."""
    reader = TextTurn(family, tools, marks, tags=False)
    reader.read(text)
    outside = reader.turn.outside
    strays = [(match[0], start + match.start()) for start, part in outside for match in _THOUGHT.finditer(part)]
    return "".join(part for _, part in outside), tuple(reader.turn.bodies), strays
