"""Renderer: one conversation format in both directions, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from nmoe.errors import UserError
from nmoe.text.conversation import ChatMessage, ToolDefinition
from nmoe.text.harmony import CONTROL_TOKENS, END_OF_TEXT, HarmonyTokenizer
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Given, Message, ToolCall, ToolEvent

IGNORED = -100
"""The label of a token that is not learned, as in transformers."""

Messages = tuple[ChatMessage, ...]
Tools = tuple[ToolDefinition, ...]

NaturalFormat = Literal["harmony", "chat"]

ReasoningEffort = Literal["low", "medium", "high"]
"""How long a model is asked to reason, in the words of the gpt-oss models."""


@dataclass
class Rendered:
    """One token sequence with labels: `Rendered([5, 6, 7, 2], [-100, -100, 7, 2])` learns 7 and 2.

    A label is the token to predict at its position. It equals the token there, except where a turn's stop token becomes another
    one in the history: a final message ends in <|return|> when it is sampled, and in <|end|> when more follows.
    """

    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)

    def read(self, ids: Sequence[int]) -> None:
        """Appends tokens that are not learned."""
        self.ids += ids
        self.labels += [IGNORED] * len(ids)

    def learn(self, ids: Sequence[int], learned: bool = True) -> None:
        self.ids += ids
        self.labels += ids if learned else [IGNORED] * len(ids)

    @property
    def learned(self) -> int:
        """The number of learned tokens."""
        return sum(label != IGNORED for label in self.labels)

    def until_learned(self) -> Rendered:
        """The sequence up to its last learned token, since nothing is predicted from later ones; empty where it learns none."""
        end = max((index for index, label in enumerate(self.labels) if label != IGNORED), default=-1) + 1
        return Rendered(self.ids[:end], self.labels[:end])

    @property
    def positions(self) -> int:
        """The number of positions that a model runs to learn from it, which its context has to hold: the last token is never an
        input."""
        return max(0, len(self.ids) - 1)

    def copy(self) -> Rendered:
        return Rendered(list(self.ids), list(self.labels))


@dataclass(frozen=True)
class ParsedAnswer:
    """The turns of one answer, parsed: `ParsedAnswer("42", well_formed=True, structure=1.0, reasoned=True)`.

    `text` is the answer without its reasoning, "" where there is none. `well_formed` says whether it has the format: every turn
    parses, the last one ends by itself, and it says something; None for plain text, which has no format. `structure` is the share
    of the format that is in place, 1 where it is well-formed and less everywhere else. `reasoned` says whether there is reasoning
    before the answer.
    """

    text: str
    well_formed: bool | None = None
    structure: float = 0.0
    reasoned: bool = False


@dataclass(frozen=True)
class Round:
    """The policy's turns between two user messages, the tools' answers to the calls of each turn, and the later user message."""

    turns: Sequence[Sequence[int]]
    answers: Sequence[Sequence[ToolEvent]]
    user: str


class Renderer(Protocol):
    """One conversation format in both directions: messages become token ids, and sampled ids are parsed.

    `name` is the value of `format` in a configuration. `calls`, `parse`, `transcript` and `said` are total: any ids are read.
    """

    name: str

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end a sampled turn."""

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Renders a conversation and the start of the assistant's next turn."""

    def calls(self, turn: int, token_ids: Sequence[int]) -> list[ToolCall]:
        """The tool calls that a turn ends in; empty for the last turn, well-formed or not."""

    def answer_calls(self, messages: Sequence[Message], rounds: Sequence[Sequence[ToolEvent]]) -> list[int]:
        """Renders the tokens after the last sampled one: the answers to the latest round of calls, and the start of the next turn.

        `messages` make the prompt, `rounds` are all rounds of calls so far. Answers are content: no text in them becomes a control
        token."""

    def follow_up(self, messages: Sequence[Message], rounds: Sequence[Round]) -> tuple[Given, list[int]]:
        """Renders how a conversation continues after the user's words in the last round: the tokens after the last sampled one
        ("user") where the history stays as it was sampled, else the prompt of a new branch ("prompt").

        `messages` make the first prompt; every earlier answer is well-formed. The user's words are content."""

    def parse(self, turns: Sequence[Sequence[int]]) -> ParsedAnswer:
        """Parses the turns of one answer, the last of which calls no tool."""

    def transcript(self, token_ids: Sequence[int]) -> list[dict[str, str | None]]:
        """The messages of one sampled turn, for people and for replays."""

    def said(self, token_ids: Sequence[int]) -> tuple[str | None, str]:
        """The reasoning of a turn and its other text, either as far as the format holds."""

    @property
    def default_system(self) -> str:
        """The system message that the format writes into a conversation without one."""

    @property
    def has_reasoning(self) -> bool:
        """Whether the format can hold reasoning before the answer."""

    def completion_ids(self, reasoning: str, answer: str) -> list[int]:
        """Renders a whole well-formed turn that reasons, unless `reasoning` is empty, and then answers."""

    def supervise(self, messages: Messages, tools: Tools = (), first: int = 0) -> list[Rendered]:
        """Renders a conversation of a dataset as sequences that learn the assistant's messages from index `first` on, except
        messages of weight 0.

        A conversation becomes one sequence wherever the format allows it. What a turn shows only while it is the last (its
        reasoning, which later turns do not see) is learned in its own sequence, which ends with the turn: every learned
        token is predicted from what a policy would have before it. Raises UserError, without file and line, where the format
        cannot express it."""


def natural_format(tokenizer: HarmonyTokenizer) -> NaturalFormat | None:
    """The format that a tokenizer is made for: Harmony where it has all control tokens, else its own chat template, None if it
    has neither.
    """
    try:
        for token in CONTROL_TOKENS:
            tokenizer.special_id(token)
    except UserError:
        return "chat" if getattr(tokenizer, "chat_template", None) is not None else None
    return "harmony"


def end_of_text(tokenizer: HarmonyTokenizer) -> int:
    """The token that ends a text which is no conversation. Raises UserError where the tokenizer has none."""
    try:
        return tokenizer.special_id(END_OF_TEXT)
    except UserError:
        end = tokenizer.named_tokens.get("eos_token") if isinstance(tokenizer, Tokenizer) else None
        if end is None:
            raise UserError(f"the tokenizer has neither {END_OF_TEXT} nor an eos_token to end a text with") from None
        return tokenizer.special_id(end)


def turn_ends(own: Sequence[int], tokenizer: HarmonyTokenizer) -> tuple[int, ...]:
    """The tokens that end a turn: the format's, and the ones that the checkpoint's generation settings name."""
    named = tokenizer.generation_ends if isinstance(tokenizer, Tokenizer) else ()
    return tuple(dict.fromkeys([*own, *named]))
