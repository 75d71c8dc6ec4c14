"""Refusals in the form of OpenAI's API."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from nmoe.engine.server.http import json_reply

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is refused: `ApiError("n = 0: must be 1 to 128", "n")`.

    `param` names the field that is wrong. `code` names the fault for programs, as OpenAI's API does.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.code, self.status, self.headers = message, param, code, status, headers

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def reply(self) -> Response:
        return json_reply(self.body(), self.status, self.headers)
