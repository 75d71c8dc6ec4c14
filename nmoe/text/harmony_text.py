"""Parse a completion from text that spells its control tokens: "<|channel|>final<|message|>42<|return|>".

Only for text from elsewhere, such as a file of recorded predictions. Unlike in token ids, text that looks like a control token
cannot be told from one here.
"""

from __future__ import annotations

from collections.abc import Sequence

from nmoe.text.harmony import Completion, Harmony
from nmoe.text.harmony_format import CALL, CONTROL_TOKENS, RETURN, START


class _ByteTokenizer:
    """Bytes as ids 0 to 255, and the control tokens after them."""

    vocab_size = 256 + len(CONTROL_TOKENS)

    def encode(self, text: str) -> list[int]:
        return list(text.encode(errors="replace"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token_id for token_id in ids if token_id < 256).decode(errors="replace")

    def special_id(self, token: str) -> int:
        return 256 + CONTROL_TOKENS.index(token)


_TOKENIZER = _ByteTokenizer()
_HARMONY = Harmony(_TOKENIZER)


def read_completion(text: str) -> Completion:
    """Parses the completion that a text spells. Its start, "<|start|>assistant", and its last <|return|> may be missing: servers
    omit them.
    """
    text = text.strip().removeprefix(f"{START}assistant")
    if not text.endswith((RETURN, CALL)):
        text += RETURN
    return _HARMONY.parse_completion(_HARMONY.spelled(text))
