"""Drives the chat page as somebody at a browser does."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

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
    url: str
    asked: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

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

    def check(self) -> None:
        assert self.page.evaluate("window.executed") == []
        assert self.page.evaluate("window.blocked") == []
        assert self.failures == []
        others = [url for url in self.asked if not url.startswith((self.url, f"blob:{self.url}"))]
        assert others == []


def chat_at(context: BrowserContext, url: str) -> Chat:
    context.add_init_script(_WATCH)
    page = context.new_page()
    chat = Chat(page, url)
    context.on("request", lambda request: chat.asked.append(request.url))
    page.on("pageerror", lambda error: chat.failures.append(str(error)))
    page.on("console", lambda said: _note(chat, said.type, said.text))
    page.goto(url)
    expect(page.locator("#chat-list")).to_be_attached()
    return chat


def _note(chat: Chat, kind: str, text: str) -> None:
    # The browser itself reports a status above 399, and a connection that breaks off.
    if kind in ("error", "warning") and not re.match(r"Failed to load resource", text):
        chat.failures.append(text)
