"""The interface of renderers, which convert between messages and token ids in one conversation format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from nmoe.errors import UserError
from nmoe.text.calls.pieces import TurnReader
from nmoe.text.conversation import ChatMessage, ToolDefinition
from nmoe.text.harmony import CONTROL_TOKENS, END_OF_TEXT, HarmonyTokenizer
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Given, Message, ToolCall, ToolEvent

IGNORED = -100
"""The label of a token that the loss leaves out, the same as in transformers."""

Messages = tuple[ChatMessage, ...]
Tools = tuple[ToolDefinition, ...]

NaturalFormat = Literal["harmony", "chat"]

ReasoningEffort = Literal["low", "medium", "high"]
"""How much a model is asked to reason, in the levels of the gpt-oss models."""


@dataclass
class Rendered:
    """A token sequence with labels for training: `Rendered([5, 6, 7, 2], [-100, -100, 7, 2])` learns to predict 7 and 2.

    A label is the token to predict at its position. It equals the token there, except for the stop token of an earlier turn: a
    final message ends in <|return|> when it is sampled (the label), and in <|end|> when more follows (the token).
    """

    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)

    def read(self, ids: Sequence[int]) -> None:
        """Appends tokens that the loss leaves out."""
        self.ids += ids
        self.labels += [IGNORED] * len(ids)

    def learn(self, ids: Sequence[int], learned: bool = True) -> None:
        self.ids += ids
        self.labels += ids if learned else [IGNORED] * len(ids)

    @property
    def learned(self) -> int:
        """The number of tokens in the loss."""
        return sum(label != IGNORED for label in self.labels)

    def until_learned(self) -> Rendered:
        """Returns the sequence up to its last learned token, since later tokens would be read for nothing; empty if none is
        learned."""
        end = max((index for index, label in enumerate(self.labels) if label != IGNORED), default=-1) + 1
        return Rendered(self.ids[:end], self.labels[:end])

    @property
    def positions(self) -> int:
        """The number of positions that a model runs to learn the sequence, and that its context has to hold: one less than the
        tokens, since the last one is never an input."""
        return max(0, len(self.ids) - 1)

    def copy(self) -> Rendered:
        return Rendered(list(self.ids), list(self.labels))


@dataclass(frozen=True)
class ParsedAnswer:
    """An answer of one or more turns, parsed: `ParsedAnswer("42", well_formed=True, structure=1.0, reasoned=True)`.

    `text` is the answer without its reasoning, "" if there is none. `well_formed` says whether it follows the format: every turn
    parses, the last one ends by itself, and the answer is not blank; None for plain text, which has no format. `structure` is
    partial credit for the format, 1 if well-formed and less otherwise. `reasoned` says whether there is reasoning before the
    answer.
    """

    text: str
    well_formed: bool | None = None
    structure: float = 0.0
    reasoned: bool = False


@dataclass(frozen=True)
class Round:
    """A part of a conversation: the policy's turns since the last user message, the tools' answers to the calls of each turn, and
    the user message that follows."""

    turns: Sequence[Sequence[int]]
    answers: Sequence[Sequence[ToolEvent]]
    user: str


class Renderer(Protocol):
    """A conversation format in both directions: renders messages as token ids, and parses sampled ids.

    `name` is the value of `format` in a configuration. `calls`, `parse`, `transcript` and `said` never raise: they read any ids.
    """

    name: str

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids of the tokens that end a turn when the policy samples them."""

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Renders a conversation and the start of the assistant's next turn."""

    def chat_ids(self, messages: Messages, tools: Tools = ()) -> list[int]:
        """Renders a chat's whole conversation, in which messages may have reasoning and calls, and the start of the assistant's
        next turn. `tools` are declared beside it; no text in them becomes a control token. Raises UserError for what the format
        cannot express."""

    def reader(self, prompt_ids: Sequence[int], tools: Tools = ()) -> TurnReader:
        """Returns a reader for the turn that is sampled after these tokens. Without tools, no calls are read in it."""

    def calls(self, turn: int, token_ids: Sequence[int]) -> list[ToolCall]:
        """Returns the tool calls of a turn; none for the last turn of an answer, well-formed or not. `turn` is the turn's index in
        the answer, with which the ids of the calls begin."""

    def answer_calls(self, messages: Sequence[Message], rounds: Sequence[Sequence[ToolEvent]]) -> list[int]:
        """Renders the tokens after the last sampled token of a turn with calls: the answers to the latest round of calls, and the
        start of the next turn.

        `messages` make the prompt, `rounds` are all rounds of calls so far. No text in an answer becomes a control token.
        """

    def follow_up(self, messages: Sequence[Message], rounds: Sequence[Round]) -> tuple[Given, list[int]]:
        """Renders how a conversation continues after the user's words in the last round: ("user", the tokens after the last sampled
        token) if the history stays as it was sampled, else ("prompt", the whole prompt of a new branch).

        `messages` make the first prompt; every earlier answer is well-formed. No text of the user's becomes a control token.
        """

    def parse(self, turns: Sequence[Sequence[int]]) -> ParsedAnswer:
        """Parses the turns of one answer, the last of which calls no tool."""

    def transcript(self, token_ids: Sequence[int]) -> list[dict[str, str | None]]:
        """Returns the messages of one turn that the policy sampled as dictionaries, for people and for replays."""

    def said(self, token_ids: Sequence[int]) -> tuple[str | None, str]:
        """Returns a turn's reasoning (None if there is none) and its other text, as far as the turn follows the format."""

    @property
    def default_system(self) -> str:
        """The system message that the format adds to a conversation without one; "" if it adds none."""

    @property
    def has_reasoning(self) -> bool:
        """Whether the format can hold reasoning before the answer."""

    def completion_ids(self, reasoning: str, answer: str) -> list[int]:
        """Renders a whole well-formed turn: the reasoning, unless it is empty, and the answer."""

    def supervise(self, messages: Messages, tools: Tools = (), first: int = 0) -> list[Rendered]:
        """Renders a dataset's conversation as training sequences, which learn the assistant's messages from index `first` on,
        except messages of weight 0.

        A conversation becomes one sequence if the format allows it. Reasoning that later turns do not see is learned in a separate
        sequence, which ends with its turn: every learned token is predicted from the context that a policy would have before it.
        Raises UserError, without file and line, if the format cannot express the conversation.
        """


def natural_format(tokenizer: HarmonyTokenizer) -> NaturalFormat | None:
    """Returns the format that a tokenizer is made for: Harmony if it has all of Harmony's control tokens, else its own chat
    template; None if it has neither."""
    try:
        for token in CONTROL_TOKENS:
            tokenizer.special_id(token)
    except UserError:
        return "chat" if getattr(tokenizer, "chat_template", None) is not None else None
    return "harmony"


def end_of_text(tokenizer: HarmonyTokenizer) -> int:
    """Returns the token that ends a text outside conversations. Raises UserError if the tokenizer has none."""
    try:
        return tokenizer.special_id(END_OF_TEXT)
    except UserError:
        end = tokenizer.named_tokens.get("eos_token") if isinstance(tokenizer, Tokenizer) else None
        if end is None:
            raise UserError(f"the tokenizer has neither {END_OF_TEXT} nor an eos_token to end a text with") from None
        return tokenizer.special_id(end)


def turn_ends(own: Sequence[int], tokenizer: HarmonyTokenizer) -> tuple[int, ...]:
    """Returns the tokens that end a turn: the format's, then the ones that the checkpoint's generation settings name."""
    named = tokenizer.generation_ends if isinstance(tokenizer, Tokenizer) else ()
    return tuple(dict.fromkeys([*own, *named]))
