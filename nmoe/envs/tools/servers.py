"""Servers whose tools the policy calls, as [[tools.servers]] names them.

A server describes its tools when a run begins, and the settings keep the descriptions: prompts and replays need no server, and a
server that offers other tools later is an error. Connections live in a thread with its own event loop, since the engine's loop
changes from batch to batch.

A server that answers nothing is no fault of the policy's: the sample is masked, and the next call gets a new connection. One that
answers, but not the call, has a tool that takes long by what the policy gave it: that is a failed call.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from functools import cache, cached_property
from typing import Any, TypeVar

from nmoe.background import Background
from nmoe.config.tables.rollout import OfferedTool, ToolServerSettings, ToolsSettings
from nmoe.cores import usable_cores
from nmoe.envs.tools.mcp_client import (
    Peer,
    PeerError,
    RefusedArgumentsError,
    connected,
    refuse_missing_variables,
)
from nmoe.envs.tools.tool import NAME, ArgumentsError, Tool, ToolOutput, shortened, simplified
from nmoe.errors import UserError, shown
from nmoe.extras import needed_by
from nmoe.parsing import is_deep, json_of
from nmoe.text.conversation import ToolDefinition
from nmoe.text.renderers.harmony import unshown

T = TypeVar("T", ToolsSettings, ToolsSettings | None)

# The connections, which a loop alone does not keep.
_LIVE: set[Connection] = set()
# Seconds that their programs have to end in, when the process ends.
_END_S = 5.0
# A server that is lost so often, and answers nothing in between, is broken: the run stops. Each new start waits twice as long.
MOST_LOSSES = 10
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 30.0
REMEDY = "leave it out of `use`, which names the tools that the policy may call"
# Programs that start at once, for each core: hundreds of episodes may begin in the same moment.
_STARTS_PER_CORE = 2
# Seconds in which a server lists its tools after a call that took too long, or is lost.
_ANSWER_S = 5.0
# A server's list of tools is read again with the first call after so many seconds, or after a loss.
_CHECK_S = 60.0


class ToolServerError(UserError):
    """A server cannot be used: it has other tools than the run began with, or is lost again and again."""


class LostError(Exception):
    """A server did not answer a call."""


class ServerTool(Tool):
    """A tool of a server. The server's JSON schema is the check of its arguments."""

    def __init__(self, server: ToolServer, offer: OfferedTool) -> None:
        """Raises UserError for a name or a schema that no prompt can show."""
        self.server, self.offered = server, offer.name
        self.name = server.settings.rename.get(offer.name, offer.name)
        self.where = where = f"tool {offer.name!r} of the server {server.settings.name!r}"
        if not NAME.fullmatch(self.name):
            raise UserError(
                f"{where}: a tool's name is letters, digits and _, at most 64, not {self.name!r}; give it another one in "
                f"`rename`, or {REMEDY}"
            )
        schema = json_of(offer.parameters)
        if not isinstance(schema, dict) or schema.get("type", "object") != "object" or is_deep(schema):
            raise UserError(f"{where}: its parameters are no JSON schema of an object, or too deeply nested; {REMEDY}")
        if (other := _unknown_reference(schema, schema.get("$defs") or {})) is not None:
            raise UserError(f"{where}: its parameters refer to {other!r}, which its schema does not define; {REMEDY}")
        self.schema: dict[str, Any] = schema
        self.sandbox_parameter = None
        plain = {key: value for key, value in simplified(schema, {}).items() if key != "$schema"}
        self.definition = ToolDefinition(self.name, offer.description, plain if plain.get("properties") else None)

    def parse(self, arguments: str) -> dict[str, Any]:
        try:
            given = json_of(arguments.strip() or "{}")
        except ValueError as error:
            raise ArgumentsError(shortened(f"Invalid JSON: {error}")) from error
        if not isinstance(given, dict):
            raise ArgumentsError("the arguments should be an object")
        if is_deep(given):
            raise ArgumentsError("arrays or objects nested too deeply")
        try:
            # No message can carry a lone surrogate or an infinite number, and the server would count as lost.
            json.dumps(given, ensure_ascii=False, allow_nan=False).encode()
            faults = [
                f"{one.json_path.removeprefix('$.')}: {one.message}" for one in self._validator.iter_errors(given)
            ]
        except (ValueError, OverflowError) as error:
            raise ArgumentsError(shortened(f"they cannot be sent: {error}")) from error
        if faults:
            raise ArgumentsError(shortened("; ".join(faults[:3])))
        return given

    def check_schema(self) -> None:
        """Raises UserError if the schema is none."""
        from jsonschema import SchemaError

        try:
            self._validator.check_schema(self.schema)
        except SchemaError as error:
            raise UserError(f"{self.where}: its parameters are no JSON schema: {error.message}") from None

    @cached_property
    def _validator(self) -> Any:
        with needed_by("[[tools.servers]]", "mcp"):
            from jsonschema import Draft202012Validator
            from jsonschema.validators import validator_for
            from referencing import Registry
        return validator_for(self.schema, Draft202012Validator)(self.schema, registry=Registry())  # it fetches nothing


class ToolServer:
    """A server of [[tools.servers]] with its connections. `settings.offers` are the tools that it listed."""

    def __init__(self, settings: ToolServerSettings) -> None:
        self.settings = settings
        self.tools = [ServerTool(self, offer) for offer in settings.offers or ()]
        self._shared: Connection | None = None
        self._losses, self._lost_at = 0, 0.0
        self._checked = float("-inf")

    async def call(
        self, own: dict[ToolServer, Connection], tool: ServerTool, arguments: Mapping[str, Any], seconds: float
    ) -> ToolOutput:
        """Calls a tool. `own` holds the episode's connections.

        The reply has the failure "timeout" if it does not come within so many seconds after the server has started. Raises
        LostError if the server does not answer at all, and ToolServerError for one that cannot be used.
        """
        refuse_missing_variables(self.settings)
        return await background().awaited(self._call(own, tool, arguments, seconds))

    def close(self) -> None:
        """Closes the connection that all episodes share."""
        connection, self._shared = self._shared, None
        if connection is not None:
            connection.end()

    async def _call(
        self, own: dict[ToolServer, Connection], tool: ServerTool, arguments: Mapping[str, Any], seconds: float
    ) -> ToolOutput:
        connection = own.get(self) if self.settings.scope == "episode" else self._shared
        if connection is None:
            connection = Connection(self.settings, self._wait_s())
            if self.settings.scope == "episode":
                own[self] = connection
            else:
                self._shared = connection
        connection.calls += 1
        try:
            peer = await connection.peer()
            async with asyncio.timeout(seconds):
                if time.monotonic() - self._checked > _CHECK_S:
                    await self._check(peer)
                try:
                    output = await peer.call(tool.offered, arguments)
                except RefusedArgumentsError as error:
                    await self._check(peer)  # it refuses a tool that is gone likewise
                    reason = f"the arguments are not what {tool.name} takes: {error}"
                    output = ToolOutput("", "parse_error", shortened(reason))
        except TimeoutError:
            reason = f"{tool.name} took longer than {seconds:g} s"
            try:
                async with asyncio.timeout(_ANSWER_S):
                    await self._check(peer)
            except (TimeoutError, PeerError):
                raise self._lost(connection, own, reason) from None
            # The server answers, so the call is what takes long, and its arguments are the policy's.
            output = ToolOutput("", "timeout", reason)
        except PeerError as error:
            raise self._lost(connection, own, str(error), error.words) from error
        except asyncio.CancelledError:
            # The episode has ended, maybe before it knew of this connection.
            if own.get(self) is connection:
                del own[self]
                connection.retired = True
            raise
        finally:
            connection.calls -= 1
            if connection.retired and not connection.calls:
                connection.end()
        self._losses = 0
        return output

    async def _check(self, peer: Peer) -> None:
        """Reads the server's list of tools. Raises ToolServerError if they differ from the settings."""
        offers = _selected(self.settings, await peer.offers())
        if (difference := _difference(self.settings.offers or (), offers)) is not None:
            raise ToolServerError(
                f"tool server {self.settings.name!r} has other tools than when the run began: {difference}. Prompts and records "
                "are of those: put the server back, or begin another run, from settings without `offers`"
            )
        self._checked = time.monotonic()

    def _wait_s(self) -> float:
        return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (self._losses - 1)) if self._losses else 0.0

    def _lost(self, connection: Connection, own: dict[ToolServer, Connection], why: str, words: str = "") -> Exception:
        """Returns the error of a call without a reply, after which the next call gets another connection. The `words` of its
        program go to stderr alone, because the error is recorded."""
        connection.retired, self._checked = True, float("-inf")
        if own.get(self) is connection:
            del own[self]
        if self._shared is connection:
            self._shared = None
        # Of many connections that are lost at once, one counts.
        said = f"tool server {self.settings.name!r}: {why}"
        if connection.began >= self._lost_at:
            self._losses, self._lost_at = self._losses + 1, time.monotonic()
            if words:
                print(f"warning: {said}{words}", file=sys.stderr, flush=True)
        if self._losses >= MOST_LOSSES:
            return ToolServerError(
                f"{said}; it was lost {self._losses} times in a row, and answered nothing in between"
            )
        return LostError(said)


class Connection:
    """A connection to a server, on the thread of the servers, until it is ended."""

    def __init__(self, settings: ToolServerSettings, wait_s: float = 0.0) -> None:
        """Begins to connect after so many seconds."""
        self.calls, self.retired = 0, False
        self.began = time.monotonic()
        self._settings, self._wait_s = settings, wait_s
        self._peer: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()
        self.closing = asyncio.Event()
        self.task = asyncio.create_task(self._live())
        _LIVE.add(self)
        self.task.add_done_callback(lambda _: _LIVE.discard(self))

    async def peer(self) -> Peer:
        """Returns the server when it is connected. Raises PeerError if it cannot be."""
        return await asyncio.shield(self._peer)

    def end(self) -> None:
        """Has the connection closed, without waiting for that. May be called from any thread."""
        background().call(self.closing.set)

    async def _live(self) -> None:
        try:
            await asyncio.sleep(self._wait_s)
            async with AsyncExitStack() as start:
                await start.enter_async_context(_starts())
                async with asyncio.timeout(self._settings.start_s) as clock, connected(self._settings) as peer:
                    clock.reschedule(None)
                    await start.aclose()
                    self._peer.set_result(peer)
                    await self.closing.wait()
        except BaseException as error:
            if isinstance(error, TimeoutError):
                error = PeerError(f"it has not started within {self._settings.start_s:g} s")
            if not self._peer.done():
                self._peer.set_exception(error)
                self._peer.exception()  # counts as seen
            if not isinstance(error, Exception):
                raise


def pinned(tools: T) -> T:
    """Returns the settings with the tools of each server as it lists them now, where they lack them. Starts these servers.

    Raises UserError, which names the server, if one cannot be started, lacks a variable of the environment or has tools that no
    prompt can show.
    """
    if tools is None or all(server.offers is not None for server in tools.servers):
        return tools
    for server in tools.servers:
        refuse_missing_variables(server)
    return tools.model_copy(update={"servers": tuple(map(_listed, tools.servers))})


def server_tools(settings: ToolsSettings) -> list[ServerTool]:
    """Returns the tools of all servers. The settings have been `pinned`."""
    return [tool for server in settings.servers for tool in ToolServer(server).tools]


def refuse_unshown(tools: Iterable[Tool]) -> None:
    """Raises UserError for a server's tool with parameters that Harmony's TypeScript does not show."""
    for tool in tools:
        if isinstance(tool, ServerTool) and (hidden := unshown(tool.definition.parameters)) is not None:
            raise UserError(
                f"{tool.where}: Harmony cannot show its parameter {hidden!r}, which its schema gives no single type; {REMEDY}, or "
                'render by a chat template (format = "chat")'
            )


def close_servers(tools: Iterable[Tool]) -> None:
    """Closes the connections that all episodes share."""
    for server in {tool.server for tool in tools if isinstance(tool, ServerTool)}:
        server.close()


@cache
def background() -> Background:
    """The thread of all connections, which are closed when the process ends."""
    thread = Background("tool-servers", "the process ends, and its tool servers with it")
    atexit.register(_end, thread)
    return thread


def _end(thread: Background) -> None:
    """Closes all connections, and then ends their thread: a task that is cancelled would leave its program to itself."""

    async def closed() -> None:
        tasks = [connection.task for connection in _LIVE]
        for connection in _LIVE:
            connection.closing.set()
        if tasks:
            await asyncio.wait(tasks, timeout=_END_S)

    thread.wait(closed())
    thread.end()


@cache
def _starts() -> asyncio.Semaphore:
    return asyncio.Semaphore(_STARTS_PER_CORE * usable_cores())


def _listed(settings: ToolServerSettings) -> ToolServerSettings:
    if settings.offers is not None:
        return settings

    async def listed() -> tuple[OfferedTool, ...]:
        connection = Connection(settings)
        try:
            return await (await connection.peer()).offers()
        finally:
            connection.end()

    try:
        offers = background().wait(listed())
    except PeerError as error:
        raise UserError(f"tool server {settings.name!r} cannot be used: {error}{error.words}") from error
    names = [offer.name for offer in offers]
    if missing := [name for name in (*settings.use, *settings.rename) if name not in names]:
        raise UserError(
            f"tool server {settings.name!r} has no tool {missing[0]!r}; it has {', '.join(names) or 'none'}"
        )
    if not offers:
        raise UserError(f"tool server {settings.name!r} has no tools")
    found = settings.model_copy(update={"offers": _selected(settings, offers)})
    for tool in ToolServer(found).tools:
        tool.check_schema()
    return found


def _selected(settings: ToolServerSettings, offers: Iterable[OfferedTool]) -> tuple[OfferedTool, ...]:
    return tuple(offer for offer in offers if not settings.use or offer.name in settings.use)


def _difference(before: Iterable[OfferedTool], now: Iterable[OfferedTool]) -> str | None:
    """Describes the first difference of two lists, whose order does not count."""
    old, new = {offer.name: offer for offer in before}, {offer.name: offer for offer in now}
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            return f"{name!r} is gone"
        if name not in old:
            return f"{name!r} is new"
        if old[name].description != new[name].description:
            return f"{name!r} is described as {shown(new[name].description)}, and was as {shown(old[name].description)}"
        if old[name].parameters != new[name].parameters:
            return f"{name!r} takes {shown(new[name].parameters, 200)}, and took {shown(old[name].parameters, 200)}"
    return None


def _unknown_reference(schema: Any, definitions: Mapping[str, Any]) -> str | None:
    """Returns the first reference in a schema to anything but its own definitions."""
    if isinstance(schema, list):
        return next(filter(None, (_unknown_reference(one, definitions) for one in schema)), None)
    if not isinstance(schema, dict):
        return None
    reference = schema.get("$ref", "#/$defs/")
    if not isinstance(reference, str) or reference.removeprefix("#/$defs/") not in (*definitions, ""):
        return str(reference)
    return _unknown_reference(list(schema.values()), definitions)
