"""A browser with one tab, for the tests of pages: a page may run and ask for nothing but its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Literal

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

expect.set_options(timeout=30_000)  # a busy machine takes seconds for a page
CHROMIUM = shutil.which("chromium")
# In the page before its own scripts: what the policy blocked, and whether anything that a text holds was executed.
_WATCH = """
window.blocked = [];
window.executed = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.blocked.push(`${event.violatedDirective} ${event.blockedURI} ${event.sample}`);
});
window.alert = window.pwned = (...what) => window.executed.push(String(what));
"""


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


class Tab:
    """A tab of the browser, in which one page after the other is opened. When it is left, no request went elsewhere, and nothing
    was executed, blocked or failed."""

    def __init__(self, context: BrowserContext) -> None:
        self._context = context
        self._url = ""
        self._asked: list[str] = []
        self._failures: list[str] = []
        context.add_init_script(_WATCH)
        self.page = context.new_page()
        self._storage = context.new_cdp_session(self.page)
        context.on("request", lambda request: self._asked.append(request.url))
        self.page.on("pageerror", lambda error: self._failures.append(str(error)))
        self.page.on("console", lambda said: self._note(said.type, said.text))

    def visit(
        self, url: str, width: int = 1200, height: int = 800, scheme: Literal["light", "dark"] = "light", at: str = ""
    ) -> Page:
        """Opens a page as somebody who was never there; `at` is added to its address."""
        if self._url:
            self.leave()
        self._url = url
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        self.page.goto(url + at)
        return self.page

    def leave(self) -> None:
        page = self.page
        seen = page.evaluate("[window.executed, window.blocked]")
        page.evaluate("sessionStorage.clear()")
        page.goto("about:blank")
        if not self._url.startswith("file:"):
            self._storage.send("Storage.clearDataForOrigin", {"origin": self._url, "storageTypes": "local_storage"})
        self._context.clear_permissions()
        self._context.set_offline(False)
        asked, failures, url = self._asked[:], self._failures[:], self._url
        self._asked.clear()
        self._failures.clear()
        self._url = ""
        assert seen == [[], []]
        assert failures == []
        assert [one for one in asked if not one.startswith((url, f"blob:{url}", "about:blank"))] == []

    def _note(self, kind: str, text: str) -> None:
        # The browser itself reports a status above 399, and a connection that breaks off.
        if kind in ("error", "warning") and not text.startswith("Failed to load resource"):
            self._failures.append(text)
