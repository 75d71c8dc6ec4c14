"""Log-probabilities of tokens in the two forms of OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from nmoe.serve.openai.names import TokenNames

LEAST = -9999.0
"""What stands for a log-probability of minus infinity, which JSON cannot say."""


def chat_entries(names: TokenNames, tokens: Iterable[tuple[int, Any]], with_ids: bool, ids_as_tokens: bool) -> str:
    """Returns the list `logprobs.content` of sampled tokens and their raw log-probabilities, as JSON."""

    def entry(token_id: int, logprob: float) -> str:
        shown = f'"token_id":{token_id},' if with_ids else ""
        named = f'"token":"token_id:{token_id}","bytes":null,"logprob":' if ids_as_tokens else names.entry(token_id)
        return f"{shown}{named}{max(logprob, LEAST)!r}"

    def whole(token_id: int, raw: Any) -> str:
        top = ",".join(f"{{{entry(*alternative)}}}" for alternative in raw.top)
        return f'{{{entry(token_id, raw.logprob)},"top_logprobs":[{top}]}}'

    return f"[{','.join(whole(*one) for one in tokens)}]"


class TextLogprobs:
    """Collects `logprobs` of a completion: tokens, their log-probabilities, alternatives, and where each begins in the text."""

    def __init__(self, names: TokenNames, ids_as_tokens: bool) -> None:
        self._names, self._ids_as_tokens = names, ids_as_tokens
        self._offset, self._bytes = 0, b""  # characters so far, and bytes of one that is not whole

    def table(self, tokens: Sequence[tuple[int, Any]]) -> dict[str, Any]:
        """Returns the table of the next tokens; a token without a log-probability has None."""
        name = (lambda token: f"token_id:{token}") if self._ids_as_tokens else self._names.name
        return {
            "tokens": [name(token) for token, _ in tokens],
            "token_logprobs": [None if raw is None else max(raw.logprob, LEAST) for _, raw in tokens],
            "top_logprobs": [None if raw is None else self._top(token, raw, name) for token, raw in tokens],
            "text_offset": [self._next(token) for token, _ in tokens],
        }

    def _top(self, token: int, raw: Any, name: Any) -> dict[str, float]:
        """Returns the alternatives by name, the sampled token among them; the likeliest goes first."""
        top = [*raw.top, *([] if any(one == token for one, _ in raw.top) else [(token, raw.logprob)])]
        return {name(one): max(logprob, LEAST) for one, logprob in reversed(top)} if top else {}

    def _next(self, token: int) -> int:
        return self._offset


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
