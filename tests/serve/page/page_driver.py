"""Drives the chat page as somebody at a browser does."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from playwright.sync_api import BrowserContext, Locator, Page, expect

# In the page before its own scripts: what the policy blocked, and whether anything that a text holds was executed.
_WATCH = """
window.blocked = [];
window.executed = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.blocked.push(`${event.violatedDirective} ${event.blockedURI} ${event.sample}`);
});
window.alert = window.pwned = (...what) => window.executed.push(String(what));
"""


@dataclass
class Chat:
    """The page in a tab."""

    page: Page

    def send(self, text: str) -> None:
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def say(self, text: str) -> Locator:
        """Sends a message, and returns the whole answer."""
        self.send(text)
        return self.answered()

    def answered(self) -> Locator:
        expect(self.page.locator("#stop")).to_be_hidden()
        return self.last("assistant")

    def last(self, role: str) -> Locator:
        return self.page.locator(f".message.{role}").last

    def texts(self, role: str) -> list[str]:
        return self.page.locator(f".message.{role} .body").all_inner_texts()

    def tokens(self, message: Locator) -> Locator:
        """Shows a message's tokens."""
        message.get_by_role("button", name="Tokens", exact=True).click()
        return message.locator(".token")

    def stored(self) -> list[dict[str, Any]]:
        entries = self.page.evaluate("Object.entries(localStorage)")
        return [json.loads(text) for key, text in entries if key.startswith("nmoe.chat.")]


class Tab:
    """A tab of the browser, in which one chat after the other is opened."""

    def __init__(self, context: BrowserContext) -> None:
        self._context = context
        self._url = ""
        self._asked: list[str] = []
        self._failures: list[str] = []
        context.add_init_script(_WATCH)
        self._page = context.new_page()
        self._storage = context.new_cdp_session(self._page)
        context.on("request", lambda request: self._asked.append(request.url))
        self._page.on("pageerror", lambda error: self._failures.append(str(error)))
        self._page.on("console", lambda said: self._note(said.type, said.text))

    def open(self, url: str, width: int = 1200, height: int = 800, scheme: Literal["light", "dark"] = "light") -> Chat:
        if self._url:
            self.leave()
        self._url = url
        page = self._page
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.goto(url)
        # The server's answers, or the key's dialog.
        page.locator("#model:not(:empty), #key-dialog[open]").first.wait_for(state="attached")
        return Chat(page)

    def leave(self) -> None:
        page = self._page
        seen = page.evaluate("[window.executed, window.blocked]")
        page.evaluate("sessionStorage.clear()")
        page.goto("about:blank")
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
