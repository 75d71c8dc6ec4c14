"""Plain text: no structure between prompt and completion."""

from __future__ import annotations

from nmoe.errors import UserError
from nmoe.text.renderers.base import Messages, Rendered, Tools, end_of_text
from nmoe.text.tokenizer import Tokenizer


class PlainRenderer:
    """No form at all: the completion's text behind the prompt's, then the end of the text."""

    name = "text"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._end = end_of_text(tokenizer)

    def supervise(self, messages: Messages, tools: Tools = (), first: int = 0) -> list[Rendered]:
        asked, said = messages[0], messages[-1]
        if [message.role for message in messages] != ["user", "assistant"] or tools or said.calls or said.reasoning:
            raise UserError('format = "text" is for one prompt and one completion; conversations need harmony or chat')
        sequence = Rendered()
        sequence.read(self._tokenizer.encode(asked.content))
        sequence.learn([*self._tokenizer.encode(said.content), self._end], said.trained)
        return [sequence]
