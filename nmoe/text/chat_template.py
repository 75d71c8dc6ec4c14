"""Renders conversations as token ids by a tokenizer's own chat template (Jinja, as in Hugging Face checkpoints).

The template writes the structure, with its control tokens. Content passes through the same template and cannot forge a control
token (`nmoe.text.guard`).

A conversation only grows. `continuation_ids` returns the tokens that the template writes after a turn that the policy sampled. A
template that rewrites earlier messages (drops earlier reasoning, moves the system message) is refused, because the policy would be
trained on another history than it saw.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product, takewhile
from types import MappingProxyType
from typing import Any

from nmoe.errors import UserError
from nmoe.text.conversation import END_THINK, TAGS, THINK, ToolDefinition
from nmoe.text.guard import ContentGuard, strings
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message

# Templates that print the day would make a prompt depend on it; this is the one that Llama's falls back to.
_DATE = "26 Jul 2024"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class ToolAnswer:
    r"""A tool's answer to one call: `ToolAnswer("python", "42\n", "0/0")`."""

    name: str
    content: str
    call_id: str


# What templates get from a conversation, or from another setting.
_GIVEN = frozenset(
    [
        "messages",
        "conversations",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "date_string",
        "strftime_now",
        "raise_exception",
        "return_assistant_tokens_mask",
        "reasoning_effort",
    ]
)


class ChatTemplate:
    """The chat template of a tokenizer, together with the tools that it declares to the model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[ToolDefinition] = (),
        effort: str | None = None,
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Prepares the template's variables, and checks them and the tools against the template. `effort` is given to the template
        as `reasoning_effort`. `arguments` are variables of this template, such as `enable_thinking`, which transformers takes as
        keyword arguments and servers as `chat_template_kwargs`.

        Raises UserError if the tokenizer has no template or no end-of-turn token, if the template does not use `reasoning_effort`
        or one of the arguments, if an argument has the name of a variable that every template gets, such as `messages`, and, with
        tools, if the template cannot continue after a turn that the policy sampled.
        """
        names, template = tokenizer.named_tokens, tokenizer.chat_template
        if template is None or not tokenizer.end_ids:
            lacks = "eos_token" if template else "chat template (chat_template.jinja, or in tokenizer_config.json)"
            raise UserError(
                f'format = "chat": the tokenizer has no {lacks}; use the tokenizer of a chat model, or format = "harmony"'
            )
        self._template = template
        if effort is not None and "reasoning_effort" not in template:
            raise UserError(
                f'reasoning_effort = "{effort}": the chat template has no `reasoning_effort`; leave the key out, or ask for it '
                "in `system`"
            )
        for name in arguments:
            if name in names or name in _GIVEN:
                raise UserError(f"chat_template_kwargs.{name}: the template is given it already; leave it out")
            if re.search(rf"\b{re.escape(name)}\b", template) is None:
                raise UserError(f"chat_template_kwargs.{name}: the chat template has no such name; leave it out")
        asked = {} if effort is None else {"reasoning_effort": effort}
        self._names: dict[str, Any] = {**names, **asked, **arguments}
        self._tokenizer = tokenizer
        self.stop_ids = tokenizer.end_ids
        self._tools: list[Any] | None = [tool.as_function() for tool in tools] or None
        self._guard = ContentGuard(tokenizer, template)
        self._whole = re.compile("|".join(map(re.escape, sorted({*self._guard.added, *TAGS}, key=len, reverse=True))))
        self._ends = {name: one for name, one in tokenizer.added_tokens.items() if one in self.stop_ids}
        self._end = re.compile("|".join(map(re.escape, sorted(self._ends, key=len, reverse=True))))
        self._undeclared: list[str] = []
        if tools:  # a template that cannot go on should say so before a run starts
            declared = self.text([{"role": "user", "content": "?"}])
            self._undeclared = [tool.name for tool in tools if tool.name not in declared]
            said = ToolAnswer(tools[0].name, "ok", "0/0")
            self.continuation_ids([Message("user", "?")], [[said], [said]])

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Renders the conversation and the start of the assistant's next turn. No text becomes a control token, in tools neither.
        Raises UserError if neither the template nor a message names a declared tool, because a policy would never call it."""
        unnamed = [name for name in self._undeclared if not any(name in message.content for message in messages)]
        if unnamed:
            raise UserError(
                f"the chat template does not declare tools, so the policy cannot know {', '.join(unnamed)}; describe each by "
                "its name in `system`, or use a template that declares tools"
            )
        declared = self._tools or []
        breaker, _ = self._guard.unused(strings([*(message.content for message in messages), *declared]))
        functions = [self._guard.value(tool, breaker) for tool in declared] or None
        guarded = self._guard.messages(messages, breaker)
        return self._guard.encode(self._render(guarded, tools=functions, opens_turn=True), breaker)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolDefinition] = ()) -> list[int]:
        """Renders a whole conversation, with tools declared beside it, and the start of the assistant's next turn. No text becomes
        a control token; only the assistant's own words may contain the tags of reasoning and calls. Raises UserError if the
        template refuses the conversation, or if neither the template nor a message names a tool."""
        declared = [tool.as_function() for tool in tools]
        breaker, _ = self._guard.unused(strings([*messages, *declared]))
        guarded = [self._guard.message(message, breaker) for message in messages]
        functions = [self._guard.value(tool, breaker) for tool in declared] or None
        text = self._render(guarded, tools=functions, opens_turn=True)
        written = text.replace(breaker, "")
        if unnamed := [tool.name for tool in tools if tool.name not in written]:
            raise UserError(
                f"the chat template does not declare tools, so the model cannot know {', '.join(unnamed)}; describe each by its "
                "name in a system message, or use a template that declares tools"
            )
        return self._guard.encode(text, breaker)

    def text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Renders a conversation as text, without protection against control tokens in its content."""
        return self._render([dict(message) for message in messages])

    def conversation(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolDefinition] = ()
    ) -> list[tuple[list[int], int | None]]:
        """Renders a dataset's whole conversation as pieces: pairs of ids and the index of the assistant's message that a model
        would sample these ids for, or None for ids that it only reads.

        A template with {% generation %} marks the sampled parts itself. For other templates they follow the opening of the turn
        (`add_generation_prompt`). The control token that ends a turn is always sampled with it. Pieces are encoded separately, like
        prompt and sample, so that no token spans two of them. No text becomes a control token, in tools neither; only the
        assistant's own words may contain the tags of reasoning and calls.

        A turn gets no piece if the template writes the text before it, its opening included, differently than in the prompt for
        that turn: a policy cannot sample it there. Nor does a message of the assistant's that begins the conversation. Raises
        UserError if the template refuses the conversation, and for a turn without an end.
        """
        declared = [tool.as_function() for tool in tools]
        breaker, _ = self._guard.unused(strings([*messages, *declared]))
        guarded = [self._guard.message(message, breaker) for message in messages]
        functions = [self._guard.value(tool, breaker) for tool in declared] or None
        text, marked = self._render_marked(guarded, functions)
        turns = self._turns(guarded, functions, text)
        if marked is not None:
            asked_for = sum(message["role"] == "assistant" for message in messages)
            regions = self._regions(turns, text) if len(turns) == asked_for else turns
            turns = [
                (max(start, first), min(end, last), index)
                for (start, end), (first, last, index) in product(marked, regions)
                if max(start, first) < min(end, last)
            ]
            # Stop tokens are learned with the turns that they end, where the template's author forgot them too.
            ended = ((start, end, self._end.match(text, end), index) for start, end, index in turns)
            turns = [(start, end if found is None else found.end(), index) for start, end, found, index in ended]
        pieces: list[tuple[list[int], int | None]] = []
        position = 0
        for start, end, index in turns:
            pieces += [
                (self._guard.encode(text[position:start], breaker), None),
                (self._guard.encode(text[start:end], breaker), index),
            ]
            position = end
        return [*pieces, (self._guard.encode(text[position:], breaker), None)]

    def sampled(
        self, messages: Sequence[Mapping[str, Any]], reasoning: str, tools: Sequence[ToolDefinition] = ()
    ) -> tuple[list[int], list[int]] | None:
        """Renders the last message, the assistant's, as the ids of a prompt and of the turn that a policy would sample after it,
        for a template that writes a finished turn differently than it opens one. Such a template may open the reasoning in each
        prompt, and leave reasoning out of finished turns (DeepSeek-R1). Then the turn is `reasoning`, the closing tag, and the
        template's text.

        Returns None if the finished turn does not begin as the template opens one, or if there is `reasoning` and the turn has no
        place for it.
        """
        declared = [tool.as_function() for tool in tools]
        breaker, _ = self._guard.unused(strings([*messages, *declared, reasoning]))
        guarded = [self._guard.message(message, breaker) for message in messages]
        functions = [self._guard.value(tool, breaker) for tool in declared] or None
        text, before = (self._render(some, tools=functions) for some in (guarded, guarded[:-1]))
        opened = self._render(guarded[:-1], tools=functions, opens_turn=True)
        start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(opened, text, strict=False)))
        for one in (opened, text):  # <think> and <tool_call> begin alike
            cut = (match.start() for match in self._whole.finditer(one) if match.start() < start < match.end())
            start = next(cut, start)
        if not text.startswith(before) or start <= len(before):
            return None
        said = text[start : self._end_after(text, start)]
        if END_THINK not in said:
            if _leaves_open(opened[len(before) :]):
                thought = self._guard.text(reasoning.strip("\n"), breaker, by_assistant=True)
                said = f"{thought}\n{END_THINK}\n\n{said}"
            elif reasoning.strip():
                return None
        return self._guard.encode(opened, breaker), self._guard.encode(said, breaker)

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """The ids of the tokens that may not be part of a turn that the policy samples: control tokens, and the tokens around a
        user's message and at the opening of a turn, which some tokenizers do not call special. Tags of reasoning and calls are not
        included: in a turn they are structure."""
        tags = {self._guard.added.get(tag) for tag in TAGS}
        asked = set(self.prompt_ids([Message("user", "?")])) & set(self._guard.added.values())
        return (self._tokenizer.control_ids | asked) - tags

    @cached_property
    def opens_reasoning(self) -> bool:
        """Whether the template's prompt ends in an opened reasoning block."""
        asked = [{"role": "user", "content": "?"}]
        before, opened = self._render(asked), self._render(asked, opens_turn=True)
        return _leaves_open(opened[len(before) :] if opened.startswith(before) else opened)

    @cached_property
    def default_system(self) -> str:
        """The system message that the template adds to a conversation without one; "" if it adds none."""
        asked, mark = {"role": "user", "content": "?"}, "another system message"
        try:
            before, _, after = self._render([{"role": "system", "content": mark}, asked]).partition(mark)
        except UserError:  # a template without system messages
            return ""
        text = self._render([asked])
        if not (before and after and text.startswith(before) and text.endswith(after)):
            return ""
        return text[len(before) : len(text) - len(after)].strip()

    def names(self, text: str) -> bool:
        """Returns whether the template's source contains this text."""
        return text in self._template

    def completion_ids(self, text: str) -> list[int]:
        """Renders a text as a turn that a policy would sample: names of control tokens become these tokens, and the end of the turn
        follows."""
        end = self.stop_ids[0] if self._written_end is None else self._written_end
        return [*self._guard.encode(text, self._guard.unused([text])[0]), end]

    def continuation_ids(self, messages: Sequence[Message], rounds: Sequence[Sequence[ToolAnswer]]) -> list[int]:
        """Renders the tokens after the last sampled token of a turn with calls: the rest of that turn's end as the template writes
        it, the answers to the latest round of calls, and the start of the next turn. In the rendering, placeholders stand for the
        turns that the policy sampled. Raises UserError if the template rewrites earlier messages, or does not end a turn with one
        of the tokens that end turns."""
        answers = [answer.content for round_ in rounds for answer in round_]
        breaker, mark = self._guard.unused([*answers, *(message.content for message in messages)])
        history = self._guard.messages(messages, breaker)
        before, after = self._render(history), ""
        for number, round_ in enumerate(rounds):
            thought, said = f"{mark}t{number}{mark}", f"{mark}s{number}{mark}"
            history.append({"role": "assistant", "content": f"{THINK}\n{thought}\n{END_THINK}\n\n{said}"})
            for answer in round_:
                content = self._guard.text(answer.content, breaker)
                history.append(
                    {"role": "tool", "name": answer.name, "content": content, "tool_call_id": answer.call_id}
                )
            whole = self._render(history, opens_turn=True)
            _, found, after = whole.partition(said)
            if not whole.startswith(before) or thought not in whole[len(before) :] or not found:
                raise UserError(
                    "the chat template writes earlier messages in another way once more follow (it drops the reasoning "
                    "of earlier turns, perhaps): the sampled turns would not stay in the policy's history; use another template"
                )
            end = self._end.search(after)
            if end is None or after[: end.start()].strip() or self._written_end is None:
                raise UserError(f"{self._unended()}: a sampled turn would end in another way than one of the history")
            after = after[end.end() :]
            before = self._render(history)
        return self._guard.encode(after, breaker)

    def user_ids(self, messages: Sequence[Message]) -> list[int] | None:
        """Renders the tokens after the last sampled token when the user speaks next: the rest of the sampled turn's end as the
        template writes it, the user's words, and the start of the next turn.

        The last two messages are the turn that the policy sampled, replaced by a placeholder, and the user's message. Returns None
        if the template then rewrites earlier messages, for example by dropping their reasoning, and if it does not end a turn with
        one of the tokens that end turns.
        """
        *earlier, _, user = messages
        breaker, mark = self._guard.unused(message.content for message in messages)
        thought, said = f"{mark}t{mark}", f"{mark}s{mark}"
        opened = self._render(self._guard.messages(earlier, breaker), opens_turn=True).removesuffix(f"{THINK}\n")
        sampled = {"role": "assistant", "content": f"{THINK}\n{thought}\n{END_THINK}\n\n{said}"}
        history = [*self._guard.messages(earlier, breaker), sampled, *self._guard.messages([user], breaker)]
        before, found, after = self._render(history, opens_turn=True).partition(said)
        if not found or not before.startswith(opened) or thought not in before[len(opened) :]:
            return None
        end = self._end.search(after)
        if end is None or after[: end.start()].strip() or self._written_end is None:
            return None
        return self._guard.encode(after[end.end() :], breaker)

    @cached_property
    def _written_end(self) -> int | None:
        """The token that the template writes at the end of the assistant's message; None if the message ends only where the next
        one begins."""
        text = self._render([{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}])
        found = self._end.search(text, text.rfind("!"))
        return None if found is None else self._ends[found[0]]

    def _unended(self) -> str:
        """Returns the first part of the error message about a turn without an end."""
        return (
            f"the chat template does not end the assistant's message in {' or '.join(map(repr, self._ends))}, the tokenizer's "
            "eos_token and the ends in generation_config.json (name the template's end in its eos_token_id)"
        )

    def _turns(self, messages: Sequence[dict[str, Any]], tools: Any, text: str) -> list[tuple[int, int, int]]:
        """Finds the assistant's turns in a rendered conversation: start (after the opening of the turn), end, and index of the
        message. Leaves out a turn whose opening in this text differs from its opening in a prompt. Raises UserError for a turn that
        does not end before the next message begins."""
        turns: list[tuple[int, int, int]] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or index == 0:
                continue
            opened = self._render(messages[:index], tools=tools, opens_turn=True)
            if text.startswith(opened):
                end = self._end_after(text, len(opened))
                # The end that was found may belong to a later message, with messages of others in between.
                following = "".join(one.get("content") or "" for one in messages[index + 1 : index + 2])
                if index + 1 < len(messages) and following in text[len(opened) : end]:
                    alone = self._render(messages[: index + 1], tools=tools)
                    if self._end.search(alone, len(opened)) is None:
                        raise UserError(
                            f"the chat template does not end messages[{index}], the assistant's, before the next one begins; use "
                            "a template that does, or leave the record out"
                        )
                turns.append((len(opened), end, index))
        return turns

    def _end_after(self, text: str, start: int) -> int:
        """Returns the position after the next token that ends a turn. Raises UserError if there is none."""
        end = self._end.search(text, start)
        if end is None:
            raise UserError(self._unended())
        return end.end()

    def _regions(self, turns: Sequence[tuple[int, int, int]], text: str) -> list[tuple[int, int, int]]:
        """Extends each turn back to the end of the turn before (the first to the start of the text, the last also to its end), to
        assign generation marks to turns."""
        starts = [0, *(end for _, end, _ in turns[:-1])]
        ends = [*(end for _, end, _ in turns[:-1]), len(text)]
        return [(start, end, index) for start, end, (_, _, index) in zip(starts, ends, turns, strict=True)]

    def _render(self, messages: Sequence[dict[str, Any]], *, tools: Any = None, opens_turn: bool = False) -> str:
        return self._rendered(messages, tools, opens_turn, marks=False)[0][0]

    def _render_marked(
        self, messages: Sequence[dict[str, Any]], tools: Any
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """Renders a conversation; returns the text and the spans that {% generation %} marks, None if the template has no such
        marks."""
        marks = _GENERATION.search(self._template) is not None
        texts, marked = self._rendered(messages, tools, False, marks)
        return texts[0], marked[0] if marks else None

    def _rendered(self, messages: Sequence[dict[str, Any]], tools: Any, opens_turn: bool, marks: bool) -> Any:
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            # Annotated as text, it returns the texts of all conversations and their marks.
            return render_jinja_template(
                conversations=[list(messages)],
                tools=tools or self._tools,
                chat_template=self._template,
                add_generation_prompt=opens_turn,
                return_assistant_tokens_mask=marks,
                date_string=_DATE,
                **self._names,
            )
        # A TypeError where it joins a text and a content that is none; some nest too deeply to be compiled.
        except (TemplateError, TypeError, RecursionError) as error:
            roles = " ".join(message["role"] for message in messages)
            raise UserError(f"the chat template refuses a conversation of {roles}: {error}") from error


def _leaves_open(opening: str) -> bool:
    """Returns whether the opening of a turn contains a reasoning tag that is not closed."""
    return opening.rfind(THINK) > opening.rfind(END_THINK)
