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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product, takewhile
from typing import Any

from nmoe.errors import UserError
from nmoe.text.conversation import END_THINK, THINK, ToolDefinition
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message

TAGS = (THINK, END_THINK, "<tool_call>", "</tool_call>")

# Templates that print the day would make a prompt depend on it; this is the one that Llama's falls back to.
_DATE = "26 Jul 2024"
_PRIVATE_USE = range(0xE000, 0xF8FF)
_ROLES = {"developer": "system"}
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_WORD = re.compile(r"[\w.-]*")


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
        self._starts = _starts(added)
        # What the assistant's own words may not hold: all but the tags, which some tokenizers have as control tokens, too.
        controls = [name for name in added if self._added[name] in tokenizer.control_ids and name not in TAGS]
        self._foreign_starts = _starts(controls)
        self.stop_ids = (tokenizer.special_id(end),)
        if tools:  # a template that can not go on should say so before a run starts
            said = ToolAnswer(tools[0].name, "ok", "0/0")
            self.continuation_ids([Message("user", "?")], [[said], [said]])

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The conversation, and the start of the assistant's next turn."""
        breaker, _ = self._unused(message.content for message in messages)
        return self._encode(self._render(self._guarded(messages, breaker), opens_turn=True), breaker)

    def conversation(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolDefinition] = ()
    ) -> list[tuple[list[int], int | None]]:
        """A whole conversation of a dataset, as templates take it, in pieces: ids, and the index of the assistant's message that
        samples them, None for what it reads.

        A template with {% generation %} says itself what is sampled; of others it is what follows the opening of the turn
        (`add_generation_prompt`). The control token that ends the turn is always sampled with it. Pieces are encoded apart, as
        prompt and sample are, so that no token lies across the two. In all of it, tools too, no text becomes a control token;
        only the assistant's own words may hold the tags of reasoning and calls.

        A turn before which the template writes something else than it did when the turn was asked for, because more follows or
        nothing came before, is no piece of its own: nobody can sample it there. Raises UserError where the template refuses
        the conversation, and where a turn has no end.
        """
        declared = [tool.as_function() for tool in tools]
        breaker, _ = self._unused(_strings([*messages, *declared]))
        guarded = [self._guarded_message(message, breaker) for message in messages]
        functions = [self._guard_all(tool, breaker) for tool in declared] or None
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
            turns = [
                (start, end + len(self._end) if text.startswith(self._end, end) else end, index)
                for start, end, index in turns
            ]
        pieces: list[tuple[list[int], int | None]] = []
        place = 0
        for start, end, index in turns:
            pieces += [
                (self._encode(text[place:start], breaker), None),
                (self._encode(text[start:end], breaker), index),
            ]
            place = end
        return [*pieces, (self._encode(text[place:], breaker), None)]

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

    def user_ids(self, messages: Sequence[Message]) -> list[int] | None:
        """What follows the last sampled token where the conversation goes on with a turn of the user: the end of the sampled turn
        as the template writes it, the user's words and the start of the next turn. None where the template then writes what came
        before in another way, as one does that drops earlier reasoning. The last two messages are the sampled turn's, which a mark
        stands for, and the user's."""
        *earlier, _, user = messages
        breaker, mark = self._unused(message.content for message in messages)
        thought, said = f"{mark}t{mark}", f"{mark}s{mark}"
        opened = self._render(self._guarded(earlier, breaker), opens_turn=True).removesuffix(f"{THINK}\n")
        sampled = {"role": "assistant", "content": f"{THINK}\n{thought}\n{END_THINK}\n\n{said}"}
        history = [*self._guarded(earlier, breaker), sampled, *self._guarded([user], breaker)]
        before, found, after = self._render(history, opens_turn=True).partition(said)
        if not found or not before.startswith(opened) or thought not in before[len(opened) :]:
            return None
        gap, found, after = after.partition(self._end)
        return None if gap.strip() or not found else self._encode(after, breaker)

    def _turns(self, messages: Sequence[dict[str, Any]], tools: Any, text: str) -> list[tuple[int, int, int]]:
        """Of each message of the assistant where in the text its turn starts, behind what opens it, and ends, and its index. Left
        out is one that is opened otherwise in this text than by itself."""
        turns: list[tuple[int, int, int]] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or index == 0:
                continue
            opened = self._render(messages[:index], tools=tools, opens_turn=True)
            start = len(opened)
            if not text.startswith(opened):
                # It may open a turn with a tag that it leaves out where the message has no reasoning.
                start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(opened, text, strict=False)))
                before = self._render(messages[:index], tools=tools)
                if not text.startswith(before) or start <= len(before):
                    continue
            end = text.find(self._end, start)
            if end < 0:
                raise UserError(
                    f"the chat template does not end the assistant's message in {self._end!r}, the tokenizer's eos_token"
                )
            turns.append((start, end + len(self._end), index))
        return turns

    def _regions(self, turns: Sequence[tuple[int, int, int]], text: str) -> list[tuple[int, int, int]]:
        """The turns, each going on to the next one's start and the first from the text's: whose marks stand where."""
        starts = [0, *(end for _, end, _ in turns[:-1])]
        ends = [*(end for _, end, _ in turns[:-1]), len(text)]
        return [(start, end, index) for start, end, (_, _, index) in zip(starts, ends, turns, strict=True)]

    def _render(self, messages: Sequence[dict[str, Any]], *, tools: Any = None, opens_turn: bool = False) -> str:
        return self._rendered(messages, tools, opens_turn, marks=False)[0][0]

    def _render_marked(
        self, messages: Sequence[dict[str, Any]], tools: Any
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """The text, and where {% generation %} marks it; None where the template has no such marks."""
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
        except (TemplateError, TypeError) as error:  # a TypeError where it joins a text and a content that is none
            roles = " ".join(message["role"] for message in messages)
            raise UserError(f"the chat template refuses a conversation of {roles}: {error}") from error

    def _guarded(self, messages: Sequence[Message], breaker: str) -> list[dict[str, str]]:
        """As templates take them. They know no developer; its word has the system's weight."""
        return [
            {"role": _ROLES.get(one.role, one.role), "content": self._guard(one.content, breaker)} for one in messages
        ]

    def _guarded_message(self, message: Mapping[str, Any], breaker: str) -> dict[str, Any]:
        guarded = {
            key: self._guard_all(value, breaker) for key, value in message.items() if key not in ("role", "content")
        }
        starts = self._foreign_starts if message["role"] == "assistant" else None
        return (
            {"role": _ROLES.get(message["role"], message["role"])}
            | guarded
            | ({"content": self._guard(message["content"], breaker, starts)} if "content" in message else {})
        )

    def _guard_all(self, value: Any, breaker: str) -> Any:
        """The value with all texts in it guarded, but for plain words: templates look at names, and at the length of ids."""
        if isinstance(value, str):
            return value if _WORD.fullmatch(value) else self._guard(value, breaker)
        if isinstance(value, Mapping):
            return {self._guard_all(key, breaker): self._guard_all(one, breaker) for key, one in value.items()}
        return [self._guard_all(one, breaker) for one in value] if isinstance(value, list | tuple) else value

    def _guard(self, content: str, breaker: str, starts: re.Pattern[str] | None = None) -> str:
        """The content with a breaker inside every name and at both ends, where it could go on a name that the template
        begins. White space at the ends stays outside, because templates trim it; content that is nothing else stays as
        it is."""
        core = content.strip()
        if not core:
            return content
        left = content[: len(content) - len(content.lstrip())]
        opening = "" if starts is not None and core.startswith(TAGS) else breaker  # a tag is no end of another name
        right = content[len(content.rstrip()) :]
        return left + opening + breaker.join(self._pieces(core, starts)) + breaker + right

    def _pieces(self, text: str, starts: re.Pattern[str] | None = None) -> list[str]:
        """The text, cut behind the first character of every name in it, so that no piece holds one."""
        cuts = [0, *(match.start() + 1 for match in (starts or self._starts).finditer(text)), len(text)]
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


def _starts(names: Sequence[str]) -> re.Pattern[str]:
    """Where a name starts, inside another too."""
    return re.compile(f"(?=(?:{'|'.join(map(re.escape, names))}))" if names else r"(?!)")


def _strings(value: Any) -> Iterator[str]:
    """All texts in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from (*_strings(key), *_strings(one))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _strings(one)


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
