"""Renders the records of a dataset as token sequences with labels."""

from __future__ import annotations

from nmoe.data.records import Conversation, PromptCompletion, Record, Text
from nmoe.errors import UserError
from nmoe.text.renderers import Rendered, Renderer
from nmoe.text.renderers.base import end_of_text
from nmoe.text.tokenizer import Tokenizer


def render(record: Record, renderer: Renderer, tokenizer: Tokenizer) -> list[Rendered]:
    """The sequences that a text, conversation or completion is trained as. Raises UserError, with the record's place."""
    try:
        match record:
            case Text():
                sequence = Rendered()
                sequence.learn([*tokenizer.encode(record.text), end_of_text(tokenizer)])
                return [sequence]
            case Conversation():
                return renderer.supervise(record.messages, record.tools)
            case PromptCompletion():
                messages = (*record.prompt, *record.completion)
                return renderer.supervise(messages, record.tools, len(record.prompt))
    except UserError as error:
        raise UserError(f"{record.where}: {error}") from None
    raise AssertionError(f"a {type(record).__name__} is not learned as it stands")
