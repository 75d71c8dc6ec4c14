"""Renderers, one for each conversation format: Harmony, a tokenizer's chat template, plain text."""

from __future__ import annotations

from typing import Literal

from nmoe.errors import UserError
from nmoe.text.renderers.base import (
    IGNORED,
    ParsedAnswer,
    ReasoningEffort,
    Rendered,
    Renderer,
    Round,
    natural_format,
)
from nmoe.text.renderers.chat import ChatRenderer
from nmoe.text.renderers.harmony import HarmonyRenderer
from nmoe.text.renderers.plain import PlainRenderer
from nmoe.text.tokenizer import Tokenizer

__all__ = [
    "IGNORED",
    "RENDERERS",
    "ChatRenderer",
    "HarmonyRenderer",
    "ParsedAnswer",
    "PlainRenderer",
    "ReasoningEffort",
    "RenderFormat",
    "Rendered",
    "Renderer",
    "Round",
    "make_renderer",
    "natural_format",
]

RenderFormat = Literal["auto", "harmony", "chat", "text"]

RENDERERS: dict[str, type[HarmonyRenderer] | type[ChatRenderer] | type[PlainRenderer]] = {
    "harmony": HarmonyRenderer,
    "chat": ChatRenderer,
    "text": PlainRenderer,
    "boxed": PlainRenderer,  # the name in environments, whose answers stand in a box
}


def make_renderer(tokenizer: Tokenizer, form: RenderFormat = "auto") -> Renderer:
    """Creates the renderer of a format. "auto" is the tokenizer's own format: Harmony if it has Harmony's control tokens, else its
    chat template. Raises UserError if it has neither, or lacks the tokens or the template that a named format needs."""
    if form == "auto":
        natural = natural_format(tokenizer)
        if natural is None:
            raise UserError(
                'the tokenizer has neither Harmony\'s control tokens nor a chat template; use another one, or format = "text", '
                "which puts completions behind prompts as they are"
            )
        form = natural
    return RENDERERS[form](tokenizer)
