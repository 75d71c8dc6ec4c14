"""Conversations by a tokenizer's own chat template (Jinja, as Hugging Face checkpoints have), as token ids.

The template writes the structure, with its control tokens; what is content can not forge one, although both pass
through the same template: before rendering, every control token's name in a content is broken up by a character that
stands nowhere else, and that character is taken out again, between the control tokens, before the text is encoded.
Honest content gives the very ids that transformers gives.

A conversation only ever grows. `continuation_ids` gives what the template writes after a turn that was sampled; a
template that then writes what came before in another way (drops earlier reasoning, moves the system message) is
refused, because what the policy saw and what it is trained on would not be the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from nmoe.errors import UserError
from nmoe.text.harmony_format import Message
from nmoe.text.tokenizer import Tokenizer
from nmoe.text.tool_definition import ToolDefinition

THINK, END_THINK = "<think>", "</think>"

# Templates that print the day would make a prompt depend on it; this is the one that Llama's falls back to.
_DATE = "26 Jul 2024"
_PRIVATE_USE = range(0xE000, 0xF8FF)


@dataclass(frozen=True)
class ToolAnswer:
    """What a tool said to one call: `ToolAnswer("python", "42\\n", "0/0")`."""

    name: str
    content: str
    call_id: str


class ChatTemplate:
    """The chat template of one tokenizer, with these tools declared."""

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[ToolDefinition] = ()) -> None:
        """Raises UserError for a tokenizer without template or end-of-turn token, and for a template that can not go on
        after a turn."""
        names = tokenizer.named_tokens
        template, end = tokenizer.chat_template, names.get("eos_token")
        if template is None or end is None:
            lacks = "eos_token" if template else "chat template (chat_template.jinja, or in tokenizer_config.json)"
            raise UserError(
                f'format = "chat": the tokenizer has no {lacks}; use that of a chat model, or format = "harmony"'
            )
        self._template = template
        self._names: dict[str, Any] = names
        self._tokenizer = tokenizer
        self._end = end
        self._tools: list[Any] | None = [tool.as_function() for tool in tools] or None
        # A name of one character can not be broken up, and is never structure.
        added = sorted((name for name in tokenizer.added_tokens if len(name) > 1), key=len, reverse=True)
        self._added = {name: tokenizer.added_tokens[name] for name in added}
        alternatives = "|".join(map(re.escape, added))
        self._split = re.compile(f"({alternatives})")
        self._starts = re.compile(f"(?=(?:{alternatives}))")  # where one starts, inside another too
        self.stop_ids = (tokenizer.special_id(end),)
        if tools:  # a template that can not go on should say so before a run starts
            said = ToolAnswer(tools[0].name, "ok", "0/0")
            self.continuation_ids([Message("user", "?")], [[said], [said]])

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The conversation, and the start of the assistant's next turn."""
        breaker, _ = self._unused(message.content for message in messages)
        return self._encode(self._render(self._guarded(messages, breaker), opens_turn=True), breaker)

    def completion_ids(self, text: str) -> list[int]:
        """A turn of this text as a policy samples it: control tokens by their names, the end of the turn behind it."""
        return [*self._encode(text, self._unused([text])[0]), *self.stop_ids]

    def continuation_ids(self, messages: Sequence[Message], rounds: Sequence[Sequence[ToolAnswer]]) -> list[int]:
        """What follows the last sampled token: the end of its turn as the template writes it, the answers of the last
        of the rounds of calls so far, and the start of the next turn. The sampled turns themselves are stood for by
        marks."""
        answers = [answer.content for round_ in rounds for answer in round_]
        breaker, mark = self._unused([*answers, *(message.content for message in messages)])
        history = self._guarded(messages, breaker)
        before, after = self._render(history), ""
        for number, round_ in enumerate(rounds):
            thought, said = f"{mark}t{number}{mark}", f"{mark}s{number}{mark}"
            history.append({"role": "assistant", "content": f"{THINK}\n{thought}\n{END_THINK}\n\n{said}"})
            for answer in round_:
                content = self._guard(answer.content, breaker)
                history.append(
                    {"role": "tool", "name": answer.name, "content": content, "tool_call_id": answer.call_id}
                )
            whole = self._render(history, opens_turn=True)
            _, found, after = whole.partition(said)
            if not whole.startswith(before) or thought not in whole[len(before) :] or not found:
                raise UserError(
                    "the chat template writes earlier messages in another way once more follow (it drops the reasoning "
                    "of earlier turns, perhaps): what the policy sampled would not stay in its history; use another template"
                )
            gap, found, after = after.partition(self._end)
            if gap.strip() or not found:
                raise UserError(
                    f"the chat template does not end the assistant's message in {self._end!r}, the tokenizer's eos_token: "
                    "a sampled turn would end in another way than one of the history"
                )
            before = self._render(history)
        return self._encode(after, breaker)

    def _render(self, messages: list[dict[str, str]], *, opens_turn: bool = False) -> str:
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            # Annotated as text, it returns the texts of all conversations and a second list.
            rendered: Any = render_jinja_template(
                conversations=[messages],
                tools=self._tools,
                chat_template=self._template,
                add_generation_prompt=opens_turn,
                date_string=_DATE,
                **self._names,
            )
        except TemplateError as error:
            roles = " ".join(message["role"] for message in messages)
            raise UserError(f"the chat template refuses a conversation of {roles}: {error}") from error
        text: str = rendered[0][0]
        return text

    def _guarded(self, messages: Sequence[Message], breaker: str) -> list[dict[str, str]]:
        """As templates take them. They know no developer; its word has the system's weight."""
        roles = {"developer": "system"}
        return [
            {"role": roles.get(one.role, one.role), "content": self._guard(one.content, breaker)} for one in messages
        ]

    def _guard(self, content: str, breaker: str) -> str:
        """The content with a breaker inside every name and at both ends, where it could go on a name that the template
        begins. White space at the ends stays outside, because templates trim it; content that is nothing else stays as
        it is."""
        core = content.strip()
        if not core:
            return content
        left = content[: len(content) - len(content.lstrip())]
        right = content[len(content.rstrip()) :]
        return left + breaker + breaker.join(self._pieces(core)) + breaker + right

    def _pieces(self, text: str) -> list[str]:
        """The text, cut behind the first character of every name in it, so that no piece holds one."""
        cuts = [0, *(match.start() + 1 for match in self._starts.finditer(text)), len(text)]
        return [text[start:end] for start, end in pairwise(cuts)]

    def _encode(self, text: str, breaker: str) -> list[int]:
        ids: list[int] = []
        for piece in self._split.split(text):
            if piece in self._added:
                ids.append(self._added[piece])
            else:
                for plain in self._pieces(piece.replace(breaker, "")):
                    ids += self._tokenizer.encode(plain)
        return ids

    def _unused(self, texts: Iterable[str]) -> tuple[str, str]:
        """Two characters that stand in none of the texts, nor in the template: from the private-use area, which no
        encoding of human text needs."""
        present = set(self._template).union(*texts)
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in present)
        return next(free), next(free)


@dataclass(frozen=True)
class ChatTurn:
    """A sampled turn as its text says it: reasoning between the think tags, the rest of it, and the bodies of its
    calls.

    `well_formed`: the tags of reasoning open and close, at most once, before all else. A body that no tag closes runs
    to the end.
    """

    reasoning: str | None
    content: str
    calls: tuple[str, ...]
    well_formed: bool


_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def read_turn(text: str) -> ChatTurn:
    """Reads what a model of the Hermes and Qwen3 line says; total. A prompt may have opened the reasoning already."""
    head, closed, rest = text.rpartition(END_THINK)
    if not closed:
        opened = THINK in text
        reasoning, rest = (text.partition(THINK)[2], "") if opened else (None, text)
        well_formed = not opened
    else:
        reasoning = head.lstrip().removeprefix(THINK)
        well_formed = THINK not in reasoning and END_THINK not in reasoning and THINK not in rest
    return ChatTurn(reasoning, _CALL.sub("", rest).strip(), tuple(_CALL.findall(rest)), well_formed)
