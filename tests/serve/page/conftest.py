"""A browser with one tab, and chats in it that report what a page must not do."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest
from page_driver import Chat, Tab
from playwright.sync_api import Browser, sync_playwright

CHROMIUM = shutil.which("chromium")


# Of a module: while it runs, the sync interface of playwright keeps asyncio.run from the thread, which other tests want.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium here")
    arguments = ["--no-sandbox", "--disable-gpu", "--in-process-gpu", "--disable-software-rasterizer"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Iterator[Tab]:
    """One for all tests: a new one costs two CPU seconds."""
    context = browser.new_context()
    context.set_default_timeout(20_000)
    yield Tab(context)
    context.close()


@pytest.fixture
def open_chat(tab: Tab) -> Iterator[Callable[..., Chat]]:
    """Opens the page of a server as somebody who was never there. When it is left, no request went elsewhere, and nothing was
    executed, blocked or failed."""
    yield tab.open
    tab.leave()
