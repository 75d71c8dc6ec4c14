r"""The forms that an environment can ask of a completion: Harmony messages, messages by a chat template, or plain text
with a `\boxed{}`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from nmoe.config.environment import EnvironmentSettings, SystemByFormat
from nmoe.envs.grade import Reading
from nmoe.envs.tasks import Task
from nmoe.errors import UserError
from nmoe.grading.extraction import from_final, from_response, last_boxed
from nmoe.text.chat_template import END_THINK, TAGS, THINK, ChatTemplate, ChatTurn, ToolAnswer, read_turn
from nmoe.text.conversation import ToolDefinition
from nmoe.text.harmony import Harmony, HarmonyTokenizer
from nmoe.text.harmony_format import END_OF_TEXT
from nmoe.text.harmony_tools import NAMESPACE, declare_tools
from nmoe.text.renderers import natural_format
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Given, Message, ToolCall, ToolEvent

_REASONING = "The answer follows."


@dataclass(frozen=True)
class Round:
    """What was said between two turns of the user, and the later one's words: the policy's turns, and of each what tools
    answered to its calls."""

    turns: Sequence[Sequence[int]]
    answers: Sequence[Sequence[ToolEvent]]
    user: str


class Format(Protocol):
    """How messages become prompt tokens, calls of tools are told apart and answered, and the tokens that were sampled,
    turn by turn, become a reading. `calls` and `read` are total: any ids are read."""

    @property
    def stop_ids(self) -> tuple[int, ...]: ...

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]: ...

    def calls(self, turn: int, token_ids: Sequence[int]) -> list[ToolCall]:
        """The calls that this turn ends in; none where it is the last, well-formed or not."""

    def answer_calls(self, messages: Sequence[Message], rounds: Sequence[Sequence[ToolEvent]]) -> list[int]:
        """What follows the last sampled token: the answers to the latest of the rounds of calls so far, and what opens
        the next turn. `messages` are those of the prompt. Answers are content: no text of theirs becomes a control
        token."""

    def follow_up(self, messages: Sequence[Message], rounds: Sequence[Round]) -> tuple[Given, list[int]]:
        """How a conversation goes on after the user's words in the last of its rounds, which are all in form: what follows
        the last sampled token ("user") where the history stays as it was sampled, else the prompt of a new branch ("prompt").
        `messages` are those of the first prompt. The user's words are content."""

    def read(self, task: Task, turns: Sequence[Sequence[int]]) -> Reading: ...

    def transcript(self, token_ids: Sequence[int]) -> list[dict[str, str | None]]:
        """What one sampled turn is read as, message by message, for people and for replays."""

    def said(self, token_ids: Sequence[int]) -> tuple[str | None, str]:
        """The reasoning of a turn and what it says beside it, either as far as the form holds; total."""

    def answer_ids(self, task: Task, answer: str) -> list[int]:
        """A completion in the best form, reasoning included, that gives this answer."""


class HarmonyFormat:
    """Harmony: every turn parses, the last ends in <|return|>, and its last final message, not blank, is the answer.

    The reasoning is an analysis message that is not blank, before that final message, in any turn. An answer counts
    only in this form: wherever else it may stand, nobody could tell it from a thought.
    """

    def __init__(self, tokenizer: HarmonyTokenizer, tools: Sequence[ToolDefinition]) -> None:
        self._harmony = Harmony(tokenizer)
        self._tools = tools
        self._names = {tool.name for tool in tools}
        self.stop_ids = self._harmony.stop_ids

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        return self._harmony.render_prompt(declare_tools(messages, self._tools))

    def calls(self, turn: int, token_ids: Sequence[int]) -> list[ToolCall]:
        completion = self._harmony.parse_completion(token_ids)
        if completion.end != "call":
            return []
        message = completion.messages[-1]
        assert message.recipient is not None, "a call has a recipient"
        namespace, _, name = message.recipient.partition(".")
        return [ToolCall(name if namespace == NAMESPACE else message.recipient, message.content, f"{turn}/0")]

    def answer_calls(self, messages: Sequence[Message], rounds: Sequence[Sequence[ToolEvent]]) -> list[int]:
        (event,) = rounds[-1]
        return self._harmony.render_prompt([self._answer(event)])

    def _answer(self, event: ToolEvent) -> Message:
        # Another name, written by the policy as it liked, could read as a role.
        name = event.call.name if event.call.name in self._names else "unknown"
        return Message("tool", event.output, "commentary", recipient="assistant", name=f"{NAMESPACE}.{name}")

    def follow_up(self, messages: Sequence[Message], rounds: Sequence[Round]) -> tuple[Given, list[int]]:
        """A new branch: earlier reasoning is dropped, and the answer before ends in <|end|>. Calls and their answers stay."""
        history = list(messages)
        for one in rounds:
            for token_ids, events in zip(one.turns, one.answers, strict=True):
                said = self._harmony.parse_completion(token_ids).messages
                history += [message for message in said if message.channel != "analysis"]
                history += [self._answer(event) for event in events]
            history.append(Message("user", one.user))
        return "prompt", self.prompt_ids(history)

    def read(self, task: Task, turns: Sequence[Sequence[int]]) -> Reading:
        *calls, completion = [self._harmony.parse_completion(token_ids) for token_ids in turns]
        extraction = from_final(completion.final or "", bare_final=task.bare_final)
        answered = bool((completion.final or "").strip())
        well_formed = all(call.end == "call" for call in calls) and completion.end == "return" and answered
        finals = [index for index, message in enumerate(completion.messages) if message.channel == "final"]
        thoughts = completion.messages[: finals[-1]] if finals else ()
        thoughts = (*(message for call in calls for message in call.messages), *thoughts)
        reasons = any(message.channel == "analysis" and message.content.strip() for message in thoughts)
        return Reading(
            extraction,
            structure=(all(turn.error is None for turn in (*calls, completion)), completion.end == "return", answered),
            reasoning_ok=well_formed and reasons,
            answer_counts=well_formed,
            parse_error=not well_formed,
        )

    def transcript(self, token_ids: Sequence[int]) -> list[dict[str, str | None]]:
        completion = self._harmony.parse_completion(token_ids)
        return [*map(asdict, completion.messages), {"end": completion.end, "error": completion.error}]

    def said(self, token_ids: Sequence[int]) -> tuple[str | None, str]:
        completion = self._harmony.parse_completion(token_ids)
        return completion.analysis, completion.final or ""

    def answer_ids(self, task: Task, answer: str) -> list[int]:
        # A box is for answers that could not be told from the prose around them; else the final message is the answer.
        bare = from_final(answer, bare_final=task.bare_final).answer == answer
        final = answer if bare else rf"\boxed{{{answer}}}"
        return self._harmony.render_completion(
            [Message("assistant", _REASONING, channel="analysis"), Message("assistant", final, channel="final")]
        )


class ChatFormat:
    """The messages of the tokenizer's own chat template, for models that do not speak Harmony. Calls and reasoning have
    the form of the Hermes and Qwen3 line:

        <think>...</think>Let me see.<tool_call>{"name": "python", "arguments": {"code": "print(6 * 7)"}}</tool_call>

    Every turn ends by itself, with its reasoning closed where it opens; the last one calls nothing, and what it says
    after its reasoning, not blank, is the answer. A call inside the reasoning is a thought.
    """

    def __init__(self, tokenizer: HarmonyTokenizer, tools: Sequence[ToolDefinition]) -> None:
        assert isinstance(tokenizer, Tokenizer), "only a tokenizer of Hugging Face files has a chat template"
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, tools)
        self._names = {tool.name for tool in tools}
        # Some tokenizers have these as control tokens, too; in a turn they are its form.
        tags = {tokenizer.added_tokens.get(tag) for tag in TAGS}
        self._control_ids = tokenizer.control_ids - tags
        self.stop_ids = self._template.stop_ids

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        return self._template.prompt_ids(messages)

    def calls(self, turn: int, token_ids: Sequence[int]) -> list[ToolCall]:
        said, _ = self._read(token_ids)
        return [_chat_call(body, f"{turn}/{place}") for place, body in enumerate(said.calls)]

    def answer_calls(self, messages: Sequence[Message], rounds: Sequence[Sequence[ToolEvent]]) -> list[int]:
        answers = [[ToolAnswer(self._known(one), one.output, one.call.call_id) for one in events] for events in rounds]
        return self._template.continuation_ids(messages, answers)

    def follow_up(self, messages: Sequence[Message], rounds: Sequence[Round]) -> tuple[Given, list[int]]:
        """The same branch where the template leaves earlier turns as they were, else a new one, in which they have no
        reasoning."""
        history = list(messages)
        for one in rounds:
            (token_ids,) = one.turns
            history += [Message("assistant", self._read(token_ids)[0].content), Message("user", one.user)]
        given = self._template.user_ids(history)
        return ("prompt", self.prompt_ids(history)) if given is None else ("user", given)

    def read(self, task: Task, turns: Sequence[Sequence[int]]) -> Reading:
        *calling, (last, ended) = [self._read(token_ids) for token_ids in turns]
        parses = all(said.well_formed for said, _ in calling) and last.well_formed
        answered = bool(last.content) and not last.calls
        structure = (parses, ended, answered)
        reasons = any((said.reasoning or "").strip() for said, _ in (*calling, (last, ended)))
        return Reading(
            from_final(last.content if answered else "", bare_final=task.bare_final),
            structure=structure,
            reasoning_ok=all(structure) and reasons,
            answer_counts=all(structure),
            parse_error=not all(structure),
        )

    def transcript(self, token_ids: Sequence[int]) -> list[dict[str, str | None]]:
        said, _ = self._read(token_ids)
        messages: list[dict[str, str | None]] = [{"reasoning": said.reasoning, "content": said.content}]
        return messages + [{"call": body} for body in said.calls]

    def said(self, token_ids: Sequence[int]) -> tuple[str | None, str]:
        said, _ = self._read(token_ids)
        return said.reasoning, said.content

    def answer_ids(self, task: Task, answer: str) -> list[int]:
        final = answer if task.bare_final else rf"\boxed{{{answer}}}"
        return self._template.completion_ids(f"{THINK}\n{_REASONING}\n{END_THINK}\n\n{final}")

    def _known(self, event: ToolEvent) -> str:
        # Another name, written by the policy as it liked, could hold control tokens: templates write names as they are.
        return event.call.name if event.call.name in self._names else "unknown"

    def _read(self, token_ids: Sequence[int]) -> tuple[ChatTurn, bool]:
        """What a turn says, and whether it ended by itself. A control token inside of it is no text."""
        ended = bool(token_ids) and token_ids[-1] in self.stop_ids
        body = token_ids[:-1] if ended else token_ids
        said = read_turn(self._tokenizer.decode(body))
        is_text = self._control_ids.isdisjoint(body) and all(0 <= one < self._tokenizer.vocab_size for one in body)
        return replace(said, well_formed=said.well_formed and is_text), ended


def _chat_call(body: str, call_id: str) -> ToolCall:
    """A call from the text between its tags."""
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        fault = f"a call is a JSON object between <tool_call> and </tool_call>: {error}"
        return ToolCall("", body.strip(), call_id, fault)
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str):
        return ToolCall("", body.strip(), call_id, 'a call is a JSON object with a "name" and "arguments"')
    arguments = call.get("arguments", {})
    return ToolCall(name, arguments if isinstance(arguments, str) else json.dumps(arguments), call_id)


class BoxedFormat:
    r"""Plain text, for models that do not speak Harmony: the answer stands in the last `\boxed{}` of the completion.

    The prompt is the messages' text, a blank line between them, and a line break at the end; nothing is added, so that
    an instruction to use `\boxed{}` belongs in the environment's `system`. The form is having a box, the reasoning is
    text before it, and a right last number without a box is correct all the same (it lacks the form, not the answer).
    """

    def __init__(self, tokenizer: HarmonyTokenizer, tools: Sequence[ToolDefinition]) -> None:
        assert not tools, "the settings refuse tools here"
        self._tokenizer = tokenizer
        self.stop_ids = (tokenizer.special_id(END_OF_TEXT),)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        return self._tokenizer.encode("\n\n".join(message.content for message in messages) + "\n")

    def calls(self, turn: int, token_ids: Sequence[int]) -> list[ToolCall]:
        return []

    def answer_calls(self, messages: Sequence[Message], rounds: Sequence[Sequence[ToolEvent]]) -> list[int]:
        raise AssertionError("there are no calls to answer")

    def follow_up(self, messages: Sequence[Message], rounds: Sequence[Round]) -> tuple[Given, list[int]]:
        """The same branch: the user's words on a line of their own."""
        return "user", self._tokenizer.encode(f"\n{rounds[-1].user}\n")

    def read(self, task: Task, turns: Sequence[Sequence[int]]) -> Reading:
        (completion_ids,) = turns
        text = self._text(completion_ids)
        box = last_boxed(text)
        return Reading(
            from_response(text),
            structure=(box is not None,),
            reasoning_ok=box is not None and bool(text[: box.start].strip()),
            answer_counts=True,
            parse_error=False,
        )

    def transcript(self, token_ids: Sequence[int]) -> list[dict[str, str | None]]:
        return [{"content": self._tokenizer.decode(token_ids)}]

    def said(self, token_ids: Sequence[int]) -> tuple[str | None, str]:
        return None, self._text(token_ids)

    def answer_ids(self, task: Task, answer: str) -> list[int]:
        return [*self._tokenizer.encode(rf"{_REASONING} \boxed{{{answer}}}"), self.stop_ids[0]]

    def _text(self, token_ids: Sequence[int]) -> str:
        ended = bool(token_ids) and token_ids[-1] in self.stop_ids
        return self._tokenizer.decode(token_ids[:-1] if ended else token_ids)


FORMATS: dict[str, type[HarmonyFormat] | type[ChatFormat] | type[BoxedFormat]] = {
    "harmony": HarmonyFormat,
    "chat": ChatFormat,
    "boxed": BoxedFormat,
}


def in_format(settings: EnvironmentSettings, tokenizer: HarmonyTokenizer) -> EnvironmentSettings:
    """The settings with the format that the tokenizer is made for where they leave it open, and with that format's system message.
    Raises UserError for a tokenizer that is made for none."""
    form = natural_format(tokenizer) if settings.format == "auto" else settings.format
    if form is None:
        raise UserError(
            f"environment {settings.env_id!r}: the tokenizer has neither Harmony's control tokens nor a chat template; use another "
            'one, or write format = "boxed" for plain text'
        )
    system = getattr(settings.system_by_format, form)
    return settings.model_copy(
        update={
            "format": form,
            "system": settings.system if system is None else system,
            "system_by_format": SystemByFormat(),
        }
    )
