"""Environments of OpenEnv, played over the WebSocket of their server: `reset`, `step`, `state`.

A record names the server, and the parts of the protocol that are text:

    {"url": "http://127.0.0.1:8000", "action": "message", "shows": "echoed_message", "reset": {"start": 5}}

The policy's turn, without reasoning, becomes the field `action` of an action, to which `others` adds fixed fields. The prompt and
the next messages are the field `shows` of the observation, or the whole observation as JSON; `prompt` is a text before the first
one. `reset` gets the group's seed as `seed`, unless the record has another.

The protocol writes a missing reward as null, and a reward that is not a number, too. So a step without a reward stops the run,
unless the record has `reward_if_none`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from nmoe.envs.tasks.conversation import AssistantTurn
from nmoe.envs.tasks.live import LiveEpisode
from nmoe.envs.tasks.own import Prompt, Record
from nmoe.errors import InfrastructureError, UserError, shown
from nmoe.extras import needed_by

# Bytes of an observation.
_MOST_BYTES = 16 * 2**20
# Environments keep seeds in 32 bits, as numpy does.
_SEEDS = 2**31


class OpenEnvEpisode(LiveEpisode):
    """Plays the environment that a record names."""

    url: str | None = None
    action: str | None = None
    others: Mapping[str, Any] = {}
    shows: str | None = None
    reward_if_none: float | None = None
    _socket: Any = None

    @classmethod
    def check_record(cls, record: Record) -> None:
        refuse_address(record.get("url", cls.url), ("http://", "https://", "ws://", "wss://"), "openenv")
        if not isinstance(action := record.get("action", cls.action), str) or not action:
            raise UserError(
                f"`action` of a record for openenv names the field of an action that gets the policy's text, not {action!r}"
            )

    async def open(self, record: Record, seed: int) -> Prompt:
        for name in ("url", "action", "others", "shows", "reward_if_none"):
            setattr(self, name, record.get(name, getattr(self, name)))
        address = str(self.url).removeprefix("ws").removeprefix("http").rstrip("/")
        self._socket = await _connected(f"ws{address}/ws")
        first = await self._ask("reset", {"seed": seed % _SEEDS, **record.get("reset", {})})
        if first["done"]:
            raise UserError("the environment is done before the policy has said anything")
        said = self._shown(first["observation"])
        before = record.get("prompt")
        return said if not isinstance(before, str) or not isinstance(said, str) else f"{before}\n\n{said}".strip()

    async def step(self, turn: AssistantTurn) -> tuple[Prompt | None, float, bool]:
        answered = await self._ask("step", {**self.others, str(self.action): turn.text})
        self.info = {"metadata": answered.get("metadata") or {}}
        reward = self.reward_if_none if answered.get("reward") is None else answered["reward"]
        if reward is None:
            raise UserError(
                "a step came without a reward, or with one that is not a number, which look the same in the protocol; if it "
                "is right that some steps have none, set `reward_if_none`"
            )
        if answered["done"]:
            self.info = {**self.info, "state": await self._asked("state", None)}
            return None, reward, True
        return self._shown(answered["observation"]), reward, False

    async def close(self) -> None:
        if self._socket is not None:
            try:
                with suppress(Exception):  # it may be lost, which nothing depends on any more
                    await self._socket.send(json.dumps({"type": "close"}))
            finally:
                await self._socket.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the observation of a reset or a step, with its reward."""
        answered = await self._asked(kind, data)
        if not isinstance(answered.get("observation"), Mapping) or not isinstance(answered.get("done"), bool):
            raise UserError(f"its {kind} was answered with {shown(answered)}, which is no observation")
        return answered

    async def _asked(self, kind: str, data: Mapping[str, Any] | None) -> dict[str, Any]:
        await self._socket.send(json.dumps({"type": kind} if data is None else {"type": kind, "data": data}))
        try:
            answer = json.loads(await self._socket.recv())
            is_error, content = answer["type"] == "error", dict(answer["data"])
        except (ValueError, TypeError, LookupError) as error:
            raise UserError(f"its {kind} was not answered in the protocol of OpenEnv: {error}") from error
        if not is_error:
            return content
        said = f"{content.get('code')}: {content.get('message')} {content.get('errors') or ''}".strip()
        if content.get("code") in ("CAPACITY_REACHED", "SESSION_ERROR"):
            raise InfrastructureError(said)
        raise UserError(f"its {kind} was answered with the error {said}")

    def _shown(self, observation: Any) -> Any:
        """Returns what the policy sees of an observation."""
        if self.shows is None:
            kept = {name: value for name, value in observation.items() if name != "metadata"}
            return json.dumps(kept, ensure_ascii=False)
        for name in self.shows.split("."):
            if not isinstance(observation, Mapping) or name not in observation:
                raise UserError(f"`shows` = {self.shows!r} is not in the observation {shown(observation, 200)}")
            observation = observation[name]
        return observation


def refuse_address(url: Any, schemes: tuple[str, ...], task: str) -> None:
    """Raises UserError unless `url` is a server's address without a password."""
    if not isinstance(url, str) or not url.startswith(schemes) or not urlsplit(url).hostname:
        raise UserError(
            f"`url` of a record for {task} is the address of a server, such as http://127.0.0.1:8000, not {url!r}; give it to all "
            "records by `record_defaults` of the task pool"
        )
    if "@" in urlsplit(url).netloc:
        raise UserError(f"`url` of a record for {task} has a user or a password, which would be recorded")


async def _connected(address: str) -> Any:
    """Returns an open WebSocket."""
    with needed_by("the task openenv", "openenv"):
        from websockets.asyncio.client import connect
    # The caller bounds the time.
    return await connect(address, open_timeout=None, ping_interval=None, max_size=_MOST_BYTES, compression=None)
