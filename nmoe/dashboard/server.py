"""The server of `nmoe dashboard`: the page's files, and answers in JSON."""

from __future__ import annotations

import asyncio
import math
import os
import sqlite3
import sys
import threading
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from nmoe.dashboard.index import cache_directory
from nmoe.dashboard.page import PAGE
from nmoe.dashboard.state import State
from nmoe.engine.server.http import json_reply, unless_gone
from nmoe.engine.server.listening import check_key, listening
from nmoe.errors import UserError
from nmoe.web import HEADERS
from nmoe.web.guard import Refusal, guarded

KEY = "NMOE_DASHBOARD_KEY"
EXPLAIN_S = 300.0
"""Seconds that deriving a token may take, after others that were asked for before."""
_HEADERS = HEADERS | {"cache-control": "no-store"}


def application(state: State) -> Starlette:
    """Returns the ASGI application that answers from a state."""
    one_at_a_time = asyncio.Semaphore(1)

    async def answer(asking: Request) -> Response:
        found = state.answers.get(asking.path_params["name"])
        if found is None:
            raise HTTPException(404)
        try:
            reply = await asyncio.to_thread(found, dict(asking.query_params))
        except (UserError, KeyError, ValueError, OverflowError) as error:
            return json_reply({"error": str(error)}, 404 if isinstance(error, UserError) else 400, _HEADERS)
        except sqlite3.Error as error:
            return json_reply({"error": f"the index of the samples cannot be read: {error}"}, 503, _HEADERS)
        return json_reply(finite(reply), headers=_HEADERS)

    async def explain(asking: Request) -> Response:
        try:
            lines = await unless_gone(asking, explained(state, dict(asking.query_params), one_at_a_time))
        except ClientDisconnect:
            return Response(status_code=499)
        except (UserError, KeyError, ValueError) as error:
            return json_reply({"error": str(error)}, 404 if isinstance(error, UserError) else 400, _HEADERS)
        return json_reply({"lines": lines}, headers=_HEADERS)

    routes = [Route("/data/explain", explain, methods=["POST"]), Route("/data/{name}", answer)]
    return Starlette(routes=[*PAGE.routes(), *routes])


def finite(value: Any) -> Any:
    """Returns a value with None in place of numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return value


async def explained(state: State, params: dict[str, str], one_at_a_time: asyncio.Semaphore) -> list[str]:
    """Derives a token's numbers again by `nmoe explain`, in another process: the server holds no weights. The process ends with
    the call. Code that a run names is not executed. Raises UserError if nmoe refuses, or takes longer than EXPLAIN_S."""
    run = state.path_of(params)
    numbers = [str(int(params[name])) for name in ("step", "line", "token")]
    async with one_at_a_time:
        process = await asyncio.create_subprocess_exec(
            # -P: a module in the directory of the server is not nmoe's.
            sys.executable, "-P", "-m", "nmoe", "explain", "--", str(run), *numbers, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            async with asyncio.timeout(EXPLAIN_S):
                said, error = await process.communicate()
        except TimeoutError:
            command = f"nmoe explain {run} {' '.join(numbers)}"
            raise UserError(
                f"it took more than {EXPLAIN_S:g} s, and was ended; in a terminal nothing ends `{command}`"
            ) from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    lines = said.decode(errors="replace").splitlines()
    if process.returncode not in (0, 1) or not lines:
        raise UserError(
            error.decode(errors="replace").strip()[-2000:] or f"nmoe explain ended with {process.returncode}"
        )
    return lines


def refused(refusal: Refusal) -> Response:
    return json_reply({"error": refusal.message}, refusal.status, refusal.headers)


def serve(roots: list[Path], host: str, port: int) -> None:
    """Serves the dashboard of the runs below `roots` until a signal ends it. Raises UserError for a root that is no directory, or
    where nothing can listen."""
    key = os.environ.get(KEY, "")
    check_key(host, key, KEY, "read the runs")
    state = State(roots, cache_directory())
    bound = listening(host, port)
    app: Any = guarded(application(state), key, host, KEY, refused)
    config = uvicorn.Config(
        app, http="httptools", ws="none", lifespan="off", log_level="error", access_log=False, server_header=False,
        timeout_graceful_shutdown=2,
    )  # fmt: skip
    ended = threading.Event()
    worker = threading.Thread(target=state.index_in_background, args=(ended,), daemon=True)
    worker.start()
    at, number = bound.getsockname()[:2]
    print(f"dashboard at http://{f'[{at}]' if ':' in at else at}:{number}/", flush=True)
    try:
        asyncio.run(uvicorn.Server(config).serve([bound]))
    finally:
        ended.set()
        worker.join()
