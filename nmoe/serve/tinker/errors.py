"""Refusals in the form of Tinker's protocol."""

from __future__ import annotations

from typing import Any, Literal

from starlette.responses import Response

from nmoe.engine.server.http import json_reply
from nmoe.errors import cut

# Of a message, which may repeat what the client sent.
_MOST_CHARACTERS = 2000

Category = Literal["user", "server"]


class TinkerError(Exception):
    """A request that is refused, or a future that fails: `TinkerError("rank = -1: must be 1 or more")`. `category` says to
    the SDK whose fault it is. What fails again is no 409, which the SDK sends for five minutes."""

    def __init__(self, message: str, status: int = 400, category: Category = "user") -> None:
        self.message, self.status, self.category = cut(message, _MOST_CHARACTERS), status, category
        super().__init__(self.message)

    def body(self) -> dict[str, Any]:
        return {"error": self.message, "category": self.category, "detail": self.message}

    def reply(self) -> Response:
        return json_reply(self.body(), self.status)
