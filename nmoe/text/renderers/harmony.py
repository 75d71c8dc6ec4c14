"""Renders and parses Harmony conversations: prompts, the assistant's turns, and training sequences."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from nmoe.errors import UserError
from nmoe.parsing import MOST_NESTED, is_deep
from nmoe.text.calls.harmony import NAMESPACE, HarmonyReader, called
from nmoe.text.calls.pieces import TurnReader
from nmoe.text.conversation import ChatMessage, ToolDefinition, split_reasoning
from nmoe.text.harmony import END, RETURN, Harmony, HarmonyTokenizer
from nmoe.text.harmony_distance import HarmonyDistance, share_of_form
from nmoe.text.renderers.base import Messages, ParsedAnswer, ReasoningEffort, Rendered, Round, Tools, turn_ends
from nmoe.types import Given, Message, ToolCall, ToolEvent


class HarmonyRenderer:
    """Renders and parses the Harmony format. An answer is well-formed if every turn parses, the last one ends in <|return|>, and
    its last final message is not blank. Reasoning is an analysis message, not blank, before that final message, in any turn. An
    answer that is not well-formed gets partial credit (`nmoe.text.harmony_distance`).

    In a dataset's conversation, reasoning goes to the channel `analysis`, calls to `commentary` and answers to `final`, unless the
    data names the channels.
    """

    name = "harmony"
    has_reasoning = True
    default_system = ""

    def __init__(
        self,
        tokenizer: HarmonyTokenizer,
        tools: Sequence[ToolDefinition] = (),
        effort: ReasoningEffort | None = None,
    ) -> None:
        """Prepares the format for a tokenizer, and the declaration of the tools. `effort` is written into the system message of
        prompts, in the words that the gpt-oss models were trained with. Raises UserError if the tokenizer lacks a control token of
        Harmony's."""
        self._harmony = Harmony(tokenizer)
        self._distance = HarmonyDistance(self._harmony)
        self._tools = tools
        self._effort = effort
        self._names = {tool.name for tool in tools}
        self.stop_ids = turn_ends(self._harmony.stop_ids, tokenizer)
        self._return, self._end = (tokenizer.special_id(token) for token in (RETURN, END))
        self._start = len(self._harmony.render_prompt([]))

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        if self._effort is not None:
            messages = ask_for_effort(messages, self._effort, bool(self._tools))
        return self._harmony.render_prompt(declare_tools(messages, self._tools))

    def chat_ids(self, messages: Messages, tools: Tools = ()) -> list[int]:
        """Renders a chat's conversation and the start of the next turn. Reasoning before the last final message is left out, as
        Harmony has it."""
        parts = _turns(_in_sequence(messages), 0)
        finals = [index for index, part in enumerate(parts) if isinstance(part, _Turn) and part.has_final]
        said = list[Message]()
        for index, part in enumerate(parts):
            if isinstance(part, _Turn):
                said += part.history() if finals and index <= finals[-1] else part.messages
            else:
                said += part
        if self._effort is not None:
            said = ask_for_effort(said, self._effort, bool(tools))
        return self._harmony.render_prompt(declare_tools(said, tools))

    def reader(self, prompt_ids: Sequence[int], tools: Tools = ()) -> TurnReader:
        return HarmonyReader(self._harmony)

    def calls(self, turn: int, token_ids: Sequence[int]) -> list[ToolCall]:
        completion = self._harmony.parse_completion(token_ids)
        if completion.end != "call":
            return []
        message = completion.messages[-1]
        assert message.recipient is not None, "a call has a recipient"
        return [ToolCall(called(message.recipient), message.content, f"{turn}/0")]

    def answer_calls(self, messages: Sequence[Message], rounds: Sequence[Sequence[ToolEvent]]) -> list[int]:
        (event,) = rounds[-1]
        return self._harmony.render_prompt([self._answer(event)])

    def follow_up(self, messages: Sequence[Message], rounds: Sequence[Round]) -> tuple[Given, list[int]]:
        """Begins a new branch, without earlier reasoning, and with <|end|> after the previous answer. Calls and their answers
        stay."""
        history = list(messages)
        for one in rounds:
            for token_ids, events in zip(one.turns, one.answers, strict=True):
                said = self._harmony.parse_completion(token_ids).messages
                # A call may stand on the analysis channel; without it, its answer would answer nothing.
                history += [message for message in said if message.channel != "analysis" or message.is_call]
                history += [self._answer(event) for event in events]
            history.append(Message("user", one.user))
        return "prompt", self.prompt_ids(history)

    def parse(self, turns: Sequence[Sequence[int]]) -> ParsedAnswer:
        *calls, completion = [self._harmony.parse_completion(token_ids) for token_ids in turns]
        parses_before = all(call.end == "call" for call in calls)
        parses = parses_before and completion.error is None
        answered = bool((completion.final or "").strip())
        finals = [index for index, message in enumerate(completion.messages) if message.channel == "final"]
        thoughts = completion.messages[: finals[-1]] if finals else ()
        thoughts = (*(message for call in calls for message in call.messages), *thoughts)
        reasoned = any(message.channel == "analysis" and message.content.strip() for message in thoughts)
        well_formed = parses and completion.end == "return" and answered
        structure = 1.0 if well_formed else self._near_miss(turns[-1]) if parses_before else 0.0
        return ParsedAnswer(completion.final or "", well_formed, structure, reasoned)

    def transcript(self, token_ids: Sequence[int]) -> list[dict[str, str | None]]:
        completion = self._harmony.parse_completion(token_ids)
        return [*map(asdict, completion.messages), {"end": completion.end, "error": completion.error}]

    def said(self, token_ids: Sequence[int]) -> tuple[str | None, str]:
        completion = self._harmony.parse_completion(token_ids)
        return completion.analysis, completion.final or ""

    def completion_ids(self, reasoning: str, answer: str) -> list[int]:
        thought = [Message("assistant", reasoning, channel="analysis")] if reasoning else []
        return self._harmony.render_completion([*thought, Message("assistant", answer, channel="final")])

    def spelled(self, text: str) -> list[int]:
        """Encodes a text in which names of control tokens become these tokens; never for text from elsewhere."""
        return self._harmony.spelled(text)

    def supervise(self, messages: Messages, tools: Tools = (), first: int = 0) -> list[Rendered]:
        parts = _turns(_in_sequence(messages), first)
        if not isinstance(parts[-1], _Turn):
            parts.pop()  # it has no answer
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

    def _near_miss(self, token_ids: Sequence[int]) -> float:
        """Returns the partial credit for a malformed last turn: the fraction of the Harmony format that it gets right, always below
        1."""
        # A name in another spelling of tokens, or text that is blank only as a whole, is out of form at no distance.
        return share_of_form(self._distance(token_ids) or 1.0)

    def _answer(self, event: ToolEvent) -> Message:
        # Another name, written by the policy as it liked, could read as a role.
        name = event.call.name if event.call.name in self._names else "unknown"
        return Message("tool", event.output, "commentary", recipient="assistant", name=f"{NAMESPACE}.{name}")

    def _append(self, sequence: Rendered, turn: _Turn) -> None:
        """Appends a turn to a training sequence in the form in which a policy samples it, with the tools' answers in between.
        Raises UserError for a turn that ends with neither an answer nor a call."""
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


def ask_for_effort(messages: Sequence[Message], effort: ReasoningEffort, tools: bool) -> list[Message]:
    """Returns the messages with the reasoning effort and the valid channels in the first system message, which is added to a
    conversation without one.

    The wording follows openai-harmony's SystemContent, whose `model_identity` is the system message's own text.
    """
    channels = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
    if tools:
        channels += f"\nCalls to these tools must go to the commentary channel: '{NAMESPACE}'."
    own = [messages[0].content] if messages and messages[0].role == "system" else []
    system = Message("system", "\n\n".join([*own, f"Reasoning: {effort}", channels]))
    return [system, *messages[len(own) :]]


@dataclass
class _Turn:
    """The assistant's messages between two messages of others, as rounds: messages, each with whether it is learned, and the
    answers of the tools that they call."""

    rounds: list[tuple[list[tuple[Message, bool]], list[Message]]] = field(default_factory=list)

    @property
    def messages(self) -> Iterator[Message]:
        for sampled, answers in self.rounds:
            yield from (*(message for message, _ in sampled), *answers)

    @property
    def learned(self) -> bool:
        return any(learned for sampled, _ in self.rounds for _, learned in sampled)

    @property
    def has_final(self) -> bool:
        return any(message.channel == "final" for message in self.messages)

    @property
    def hides_analysis(self) -> bool:
        channels = {message.channel for message in self.messages}
        return {"analysis", "final"} <= channels

    def history(self) -> list[Message]:
        """Returns the turn's messages as later turns see them: without the analysis channel."""
        return [message for message in self.messages if message.channel != "analysis"]


def _turns(messages: Iterable[tuple[int, ChatMessage]], first: int) -> list[_Turn | list[Message]]:
    """Splits a conversation into the assistant's turns and the lists of messages between them. Raises UserError for a tool's answer
    without a call, or without the tool's name."""
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
            if not isinstance(last, _Turn) or not last.rounds[-1][0] or not last.rounds[-1][0][-1][0].is_call:
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
    return parts


def _in_sequence(messages: Messages) -> Iterator[tuple[int, ChatMessage]]:
    """Yields the messages with their indices, each call followed by its answer. Parallel calls are put one after the other, because
    Harmony calls one tool at a time. Raises UserError if an answer to parallel calls is missing."""
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
        # Text before a call is no answer yet.
        yield Message("assistant", content, "commentary" if message.calls else "final")
    for call in message.calls:
        arguments = call.arguments
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        yield Message("assistant", text, "commentary", f"{NAMESPACE}.{call.name}", content_type="json")


def render_tools(tools: Sequence[ToolDefinition]) -> str:
    """Returns the text of a developer message that declares the tools as TypeScript types."""
    declarations = "\n\n".join(_declaration(tool) for tool in tools)
    return f"# Tools\n\n## {NAMESPACE}\n\nnamespace {NAMESPACE} {{\n\n{declarations}\n\n}} // namespace {NAMESPACE}"


def declare_tools(messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> list[Message]:
    """Returns the messages with a developer message that declares the tools, if there are any, after the system messages."""
    first = next((index for index, message in enumerate(messages) if message.role != "system"), len(messages))
    declared = [Message("developer", render_tools(tools))] if tools else []
    return [*messages[:first], *declared, *messages[first:]]


def _declaration(tool: ToolDefinition) -> str:
    comment = "".join(f"// {line}\n" for line in tool.description.splitlines())
    if is_deep(tool.parameters):
        raise UserError(f"the parameters of tool {tool.name} are nested more than {MOST_NESTED} deep; flatten them")
    try:
        argument = "" if tool.parameters is None else f"_: {_type(tool.parameters, '')}"
    except (AttributeError, TypeError) as error:
        raise UserError(f"the parameters of tool {tool.name} are no JSON schema: {error}") from None
    return f"{comment}type {tool.name} = ({argument}) => any;"


def _type(schema: Mapping[str, Any], indent: str) -> str:
    """Returns the TypeScript type for a JSON schema; `indent` is the indentation of an object's keys."""
    if not isinstance(schema, Mapping):
        return "any"  # JSON schema also has true and false
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join("number" if one == "integer" else one for one in kind)
    if kind == "object":
        return _object(schema, indent)
    if kind == "string":
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in schema.get("enum", ())) or "string"
    if kind in ("number", "integer"):
        return "number"
    if kind == "boolean":
        return "boolean"
    if kind == "array":
        return f"{_type(schema['items'], indent)}[]" if schema.get("items") else "Array<any>"
    return "any"


def unshown(schema: Any, path: str = "") -> str | None:
    """Returns the path of the first parameter whose type the declaration leaves open although its schema gives it: as one of
    several schemas, say, or with names of any kind."""
    if not isinstance(schema, Mapping):
        return None
    kind = schema.get("type")
    says = schema.keys() - {"description", "default", "nullable", "title", "examples"}
    simple = ("string", "number", "integer", "boolean", "null")
    if (kind is None and says) or (isinstance(kind, list) and not set(kind) <= set(simple)):
        return path or "."
    if kind == "array":
        return unshown(schema.get("items"), f"{path}[]")
    if kind == "object":
        if isinstance(schema.get("additionalProperties"), Mapping) or schema.get("patternProperties"):
            return path or "."
        parts = ((one, f"{path}.{name}" if path else name) for name, one in schema.get("properties", {}).items())
        return next(filter(None, (unshown(one, where) for one, where in parts)), None)
    return None


def _object(schema: Mapping[str, Any], indent: str) -> str:
    lines = ["{"]
    if "description" in schema:
        lines.insert(0, f"{indent}// {schema['description']}")
    required = schema.get("required", ())
    for name, given in schema.get("properties", {}).items():
        value = {} if isinstance(given, bool) else given  # anything
        if "description" in value:
            lines.append(f"{indent}// {value['description']}")
        optional = "" if name in required else "?"
        nullable = " | null" if value.get("nullable") else ""
        default = f" // default: {_default(value)}" if "default" in value else ""
        lines.append(f"{indent}{name}{optional}: {_type(value, indent + '    ')}{nullable},{default}")
    return "\n".join([*lines, f"{indent}}}"])


def _default(schema: Mapping[str, Any]) -> str:
    default = schema["default"]
    if isinstance(default, str):
        return default if "enum" in schema else f'"{default}"'
    return json.dumps(default, ensure_ascii=False, separators=(",", ":"))
