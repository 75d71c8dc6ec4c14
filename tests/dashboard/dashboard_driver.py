"""Serves runs in this process, and drives the dashboard's page as somebody at a browser does."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import uvicorn
from playwright.sync_api import Locator, Page

from nmoe.dashboard.server import application, refused
from nmoe.dashboard.state import State
from nmoe.web.guard import guarded


@dataclass
class Server:
    url: str

    def ask(self, name: str, **params: Any) -> Any:
        with urllib.request.urlopen(f"{self.url}data/{name}?{urlencode(params)}") as reply:
            return json.load(reply)


@contextmanager
def serving(*roots: Path, cache: Path | None = None, key: str = "") -> Iterator[Server]:
    state = State(list(roots), cache)
    listening = socket.create_server(("127.0.0.1", 0))
    app: Any = guarded(application(state), key, "127.0.0.1", "NMOE_DASHBOARD_KEY", refused)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1))
    ended = threading.Event()
    threads = [
        threading.Thread(target=lambda: asyncio.run(server.serve([listening])), daemon=True),
        threading.Thread(target=state.index_in_background, args=(ended,), daemon=True),
    ]
    for thread in threads:
        thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Server(f"http://127.0.0.1:{listening.getsockname()[1]}/")
    finally:
        server.should_exit = True
        ended.set()
        for thread in threads:
            thread.join(10)


class Dashboard:
    """The page in a tab."""

    def __init__(self, page: Page) -> None:
        self.page, self.main = page, page.locator("#main")

    def at(self, view: str) -> Locator:
        """Waits until a view is drawn, and returns the page's content."""
        self.page.locator(f"#main[data-ready='{view}']").wait_for()
        return self.main

    def text(self, view: str) -> str:
        return self.at(view).inner_text()
