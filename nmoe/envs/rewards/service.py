"""Rewards from a network service, and its client: limits concurrent requests, gives each attempt a deadline, and retries with
growing waits."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

from nmoe.config.tables.rewards import HttpRewardConfig, ServiceKeys
from nmoe.envs.rewards.reward import Rating, RewardError, Samples, UnavailableError, checked_values
from nmoe.errors import UserError, cut
from nmoe.parsing import json_of

if TYPE_CHECKING:
    import httpx2


# Status codes after which a retry may succeed: timeout, conflict, too early, too many requests; server errors are retried too.
_PASSING = frozenset({408, 409, 425, 429})
# Status codes that reject this request's content, such as a text that is too long. Retries do not help; other requests may pass.
_OF_THE_REQUEST = frozenset({400, 413, 422})
# If a service rejects this many requests and accepts none, the requests themselves are wrong, for example the model's name.
_MOST_REFUSED = 8
_FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
_SHOWN_CHARS = 200


class Service:
    """Client of a service that accepts JSON by POST. `opened` holds its connections; call `post` within it."""

    def __init__(self, settings: ServiceKeys, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        """Reads the token from its environment variable. Raises UserError if it is not set."""
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

        # Semaphore and client belong to the current event loop, and a batch may have its own loop.
        self._free = asyncio.Semaphore(self._settings.concurrency)
        async with httpx2.AsyncClient(
            headers=self._headers, timeout=self._settings.timeout_s, transport=self._transport
        ) as self._client:
            yield

    async def post(self, content: Any) -> Any:
        """Posts JSON and returns the JSON response.

        Raises UnavailableError if every attempt failed or the service rejects this content. Raises RewardError if it rejects
        all such requests, as with a wrong address or token, or has rejected every request so far.
        """
        reason = ""
        for attempt in range(self._settings.retries + 1):
            async with self._free:
                reason, wait_s, value = await self._attempt(content)
            if not reason:
                return value
            if attempt < self._settings.retries:
                await asyncio.sleep(
                    max(wait_s, min(_FIRST_WAIT_S * 2**attempt, LONGEST_WAIT_S) * random.uniform(0.5, 1))
                )
        raise UnavailableError(f"{self._settings.url}, asked {self._settings.retries + 1} times: {reason}")

    async def _attempt(self, content: Any) -> tuple[str, float, Any]:
        """Posts once. Returns the reason of a failure, or ""; the seconds that the service asked to wait; and the response, None on
        failure. Raises UnavailableError if the service rejects this content, and RewardError as `post` does.
        """
        import httpx2

        assert self._client is not None, "a service is asked while it is open"
        timeout_s = self._settings.timeout_s
        try:
            # The client's own timeouts apply to each phase of the exchange; this one applies to the whole.
            async with asyncio.timeout(timeout_s):
                response = await self._client.post(self._settings.url, json=content)
        except (TimeoutError, httpx2.TimeoutException):
            return f"no answer within {timeout_s:g} s", 0.0, None
        except httpx2.TransportError as error:
            return _why_not_reached(error), 0.0, None
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
            return "", 0.0, json_of(response.content)
        except ValueError:
            return f"the answer is not JSON: {said}", 0.0, None

    def _short(self, text: str) -> str:
        """Shortens a service's message and removes the token, which some services echo."""
        text = " ".join(text.split())
        if self._token:
            text = text.replace(self._token, "***")
        return repr(cut(text, _SHOWN_CHARS))


def _why_not_reached(error: BaseException) -> str:
    """Returns the operating system's message for a failed connection, such as "connection refused", which the client wraps in
    several exceptions; without one, the type and message of `error`.
    """
    below: list[BaseException] = [error]
    for one in below:
        if isinstance(one, OSError) and one.errno is not None:
            # The numbers of a resolver's errors are not the system's.
            return (str(one.strerror) if isinstance(one, socket.gaierror) else os.strerror(one.errno)).lower()
        inside = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        below += [
            other for other in (*inside, one.__cause__, one.__context__) if other is not None and other not in below
        ]
    return f"{type(error).__name__}: {error}"


def _retry_after_s(response: httpx2.Response) -> float:
    try:
        return min(max(float(response.headers.get("retry-after", 0)), 0.0), LONGEST_WAIT_S)
    except ValueError:
        return 0.0  # a date: the growing waits suffice


class HttpReward:
    """A reward computed by a service. One request covers one group:

        POST url    {"prompts": ["Sort: 312", ...], "completions": ["123", ...], "columns": {"gold": ["123", ...], ...}}
        200         {"rewards": [1.0, null, ...]}

    Prompts and completions are strings or message lists, as for functions; null leaves the component out.
    """

    def __init__(self, settings: HttpRewardConfig, service: Service | None = None) -> None:
        """Reads the service's token from its environment variable. Raises UserError if the variable is not set."""
        self.name, self.weight = settings.name, settings.weight
        self.only_if_correct = settings.only_if_correct
        self._who = f"reward {settings.name!r} ({settings.url})"
        self._service = service or Service(settings)

    def opened(self) -> AbstractAsyncContextManager[Any]:
        return self._service.opened()

    async def rate(self, samples: Samples) -> Sequence[Rating]:
        count = len(samples.completions)
        content = {
            "prompts": [samples.prompt] * count,
            "completions": list(samples.completions),
            "columns": {name: [value] * count for name, value in samples.columns.items()},
        }
        try:
            answer = await self._service.post(content)
        except UnavailableError as error:
            return [Rating(None, f"reward {self.name!r}: {error}")] * count
        if not isinstance(answer, dict) or not isinstance(answer.get("rewards"), list):
            raise RewardError(f'{self._who} answered {str(answer)[:200]!r}; it has to answer {{"rewards": [...]}}')
        return [Rating(value) for value in checked_values(self._who, answer["rewards"], count)]
