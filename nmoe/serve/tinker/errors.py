"""Refusals in the form of Tinker's protocol."""

from __future__ import annotations

from typing import Any, Literal

from starlette.responses import Response

from nmoe.engine.server.http import json_reply

Category = Literal["user", "server"]


class TinkerError(Exception):
    """A request that is refused, or a future that fails: `TinkerError("rank = -1: must be 1 or more")`. `category` says to
    the SDK whose fault it is. What fails again is no 409, which the SDK sends for five minutes."""

    def __init__(self, message: str, status: int = 400, category: Category = "user") -> None:
        super().__init__(message)
        self.message, self.status, self.category = message, status, category

    def body(self) -> dict[str, Any]:
        return {"error": self.message, "category": self.category, "detail": self.message}

    def reply(self) -> Response:
        return json_reply(self.body(), self.status)
