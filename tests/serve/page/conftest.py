"""A browser, and pages in it that report what they must not do."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from page_driver import Chat, chat_at
from playwright.sync_api import Browser, BrowserContext, sync_playwright

CHROMIUM = shutil.which("chromium")


# Of a module: while it runs, the sync interface of playwright keeps asyncio.run from the thread, which other tests want.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium here")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def open_chat(browser: Browser) -> Iterator[Callable[..., Chat]]:
    """Opens the page of a server. At the test's end no request went elsewhere, and nothing was executed, blocked or failed."""
    opened: list[tuple[BrowserContext, Chat]] = []

    def open_chat(url: str, **options: Any) -> Chat:
        context = browser.new_context(viewport=options.pop("viewport", {"width": 1200, "height": 800}), **options)
        context.set_default_timeout(10_000)
        chat = chat_at(context, url)
        opened.append((context, chat))
        return chat

    yield open_chat
    for context, chat in opened:
        chat.check()
        context.close()
