"""The chat page at `nmoe serve`: what it shows is what the server's routes say for the same request."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from page_driver import Chat
from PIL import Image
from playwright.sync_api import Browser, expect
from served_client import Client

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
import page_screenshots

CHAT = "/v1/chat/completions"
Open = Callable[..., Chat]


@pytest.fixture
def chat(client: Client, open_chat: Open) -> Chat:
    return open_chat(f"{str(client.http.base_url).rstrip('/')}/")


def settle(chat: Chat, **settings: str) -> None:
    """Sets settings of the chat by their labels."""
    chat.page.locator("#open-settings").click()
    for label, value in settings.items():
        chat.page.locator("#settings").get_by_label(label.replace("_", " "), exact=True).fill(value)
    chat.page.keyboard.press("Escape")


def percents(entries: list[dict[str, Any]]) -> list[float]:
    return [math.exp(one["logprob"]) for one in entries]


def shown_percents(texts: list[str]) -> list[float]:
    return [float(text.split()[-1].removesuffix("%")) / (100 if text.endswith("%") else 1) for text in texts]


def test_an_answer_its_tokens_and_their_experts_are_the_servers(client: Client, chat: Chat) -> None:
    settle(chat, Seed="5", Most_tokens="12", System_prompt="Be brief.")
    answer = chat.say("6 * 7?")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 * 7?"}]
    asked = {"messages": messages, "seed": 5, "max_tokens": 12, "logprobs": True, "top_logprobs": 8}
    reply = client.ask(CHAT, **asked, return_token_ids=True, return_experts=True)
    (choice,) = reply["choices"]
    (stored,) = chat.stored()
    (node,) = (node for node in stored["nodes"].values() if node["role"] == "assistant")
    assert node["content"] == choice["message"]["content"]
    assert [token[0] for token in node["tokens"]] == choice["token_ids"]
    assert node["usage"] == [reply["usage"]["prompt_tokens"], 12]
    entries = choice["logprobs"]["content"]
    assert [token[2] for token in node["tokens"]] == pytest.approx([one["logprob"] for one in entries], abs=1e-4)
    assert [token[4] for token in node["tokens"]] == choice["experts"]
    assert node["experts"] == choice["expert_count"]
    tokens = chat.tokens(answer)
    expect(tokens).to_have_count(12)
    tokens.nth(3).click()
    rows = answer.locator(".alternative").all_inner_texts()
    top = entries[3]["top_logprobs"]
    taken = [] if any(one["token_id"] == entries[3]["token_id"] for one in top) else [entries[3]]
    assert shown_percents(rows) == pytest.approx(percents([*top, *taken]), rel=0.01)
    layers = [" ".join(map(str, chosen)) for chosen in choice["experts"][3]]
    assert [
        row.partition("layer ")[2].split(" ", 1)[1] for row in answer.locator(".experts li").all_inner_texts()
    ] == layers


def test_an_answer_goes_on_from_another_token_as_the_server_says(client: Client, chat: Chat) -> None:
    settle(chat, Seed="7", Most_tokens="10")
    answer = chat.say("Hello")
    asked = {"messages": [{"role": "user", "content": "Hello"}], "seed": 7, "max_tokens": 10}
    ids = client.ask(CHAT, **asked, return_token_ids=True)["choices"][0]["token_ids"]
    chat.tokens(answer).nth(4).click()
    row = answer.locator(".alternative:enabled").first
    other = row.get_attribute("aria-label")
    row.click()
    branch = chat.answered()
    (stored,) = chat.stored()
    node = stored["nodes"][branch.get_attribute("data-id")]
    begun = [token[0] for token in node["tokens"][:5]]
    assert begun[:4] == ids[:4]
    assert begun[4] != ids[4]
    assert other is not None
    assert other.startswith("Go on from ")
    (choice,) = client.ask(CHAT, **asked, continue_token_ids=begun, echo=True, return_token_ids=True)["choices"]
    assert [token[0] for token in node["tokens"][5:]] == choice["token_ids"]
    assert node["content"] == choice["message"]["content"]
    assert branch.locator(".branches .number").inner_text() == "2 / 2"


def test_stop_ends_generation_on_the_server(client: Client, chat: Chat) -> None:
    # Greedy, a model of random weights repeats itself, and would fill its context.
    settle(chat, Temperature="0")
    chat.send("On and on")
    expect(chat.last("assistant").locator(".counts")).to_contain_text("token")
    chat.page.keyboard.press("Escape")
    answer = chat.answered()
    deadline = time.monotonic() + 5
    while client.metric("nmoe_requests_open") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert client.metric("nmoe_requests_open") == 0
    (stored,) = chat.stored()
    shown = sum(len(node.get("tokens") or []) for node in stored["nodes"].values())
    assert 0 < shown < 3500
    click_on = answer.get_by_role("button", name="Go on")
    settle(chat, Most_tokens="5")
    click_on.click()
    chat.answered()
    (stored,) = chat.stored()
    (node,) = (node for node in stored["nodes"].values() if node["role"] == "assistant")
    asked = {"messages": [{"role": "user", "content": "On and on"}], "temperature": 0, "max_tokens": shown + 5}
    (choice,) = client.ask(CHAT, **asked, return_token_ids=True)["choices"]
    assert [token[0] for token in node["tokens"]] == choice["token_ids"]
    assert node["content"] == choice["message"]["content"]


def test_markup_in_the_models_own_tokens_is_not_executed(client: Client, chat: Chat, tmp_path: Path) -> None:
    """The tokens of an imported answer are text that the server itself sends when the answer goes on."""
    attack = "<img src=x onerror=pwned(1)> [a](javascript:pwned(2))"
    ids = client.ask("/tokenize", prompt=attack, add_special_tokens=False)["tokens"]
    tokens = [[one, "?", -1.0, [], None] for one in ids]
    answer = {"id": "b", "parent": "a", "role": "assistant", "content": "", "tokens": tokens, "finish": "stopped"}
    nodes = {"a": {"id": "a", "parent": "", "role": "user", "content": attack}, "b": answer}
    one = {
        "id": "m1",
        "title": attack,
        "updated": 1,
        "system": "",
        "tools": "",
        "settings": {"max_tokens": 2},
        "nodes": nodes,
    }
    one["chosen"] = {"": "a", "a": "b"}
    (tmp_path / "x.json").write_text(json.dumps({"format": "nmoe-chats", "version": 1, "chats": [one]}))
    chat.page.locator("#import-file").set_input_files(tmp_path / "x.json")
    chat.last("assistant").get_by_role("button", name="Go on").click()
    body = chat.answered().locator(".body")
    expect(body).to_contain_text("<img src=x onerror=pwned(1)> a")
    assert body.locator("img").count() == 0
    assert body.locator("a[href]").count() == 0


def test_a_refusal_is_shown_as_the_server_words_it(client: Client, chat: Chat) -> None:
    long = "word " * 5000
    error = client.refusal(CHAT, messages=[{"role": "user", "content": long}])
    assert chat.say(long).locator(".trouble .error").inner_text() == error["message"]


def test_pictures_of_the_page_are_taken(client: Client, browser: Browser, tmp_path: Path) -> None:
    page_screenshots.pictures(browser, str(client.http.base_url), tmp_path)
    sizes = {file.name: Image.open(file).size for file in tmp_path.iterdir()}
    assert sizes == {"page_chat.png": (1080, 720), "page_tokens.png": (1080, 620), "page_phone.png": (360, 640)}
    assert all(len(Image.open(file).getcolors() or []) > 20 for file in tmp_path.iterdir())
