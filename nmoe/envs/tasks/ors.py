"""Environments of the Open Reward Standard (ORS), played over HTTP: a session for each episode, its prompt, and calls of one tool.

A record names a task of an environment, and the tool that gets the policy's text:

    {"url": "http://127.0.0.1:8080", "env": "sums", "split": "train", "index": 3, "tool": "submit", "field": "answer"}

The policy's turn, without reasoning, becomes the field `field` of a call of `tool`, to which `others` adds fixed fields. The
returned blocks are the next message, the rewards add up, and `finished` ends the episode. `task_spec` may stand for `split` and
`index`, and `token_env` names the variable with the key of the server.

JSON writes a missing reward as null, and a reward that is not a number, too. So a call without a reward stops the run, unless the
record has `reward_if_none`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx2

from nmoe.envs.tasks.conversation import AssistantTurn
from nmoe.envs.tasks.live import LiveEpisode
from nmoe.envs.tasks.openenv import refuse_address
from nmoe.envs.tasks.own import Prompt, Record
from nmoe.errors import InfrastructureError, UserError, shown

# A server gives up sessions that it has heard nothing of for 15 minutes, and a policy may wait longer for its turn.
_PING_S = 60.0
_KEYS = ("url", "env", "tool", "field", "others", "token_env", "reward_if_none")


class OrsEpisode(LiveEpisode):
    """Plays the task that a record names."""

    url: str | None = None
    env: str | None = None
    tool: str | None = None
    field: str | None = None
    others: Mapping[str, Any] = {}
    token_env: str | None = None
    reward_if_none: float | None = None
    _client: httpx2.AsyncClient | None = None
    _pinging: asyncio.Task[None] | None = None

    @classmethod
    def check_record(cls, record: Record) -> None:
        refuse_address(record.get("url", cls.url), ("http://", "https://"), "ors")
        for name in ("env", "tool", "field"):
            if not isinstance(value := record.get(name, getattr(cls, name)), str) or not value:
                raise UserError(f"a record for ors needs `{name}`, and it is {value!r}")
        if "task_spec" not in record and not {"split", "index"} <= record.keys():
            raise UserError("a record for ors names a task by `split` and `index`, or has its `task_spec`")

    async def open(self, record: Record, seed: int) -> Prompt:
        for name in _KEYS:
            setattr(self, name, record.get(name, getattr(self, name)))
        named = ("task_spec",) if "task_spec" in record else ("split", "index")
        task = {name: record[name] for name in named}
        self._client = _client(str(self.url), _key(self.token_env))
        try:
            async for event, data in self._events("/create_session", {}):
                if event == "task_id":
                    self._client.headers["X-Session-ID"] = data.strip()
        except httpx2.ConnectError as error:
            raise InfrastructureError(f"no server at {self.url}: {error}") from error
        await self._json("POST", "/create", {"env_name": self.env, **task})
        self._pinging = asyncio.create_task(self._ping())
        return _text(await self._json("GET", f"/{self.env}/prompt"))

    async def step(self, turn: AssistantTurn) -> tuple[Prompt | None, float, bool]:
        call = {"name": self.tool, "input": {**self.others, str(self.field): turn.text}}
        pieces = [data async for event, data in self._events(f"/{self.env}/call", call) if event in ("chunk", "end")]
        answered = json.loads("".join(pieces) or "null")
        if not isinstance(answered, Mapping) or not answered.get("ok"):
            raise UserError(
                f"the tool {self.tool} failed: {answered.get('error') if answered else 'it returned nothing'}"
            )
        output: Mapping[str, Any] = answered["output"]
        self.info = {"metadata": output.get("metadata") or {}}
        reward = self.reward_if_none if output.get("reward") is None else output["reward"]
        if reward is None:
            raise UserError(
                f"the tool {self.tool} returned no reward, or one that is not a number, which look the same in JSON; if it is "
                "right that some calls have none, set `reward_if_none`"
            )
        finished = bool(output.get("finished"))
        return None if finished else _text(output["blocks"]), reward, finished

    async def close(self) -> None:
        if self._pinging is not None:
            self._pinging.cancel()
        if self._client is not None:
            try:
                if "X-Session-ID" in self._client.headers:
                    await self._json("POST", "/delete")
            finally:
                await self._client.aclose()

    async def _json(self, method: str, path: str, body: Any = None) -> Any:
        assert self._client is not None, "made by `open`"
        response = await self._client.request(method, path, json=body)
        _refuse_failure(path, response)
        return response.json()

    async def _events(self, path: str, body: Any) -> AsyncIterator[tuple[str, str]]:
        """Yields the server-sent events of a reply, up to the one that ends it."""
        assert self._client is not None, "made by `open`"
        async with self._client.stream("POST", path, json=body, headers={"Accept": "text/event-stream"}) as response:
            if response.is_error:
                await response.aread()
            _refuse_failure(path, response)
            event, data = "", list[str]()
            async for line in response.aiter_lines():
                name, _, value = line.partition(":")
                if name == "event":
                    event = value.removeprefix(" ")
                elif name == "data":
                    data.append(value.removeprefix(" "))
                elif not line and event:
                    if event == "error":
                        raise UserError(f"{path} failed: {' '.join(data)}")
                    yield event, "\n".join(data)
                    if event == "end":
                        return
                    event, data = "", []
        raise InfrastructureError(f"{path} ended before its result")

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(_PING_S)
            with suppress(httpx2.HTTPError, InfrastructureError, UserError):  # the next call reports the fault
                await self._json("POST", "/ping")


def _client(url: str, key: str | None) -> httpx2.AsyncClient:
    # The caller bounds the time.
    headers = {} if key is None else {"X-API-Key": key}
    return httpx2.AsyncClient(
        base_url=url.rstrip("/"), headers=headers, timeout=None, verify=url.startswith("https://")
    )


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not (key := os.environ.get(variable)):
        raise UserError(f"the server needs the environment variable {variable} (token_env), which is not set")
    return key


def _refuse_failure(path: str, response: httpx2.Response) -> None:
    """Raises InfrastructureError for a server that is busy or out of order, and UserError for one that refuses a request."""
    if response.status_code in (408, 425, 429, 502, 503, 504):
        raise InfrastructureError(f"{path} answered {response.status_code}")
    if response.is_error:
        raise UserError(f"{path} answered {response.status_code}: {shown(response.text, 300)}")


def _text(blocks: Any) -> str:
    if not isinstance(blocks, Sequence) or not all(isinstance(one, Mapping) for one in blocks):
        raise UserError(f"{shown(blocks)} are no blocks of text")
    if (other := next((one.get("type") for one in blocks if one.get("type") != "text"), None)) is not None:
        raise UserError(f"the environment shows a block of the type {other!r}, and nmoe shows text alone")
    return "\n\n".join(str(one["text"]) for one in blocks)
