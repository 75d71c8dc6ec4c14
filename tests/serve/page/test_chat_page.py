"""The chat page in Chromium, at a server that says what the test wants."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from page_driver import Chat
from playwright.sync_api import expect
from scripted_server import Scripted, ended, said, scripted

Open = Callable[..., Chat]


@pytest.fixture(scope="module")
def serving() -> Iterator[Scripted]:
    with scripted() as server:
        yield server


@pytest.fixture
def server(serving: Scripted) -> Scripted:
    serving.forget()
    return serving


@pytest.fixture
def chat(server: Scripted, open_chat: Open) -> Chat:
    return open_chat(server.url)


def test_an_answer_streams(server: Scripted, chat: Chat) -> None:
    server.say([*said("Hello", " **you**", "."), *ended()])
    answer = chat.say("Hi\n<b>there</b>")
    expect(answer.locator(".body")).to_have_text("Hello you.")
    assert answer.locator("strong").inner_text() == "you"
    assert chat.texts("user") == ["Hi\n<b>there</b>"]
    assert server.bodies == [
        {
            "model": "scripted",
            "messages": [{"role": "user", "content": "Hi\n<b>there</b>"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "logprobs": True,
            "top_logprobs": 8,
            "return_experts": True,
        }
    ]
