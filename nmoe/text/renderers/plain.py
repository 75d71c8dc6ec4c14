"""Renders and parses plain text, without structure between prompt and completion."""

from __future__ import annotations

from collections.abc import Sequence

from nmoe.errors import UserError
from nmoe.text.calls.pieces import TurnReader
from nmoe.text.calls.reader import Marks, TemplateReader, TextTurn
from nmoe.text.conversation import ToolDefinition
from nmoe.text.harmony import HarmonyTokenizer
from nmoe.text.renderers.base import (
    Messages,
    ParsedAnswer,
    ReasoningEffort,
    Rendered,
    Round,
    Tools,
    end_of_text,
    turn_ends,
)
from nmoe.text.streaming import decoder_of
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Given, Message, ToolCall, ToolEvent


class PlainRenderer:
    r"""Plain text, for models without a conversation format.

    A prompt is the messages' text, with a blank line between them and a line break at the end. Nothing is added: an instruction to
    use `\boxed{}` belongs in an environment's `system`. In supervised data, prompt and completion are concatenated unchanged.
    """

    name = "text"
    has_reasoning = True
    default_system = ""

    def __init__(
        self,
        tokenizer: HarmonyTokenizer,
        tools: Sequence[ToolDefinition] = (),
        effort: ReasoningEffort | None = None,
    ) -> None:
        assert not tools, "the settings refuse tools here"
        assert effort is None, "and an effort too"
        self._tokenizer = tokenizer
        self._end = end_of_text(tokenizer)
        self.stop_ids = turn_ends((self._end,), tokenizer)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        return self._tokenizer.encode("\n\n".join(message.content for message in messages) + "\n")

    def chat_ids(self, messages: Messages, tools: Tools = ()) -> list[int]:
        if tools or any(message.calls or message.role == "tool" for message in messages):
            raise UserError('format = "text" has no tools; leave them out, or use a model with a chat template')
        return self.prompt_ids([Message(message.role, message.content) for message in messages])

    def reader(self, prompt_ids: Sequence[int], tools: Tools = ()) -> TurnReader:
        assert isinstance(self._tokenizer, Tokenizer), "chats have a tokenizer of Hugging Face files"
        marks = Marks(self._tokenizer, None, self.stop_ids)
        return TemplateReader(decoder_of(self._tokenizer), marks, TextTurn(None, {}, {}, tags=False))

    def calls(self, turn: int, token_ids: Sequence[int]) -> list[ToolCall]:
        return []

    def answer_calls(self, messages: Sequence[Message], rounds: Sequence[Sequence[ToolEvent]]) -> list[int]:
        raise AssertionError("there are no calls to answer")

    def follow_up(self, messages: Sequence[Message], rounds: Sequence[Round]) -> tuple[Given, list[int]]:
        """Continues the branch with the user's words on a separate line."""
        return "user", self._tokenizer.encode(f"\n{rounds[-1].user}\n")

    def parse(self, turns: Sequence[Sequence[int]]) -> ParsedAnswer:
        (completion_ids,) = turns
        return ParsedAnswer(self._text(completion_ids))

    def transcript(self, token_ids: Sequence[int]) -> list[dict[str, str | None]]:
        return [{"content": self._tokenizer.decode(token_ids)}]

    def said(self, token_ids: Sequence[int]) -> tuple[str | None, str]:
        return None, self._text(token_ids)

    def completion_ids(self, reasoning: str, answer: str) -> list[int]:
        return [*self._tokenizer.encode(f"{reasoning} {answer}" if reasoning else answer), self._end]

    def supervise(self, messages: Messages, tools: Tools = (), first: int = 0) -> list[Rendered]:
        asked, said = messages[0], messages[-1]
        if [message.role for message in messages] != ["user", "assistant"] or tools or said.calls or said.reasoning:
            raise UserError('format = "text" is for one prompt and one completion; conversations need harmony or chat')
        sequence = Rendered()
        sequence.read(self._tokenizer.encode(asked.content))
        sequence.learn([*self._tokenizer.encode(said.content), self._end], said.trained)
        return [sequence]

    def _text(self, token_ids: Sequence[int]) -> str:
        ended = bool(token_ids) and token_ids[-1] in self.stop_ids
        return self._tokenizer.decode(token_ids[:-1] if ended else token_ids)
