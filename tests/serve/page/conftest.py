"""A tab with chats in it that report what a page must not do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from browser import browser as browser
from page_driver import Chat, ChatTab
from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Iterator[ChatTab]:
    """One for all tests: a new one costs two CPU seconds."""
    context = browser.new_context()
    context.set_default_timeout(20_000)
    yield ChatTab(context)
    context.close()


@pytest.fixture
def open_chat(tab: ChatTab) -> Iterator[Callable[..., Chat]]:
    """Opens the page of a server as somebody who was never there."""
    yield tab.open
    tab.leave()
