"""Renderer: one conversation format in both directions, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from nmoe.errors import UserError
from nmoe.text.conversation import ChatMessage, ToolDefinition
from nmoe.text.harmony_format import CONTROL_TOKENS, END_OF_TEXT, HarmonyTokenizer
from nmoe.text.tokenizer import Tokenizer

IGNORED = -100
"""The label of a token that is not learned, as in transformers."""

Messages = tuple[ChatMessage, ...]
Tools = tuple[ToolDefinition, ...]

NaturalFormat = Literal["harmony", "chat"]


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
    """One conversation format. `name` is that of the configuration."""

    name: str

    def supervise(self, messages: Messages, tools: Tools = (), first: int = 0) -> list[Rendered]:
        """Renders a conversation of a dataset as sequences that learn the assistant's messages from index `first` on, except
        those of weight 0.

        A conversation becomes one sequence wherever the format allows it. What a turn shows only while it is the last (its
        reasoning, which later turns do not see) is learned in a sequence of its own, which ends with the turn: every learned
        token is predicted from what a policy would have before it. Raises UserError, without the record's place, where the
        format cannot express it."""


def natural_format(tokenizer: HarmonyTokenizer) -> NaturalFormat | None:
    """Harmony where the tokenizer has all of its control tokens, else its own chat template; None where it has neither."""
    try:
        for token in CONTROL_TOKENS:
            tokenizer.special_id(token)
    except UserError:
        return "chat" if getattr(tokenizer, "chat_template", None) is not None else None
    return "harmony"


def end_of_text(tokenizer: Tokenizer) -> int:
    """The token that ends a text which is no conversation."""
    if tokenizer.has_special(END_OF_TEXT):
        return tokenizer.special_id(END_OF_TEXT)
    end = tokenizer.named_tokens.get("eos_token")
    if end is None:
        raise UserError(f"the tokenizer has neither {END_OF_TEXT} nor an eos_token to end a text with")
    return tokenizer.special_id(end)
