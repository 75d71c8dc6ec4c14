"""The limits of a server: what one request may ask for, and how many run at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nmoe.web.openai.errors import ApiError


@dataclass(frozen=True)
class Limits:
    """Limits of requests. `prompt_tokens = 0`: the model's context is the limit. Times are in seconds."""

    body_bytes: int = 16 * 2**20
    body_s: float = 60.0
    prompt_tokens: int = 0
    prompts: int = 2048
    samples: int = 128
    stops: int = 16
    requests: int = 512
    request_s: float = 600.0
    stalled_s: float = 30.0
    drain_s: float = 30.0


class Admission:
    """Counts the requests that run or wait, and refuses more than `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.admitted = 0

    @contextmanager
    def admit(self, others: int = 0) -> Iterator[None]:
        """Counts a request while the `with` block runs. Raises ApiError (429) if as many run as may, with the `others` that this
        does not count."""
        if self.admitted + others >= self._most:
            raise ApiError(
                f"{self._most} requests are running or waiting; try again later",
                code="rate_limit_exceeded",
                status=429,
                headers={"Retry-After": "1"},
            )
        self.admitted += 1
        try:
            yield
        finally:
            self.admitted -= 1
