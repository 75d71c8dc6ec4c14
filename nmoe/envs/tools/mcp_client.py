"""A connection to a server of the Model Context Protocol, by the official package: lists the server's tools, and calls them.

Only this module knows the package. Its connections belong to the event loop that opened them.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from typing import IO, Any

from nmoe.config.tables.rollout import OfferedTool, ToolServerSettings
from nmoe.envs.tools.tool import ToolOutput
from nmoe.errors import UserError, cut
from nmoe.extras import needed_by

# Characters of a program's last words that are shown.
_WORDS = 400
# Pages of a list of tools; a server whose list never ends is refused.
_MOST_PAGES = 100
# Seconds until an address has to accept a connection. The caller has deadlines for replies.
_CONNECT_S = 30.0


class PeerError(Exception):
    """A server ended, broke the protocol, or reported an error in place of a tool's reply. `words` is what its program wrote last,
    for the operator alone: it may hold what no record should, so that it is no part of the message."""

    def __init__(self, message: str, words: str = "") -> None:
        super().__init__(message)
        self.words = words


class RefusedArgumentsError(Exception):
    """A server says that it cannot take the arguments of a call, or has no such tool."""


class Peer:
    """A connected server. Its methods raise PeerError, and are cancelled by their caller's deadline."""

    def __init__(self, client: Any, words: IO[bytes] | None, hidden: Mapping[str, str]) -> None:
        """`hidden` are values that its program was given, by the names to show for them."""
        self._client, self._words, self._hidden = client, words, hidden

    async def offers(self) -> tuple[OfferedTool, ...]:
        """Returns the tools as the server lists them now."""
        found: list[OfferedTool] = []
        cursor = None
        for _ in range(_MOST_PAGES):
            try:
                page = await self._client.list_tools(cursor=cursor)
            except Exception as error:
                raise self.error(error) from error
            for tool in page.tools:
                schema = json.dumps(tool.input_schema, ensure_ascii=False, sort_keys=True)
                found.append(OfferedTool(name=tool.name, description=tool.description or "", parameters=schema))
            cursor = page.next_cursor
            if not cursor:
                return tuple(found)
        raise PeerError(f"its list of tools has more than {_MOST_PAGES} pages")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolOutput:
        """Calls a tool, and returns its reply. Raises RefusedArgumentsError for what the server does not take."""
        from mcp import MCPError
        from mcp_types import INVALID_PARAMS

        try:
            reply = await self._client.call_tool(name, dict(arguments))
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise RefusedArgumentsError(error.message) from error
            raise self.error(error) from error
        except Exception as error:
            raise self.error(error) from error
        text = "\n".join(map(_shown, reply.content))
        if not reply.content and reply.structured_content is not None:
            text = json.dumps(reply.structured_content, ensure_ascii=False)
        return ToolOutput(text, "tool_error" if reply.is_error else "ok")

    def error(self, error: BaseException) -> PeerError:
        """Describes a failure."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        return PeerError(f"{type(error).__name__}: {error}", _last(self._words, self._hidden))


@asynccontextmanager
async def connected(settings: ToolServerSettings) -> AsyncIterator[Peer]:
    """Starts a server's program, or connects to its address, and ends both. Raises PeerError if that fails, and UserError for a
    missing package."""
    with needed_by("[[tools.servers]]", "mcp"):
        from mcp import Client
    async with (_over_pipes if settings.url is None else _over_http)(settings) as (transport, words):
        client = Client(transport, cache=None)
        peer = Peer(client, words, _variables(settings))
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(client)
            except Exception as error:
                raise peer.error(error) from error
            yield peer


@asynccontextmanager
async def _over_pipes(settings: ToolServerSettings) -> AsyncIterator[tuple[Any, IO[bytes] | None]]:
    from mcp import StdioServerParameters, stdio_client

    program, *arguments = settings.command
    env = _variables(settings)
    with tempfile.TemporaryFile() as words:
        yield stdio_client(StdioServerParameters(command=program, args=arguments, env=env), errlog=words), words


@asynccontextmanager
async def _over_http(settings: ToolServerSettings) -> AsyncIterator[tuple[Any, IO[bytes] | None]]:
    from mcp.client.streamable_http import streamable_http_client

    http = _http(os.environ.get(settings.token_env) if settings.token_env else None)
    yield streamable_http_client(settings.url, http_client=http), None


@cache
def _http(token: str | None) -> Any:
    """Returns the HTTP client of all connections with a token: to make one, and to connect, takes longer than a call."""
    import httpx2

    return httpx2.AsyncClient(
        headers={} if token is None else {"Authorization": f"Bearer {token}"},
        timeout=httpx2.Timeout(None, connect=_CONNECT_S),
        limits=httpx2.Limits(max_connections=None),  # every session may hold a stream open
        event_hooks={"response": [_refuse_denial]},
    )


async def _refuse_denial(response: Any) -> None:
    """Raises for a key that is not taken, which the package reports as any other error."""
    if response.status_code in (401, 403):
        raise PermissionError(f"{response.url} answered {response.status_code} {response.reason_phrase} (token_env)")


def _variables(settings: ToolServerSettings) -> dict[str, str]:
    """Returns the environment variables that the settings hand to a server's program."""
    return {name: value for name in settings.env if (value := os.environ.get(name)) is not None}


def refuse_missing_variables(settings: ToolServerSettings) -> None:
    """Raises UserError if an environment variable is not set that a server needs."""
    named = [*settings.env, *([settings.token_env] if settings.token_env else [])]
    if missing := [name for name in named if not os.environ.get(name)]:
        raise UserError(
            f"tool server {settings.name!r} needs the environment variable {', '.join(missing)}, which is not set; set it, or take "
            "it out of `env` and `token_env`"
        )


def _shown(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type == "resource" and hasattr(block.resource, "text"):
        return str(block.resource.text)
    if block.type == "resource_link":
        return str(block.uri)
    kind = getattr(block, "mime_type", None) or getattr(getattr(block, "resource", None), "mime_type", None)
    return f"[{block.type} {kind or 'of no kind'}, not shown]"


def _last(words: IO[bytes] | None, hidden: Mapping[str, str]) -> str:
    if words is None or words.closed:
        return ""
    size = os.fstat(words.fileno()).st_size
    said = os.pread(words.fileno(), 4 * _WORDS, max(0, size - 4 * _WORDS)).decode(errors="replace")
    for name, value in hidden.items():
        said = said.replace(value, f"${name}") if value else said
    said = " ".join(said.split())[-_WORDS:]
    return f"; its program wrote: {cut(said, _WORDS)}" if said else ""
