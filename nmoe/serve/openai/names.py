"""The names and bytes of single tokens, as log-probabilities show them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache

from nmoe.text.tokenizer import Tokenizer


class TokenNames:
    """Names tokens: by their text or, where their bytes are no whole characters, by their bytes as OpenAI's API writes them,
    `bytes:\\xe2\\x80`. So tokens of other bytes have other names."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.bytes_of = lru_cache(maxsize=None)(tokenizer.bytes_of)
        self.name = lru_cache(maxsize=None)(self._name)
        self.entry = lru_cache(maxsize=None)(self._entry)
        self.whole = lru_cache(maxsize=None)(self._whole)

    def text(self, token_ids: Iterable[int]) -> str:
        """Returns the text of tokens."""
        return b"".join(map(self.bytes_of, token_ids)).decode("utf-8", "replace")

    def _name(self, token_id: int) -> str:
        text = self.whole(token_id)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes_of(token_id)) if text is None else text

    def _whole(self, token_id: int) -> str | None:
        """The text of a token; None if its bytes are no whole characters."""
        try:
            return self.bytes_of(token_id).decode()
        except UnicodeDecodeError:
            return None

    def _entry(self, token_id: int) -> str:
        """The start of a token's entry in a list of log-probabilities, up to its number: `"token":"a","bytes":[97],"logprob":`."""
        name, raw = json.dumps(self.name(token_id)), list(self.bytes_of(token_id))
        return f'"token":{name},"bytes":{json.dumps(raw, separators=(",", ":"))},"logprob":'
