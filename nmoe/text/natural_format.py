"""Which form of conversation a tokenizer is made for."""

from __future__ import annotations

from typing import Literal

from nmoe.errors import UserError
from nmoe.text.harmony_format import CONTROL_TOKENS, HarmonyTokenizer

NaturalFormat = Literal["harmony", "chat"]


def natural_format(tokenizer: HarmonyTokenizer) -> NaturalFormat | None:
    """Harmony where the tokenizer has all of its control tokens, else its own chat template; None where it has neither."""
    try:
        for token in CONTROL_TOKENS:
            tokenizer.special_id(token)
    except UserError:
        return "chat" if getattr(tokenizer, "chat_template", None) is not None else None
    return "harmony"
