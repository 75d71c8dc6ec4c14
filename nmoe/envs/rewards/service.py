"""A service on the network, asked politely: so many requests at once, each attempt under a deadline, and again after growing waits
where that can help."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from nmoe.config.tables.rewards import ServiceKeys
from nmoe.envs.rewards.reward import RewardError, UnavailableError
from nmoe.errors import UserError

if TYPE_CHECKING:
    import httpx2

# Answers after which another attempt may fare better: busy, too early, too many requests, and the server's own troubles.
_PASSING = frozenset({408, 409, 425, 429})
# Those to what this one request says, such as a text that is too long. No other attempt helps, other requests may be welcome.
_OF_THE_REQUEST = frozenset({400, 413, 422})
# A service that has refused so many and accepted none is asked in a way that it does not take, such as with a model's wrong name.
_MOST_REFUSED = 8
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0
_SHOWN_CHARS = 200


class Service:
    """One URL that JSON is posted to. `opened` keeps connections while it is in force; `post` works within it."""

    def __init__(self, settings: ServiceKeys, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        """Reads the token from its environment variable. Raises UserError where that is not set."""
        self._settings = settings
        self._who = f"reward {settings.name!r} ({settings.url})"
        self._headers: dict[str, str] = {}
        self._token = ""
        if settings.token_env is not None:
            self._token = os.environ.get(settings.token_env, "").strip()
            if not self._token:
                raise UserError(
                    f"{self._who}: the environment variable {settings.token_env} that token_env names is not set"
                )
            self._headers["Authorization"] = f"Bearer {self._token}"
        self._transport = transport
        self._client: httpx2.AsyncClient | None = None
        self._free = asyncio.Semaphore(settings.concurrency)
        self._accepted = self._refused = 0

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        import httpx2

        # Both belong to the event loop that runs now, and every batch has one of its own.
        self._free = asyncio.Semaphore(self._settings.concurrency)
        async with httpx2.AsyncClient(
            headers=self._headers, timeout=self._settings.timeout_s, transport=self._transport
        ) as self._client:
            yield

    async def post(self, content: Any) -> Any:
        """The JSON that comes back. Raises UnavailableError when every attempt failed or the service cannot take this content,
        and RewardError where it refuses requests like this, as with a wrong address or token, or has refused all that it got."""
        reason = ""
        for attempt in range(self._settings.retries + 1):
            async with self._free:
                reason, wait_s, value = await self._attempt(content)
            if not reason:
                return value
            if attempt < self._settings.retries:
                await asyncio.sleep(
                    max(wait_s, min(_FIRST_WAIT_S * 2**attempt, _LONGEST_WAIT_S) * random.uniform(0.5, 1))
                )
        raise UnavailableError(f"{self._settings.url}, asked {self._settings.retries + 1} times: {reason}")

    async def _attempt(self, content: Any) -> tuple[str, float, Any]:
        """Why it failed, or "" and the answer; and how long the service asked to be left alone."""
        import httpx2

        assert self._client is not None, "a service is asked while it is open"
        timeout_s = self._settings.timeout_s
        try:
            # The client's own deadlines are for each part of the exchange; this one is for all of it.
            async with asyncio.timeout(timeout_s):
                response = await self._client.post(self._settings.url, json=content)
        except (TimeoutError, httpx2.TimeoutException):
            return f"no answer within {timeout_s:g} s", 0.0, None
        except httpx2.TransportError as error:
            return f"{type(error).__name__}: {error}", 0.0, None
        said = self._short(response.text)
        if response.status_code in _PASSING or response.status_code >= 500:
            return f"status {response.status_code}: {said}", _retry_after_s(response), None
        if response.status_code in _OF_THE_REQUEST:
            self._refused += 1
            if not self._accepted and self._refused >= _MOST_REFUSED:
                raise RewardError(
                    f"{self._who}: the service has refused all of its first {self._refused} requests, this one with status "
                    f"{response.status_code}: {said}"
                )
            raise UnavailableError(f"{self._settings.url}: status {response.status_code}: {said}")
        if response.status_code != 200:
            raise RewardError(
                f"{self._who}: the service refuses the request with status {response.status_code}: {said}"
            )
        self._accepted += 1
        try:
            return "", 0.0, json.loads(response.content)
        except (ValueError, RecursionError):
            return f"the answer is not JSON: {said}", 0.0, None

    def _short(self, text: str) -> str:
        """What a service said, without the token, which some repeat to whoever sent a wrong one."""
        text = " ".join(text.split())
        if self._token:
            text = text.replace(self._token, "***")
        return repr(text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "...")


def _retry_after_s(response: httpx2.Response) -> float:
    try:
        return min(max(float(response.headers.get("retry-after", 0)), 0.0), _LONGEST_WAIT_S)
    except ValueError:
        return 0.0  # a date: the growing waits do
