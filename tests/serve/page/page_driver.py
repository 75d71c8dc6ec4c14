"""Drives the chat page as somebody at a browser does."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from browser import Tab
from playwright.sync_api import Locator, Page, expect


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


class ChatTab(Tab):
    """A tab in which one chat after the other is opened."""

    def open(self, url: str, width: int = 1200, height: int = 800, scheme: Literal["light", "dark"] = "light") -> Chat:
        page = self.visit(url, width, height, scheme)
        # The server's answers, or the key's dialog.
        page.locator("#model:not(:empty), #key-dialog[open]").first.wait_for(state="attached")
        return Chat(page)
