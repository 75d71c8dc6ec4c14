"""The chat page in Chromium, at a server that says what the test wants."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import axe_playwright_python
import pytest
from page_driver import Chat
from playwright.sync_api import Locator, expect
from scripted_server import ABOUT, BREAK, HANG, Refusal, Scripted, called, ended, entry, number, said, scripted

Open = Callable[..., Chat]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


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


def click(where: Locator, name: str) -> None:
    where.get_by_role("button", name=name, exact=True).click()


def setting(chat: Chat, label: str) -> Locator:
    panel = chat.page.locator("#settings")
    if not panel.is_visible():
        click(chat.page.locator("#bar"), "Settings")
    return panel.get_by_label(label, exact=True)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def model(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | more


def test_an_answer_streams(server: Scripted, chat: Chat) -> None:
    server.say([*said("Hello", " **you**", "."), *ended()])
    answer = chat.say("Hi\n<b>there</b>")
    expect(answer.locator(".body")).to_have_text("Hello you.")
    assert answer.locator("strong").inner_text() == "you"
    assert chat.texts("user") == ["Hi\n<b>there</b>"]
    assert re.fullmatch(r"3 tokens · \d+\.\d tokens/s · prompt 11", answer.locator(".counts").inner_text())
    assert server.bodies == [
        {
            "model": "scripted",
            "messages": [user("Hi\n<b>there</b>")],
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "logprobs": True,
            "top_logprobs": 8,
            "return_experts": True,
        }
    ]


def test_a_model_without_experts_is_not_asked_for_them(server: Scripted, open_chat: Open) -> None:
    server.about = ABOUT | {"has_experts": False}
    server.say([*said("a"), *ended()])
    open_chat(server.url).say("b")
    assert "return_experts" not in server.bodies[0]


@pytest.mark.parametrize("way", ["button", "key"])
def test_stop_ends_the_request_and_the_answer_can_go_on(server: Scripted, chat: Chat, way: str) -> None:
    server.say([*said("One", " two"), HANG], [*said("One two"), *said(" three"), *ended()])
    chat.send("Count")
    expect(chat.last("assistant").locator(".body")).to_have_text("One two")
    if way == "button":
        chat.page.locator("#stop").click()
    else:
        chat.page.keyboard.press("Escape")
    answer = chat.answered()
    assert server.left.wait(5)
    assert chat.page.evaluate("document.activeElement.id") == "draft"
    assert answer.locator(".body").inner_text() == "One two"
    assert answer.locator(".counts").inner_text().endswith("stopped")
    # The scripted server repeats the beginning with a token of its own; a real one sends none of it.
    server.replies[0][0]["choices"][0] |= {"token_ids": [], "logprobs": None}
    click(answer, "Go on")
    expect(chat.answered().locator(".body")).to_have_text("One two three")
    assert server.bodies[1]["continue_token_ids"] == [number("One"), number(" two")]
    assert server.bodies[1]["echo"] is True
    assert server.bodies[1]["messages"] == [user("Count")]
    assert chat.tokens(answer).all_inner_texts() == ["One", " two", " three"]


def test_an_edited_message_is_a_branch(server: Scripted, chat: Chat) -> None:
    for word in ("first", "second", "third"):
        server.say([*said(word), *ended()])
    chat.say("A")
    chat.say("B")
    chat.page.locator(".message.user").first.get_by_role("button", name="Edit").click()
    chat.page.get_by_label("Edited message").fill("C")
    chat.page.keyboard.press("Enter")
    chat.answered()
    assert [chat.texts("user"), chat.texts("assistant")] == [["C"], ["third"]]
    assert server.bodies[1]["messages"] == [user("A"), model("first"), user("B")]
    assert server.bodies[2]["messages"] == [user("C")]
    asked = chat.last("user")
    assert asked.locator(".branches").inner_text().split() == ["‹", "2", "/", "2", "›"]
    click(asked, "Previous branch")
    assert [chat.texts("user"), chat.texts("assistant")] == [["A", "B"], ["first", "second"]]
    chat.page.reload()
    assert [chat.texts("user"), chat.texts("assistant")] == [["A", "B"], ["first", "second"]]
    click(chat.page.locator(".message.user").first, "Next branch")
    assert chat.texts("user") == ["C"]


def test_answers_to_one_message_are_exported_as_preference_pairs(server: Scripted, chat: Chat, tmp_path: Path) -> None:
    for word in ("bad", "good", "good"):
        server.say([*said(word), *ended()])
    setting(chat, "System prompt").fill("Be kind.")
    click(chat.say("A"), "Regenerate")
    click(chat.answered(), "Regenerate")
    answer = chat.answered()
    assert server.bodies[1] == server.bodies[0]
    assert server.bodies[0]["messages"] == [{"role": "system", "content": "Be kind."}, user("A")]
    assert answer.locator(".branches .number").inner_text() == "3 / 3"
    with chat.page.expect_download() as download:
        click(chat.page.locator("#chats"), "Export pairs")
    download.value.save_as(tmp_path / "pairs.jsonl")
    prompt = [{"role": "system", "content": "Be kind."}, user("A")]
    (record,) = map(json.loads, (tmp_path / "pairs.jsonl").read_text().splitlines())
    assert record == {"prompt": prompt, "chosen": [model("good")], "rejected": [model("bad")]}


def test_a_chat_deleted_while_it_is_answered_stays_deleted(server: Scripted, chat: Chat) -> None:
    server.say([*said("One"), HANG])
    chat.send("Count")
    expect(chat.last("assistant").locator(".body")).to_have_text("One")
    chat.page.get_by_label("Delete Count").click()
    chat.page.get_by_label("Press again to delete Count").click()
    assert server.left.wait(5)
    chat.page.wait_for_timeout(100)
    assert chat.stored() == []
    assert chat.page.locator("#chat-list .chat").count() == 0


def test_an_answer_goes_on_after_the_page_was_left(server: Scripted, chat: Chat) -> None:
    server.say([*said("One", " two"), HANG], [*said("x"), *ended("length", stop_reason="shutdown")])
    chat.send("Count")
    expect(chat.last("assistant").locator(".body")).to_have_text("One two")
    chat.page.reload()
    assert server.left.wait(5)
    answer = chat.last("assistant")
    assert answer.locator(".body").inner_text() == "One two"
    click(answer, "Go on")
    expect(chat.answered().locator(".counts")).to_contain_text("cut off by the server: shutdown")
    assert server.bodies[1]["continue_token_ids"] == [number("One"), number(" two")]


def test_settings_are_sent_and_go_along_to_the_next_chat(server: Scripted, chat: Chat) -> None:
    server.say([*said("a"), *ended()], [*said("b"), *ended()])
    given = {
        "Temperature": "0.5", "Top-p": "0.9", "Top-k": "40", "Min-p": "0.05", "Most tokens": "7", "Presence penalty": "0.1",
        "Frequency penalty": "-0.2", "Seed": "12", "Alternatives kept of a token": "3", "Stop text": "END",
    }  # fmt: skip
    for label, value in given.items():
        setting(chat, label).fill(value)
    setting(chat, "Reasoning effort").select_option("high")
    chat.say("x")
    sent = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_tokens": 7, "presence_penalty": 0.1,
        "frequency_penalty": -0.2, "seed": 12, "top_logprobs": 3, "stop": "END", "reasoning_effort": "high",
    }  # fmt: skip
    assert {name: server.bodies[0].get(name) for name in sent} == sent
    assert "alternatives" not in server.bodies[0]
    setting(chat, "Seed").fill("")
    click(chat.page.locator("#chats"), "New chat")
    chat.say("y")
    assert {name: server.bodies[1].get(name) for name in sent} == sent | {"seed": None}
    assert server.bodies[1]["messages"] == [user("y")]
    assert [one["settings"].get("temperature") for one in chat.stored()] == [0.5, 0.5]


def test_a_setting_out_of_bounds_keeps_its_last_value_and_says_why(server: Scripted, chat: Chat) -> None:
    server.say([*said("a"), *ended()], Refusal(400, "top_p = 0.5: not today", "top_p"))
    field = setting(chat, "Temperature")
    field.fill("0.7")
    field.fill("3")
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(chat.page.locator("#setting-temperature-error")).to_contain_text("2")
    chat.say("x")
    assert server.bodies[0]["temperature"] == 0.7
    setting(chat, "Top-p").fill("0.5")
    chat.say("y")
    assert chat.page.locator("#setting-top_p-error").inner_text() == "top_p = 0.5: not today"
    trouble = chat.last("assistant").locator(".trouble p").all_inner_texts()
    assert trouble == ["top_p = 0.5: not today", "Change top_p and try again."]


def test_a_model_is_chosen_among_several(server: Scripted, open_chat: Open) -> None:
    server.models = ["scripted", "<i>adapter</i>"]
    chat = open_chat(server.url)
    server.say([*said("a"), *ended()])
    setting(chat, "Model").select_option("<i>adapter</i>")
    chat.say("x")
    assert server.bodies[0]["model"] == "<i>adapter</i>"


def test_reasoning_is_folded(server: Scripted, chat: Chat) -> None:
    server.say([*said("Let me", " think.", kind="reasoning_content"), *said("Yes."), *ended()], [*said("ok"), *ended()])
    answer = chat.say("x")
    assert answer.locator(".body").inner_text() == "Yes."
    thought = answer.locator(".thought")
    expect(thought).to_be_hidden()
    answer.locator("summary").click()
    expect(thought).to_have_text("Let me think.")
    assert chat.tokens(answer).all_inner_texts() == ["Let me", " think.", "Yes."]
    chat.say("y")
    assert server.bodies[1]["messages"][1] == model("Yes.", reasoning_content="Let me think.")


def test_calls_are_shown_and_answered_by_hand(server: Scripted, chat: Chat) -> None:
    two = [*called(0, "weather", '{"city": ', '"Oslo"}'), *called(1, "weather", "no JSON")]
    server.say([*two, *ended("tool_calls")], [*said("Cold."), *ended()])
    tools = setting(chat, "Tools, a list in JSON")
    tools.fill("[{]")
    chat.send("Weather?")
    expect(chat.page.locator("#notice")).to_contain_text("The tools are not JSON: ")
    assert server.bodies == []
    tools.fill(json.dumps([WEATHER, WEATHER]))
    expect(chat.page.locator("#setting-tools-error")).to_have_text("Tool 2: the name weather is there twice")
    tools.fill(json.dumps([WEATHER]))
    answer = chat.say("Weather?")
    assert server.bodies[0]["tools"] == [WEATHER]
    assert answer.locator(".call pre").all_inner_texts() == ['{\n  "city": "Oslo"\n}', "no JSON"]
    answer.get_by_label("Answer of weather").first.fill("-3")
    answer.get_by_label("Answer of weather").last.fill("sun")
    click(answer, "Send the answers")
    chat.answered()
    calls = [
        {"id": f"call_{index}", "type": "function", "function": {"name": "weather", "arguments": given}}
        for index, given in enumerate(['{"city": "Oslo"}', "no JSON"])
    ]
    told = [
        {"role": "tool", "content": said, "tool_call_id": f"call_{index}", "name": "weather"}
        for index, said in enumerate(["-3", "sun"])
    ]
    assert server.bodies[1]["messages"] == [user("Weather?"), model("", tool_calls=calls), *told]
    assert chat.texts("tool") == ["-3", "sun"]
    assert chat.texts("assistant")[-1] == "Cold."
    expect(answer.get_by_label("Answer of weather")).to_have_count(0)


def test_another_token_is_chosen_and_the_answer_goes_on(server: Scripted, chat: Chat) -> None:
    first = [*said("The", others=[("A", -3.0)]), *said(" cat", others=[(" dog", -1.0), ("\n", -9.0)]), *said(" sat")]
    server.say([*first, *ended(experts=[[[1, 3], [0, 5]], [[2, 4], [1, 2]], None], expert_count=6)])
    answer = chat.say("Tell")
    tokens = chat.tokens(answer)
    assert tokens.all_inner_texts() == ["The", " cat", " sat"]
    tokens.nth(1).hover()
    hint = answer.get_by_role("tooltip")
    assert hint.locator(".facts").inner_text() == f"␣cat 90.5% token {number(' cat')}"
    assert hint.locator("li").all_inner_texts() == ["MoE layer 0 2 4", "MoE layer 1 1 2"]
    # The picture has a column for each layer and a row for each expert; those that were chosen have the accent's colour.
    marked = hint.locator("canvas").evaluate(
        """(canvas) => {
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            const marked = (layer, expert) => {
                const at = 4 * ((expert * 8 + 3) * canvas.width + layer * 12 + 4);
                return data[at] < data[at + 2] - 50;
            };
            return [0, 1].map((layer) => [...Array(6).keys()].filter((expert) => marked(layer, expert)));
        }"""
    )
    assert marked == [[2, 4], [1, 2]]
    tokens.nth(1).click()
    rows = answer.get_by_role("dialog").locator(".alternative")
    assert [row.split() for row in rows.all_inner_texts()] == [["␣cat", "90.5%"], ["␣dog", "36.8%"], ["⏎", "0.0123%"]]
    expect(rows.first).to_be_disabled()
    begun = said("The dog")
    begun[0]["choices"][0] |= {"token_ids": [], "logprobs": None}
    server.say([*begun, *said(" ran"), *ended()])
    rows.nth(1).click()
    branch = chat.answered()
    assert server.bodies[1]["continue_token_ids"] == [number("The"), number(" dog")]
    assert server.bodies[1]["echo"] is True
    assert branch.locator(".token").all_inner_texts() == ["The", " dog", " ran"]
    click(branch, "Tokens")
    assert branch.locator(".body").inner_text() == "The dog ran"
    assert branch.locator(".branches .number").inner_text() == "2 / 2"
    # The chosen token has the alternatives of the one that it replaced.
    click(branch, "Tokens")
    branch.locator(".token").nth(1).click()
    expect(branch.locator(".alternative").first).to_have_text(re.compile(r"^\s*␣cat\s*90\.5%\s*$"))
    chat.page.keyboard.press("Escape")
    click(branch, "Previous branch")
    assert chat.last("assistant").locator(".token").all_inner_texts() == ["The", " cat", " sat"]


def test_tokens_are_reached_by_keyboard(server: Scripted, chat: Chat) -> None:
    server.say([*said("a", "b", "c", others=[("d", -2.0), ("e", -3.0)]), *ended()])
    chat.say("x")
    page = chat.page
    page.keyboard.press("Tab")
    chat.last("assistant").focus()
    for key in ("t", "ArrowRight", "ArrowRight", "ArrowLeft", "Enter"):
        page.keyboard.press(key)
    focused = "document.activeElement.getAttribute('aria-label')"
    assert page.evaluate(focused) == "Go on from d, 13.5%"
    page.keyboard.press("ArrowDown")
    assert page.evaluate(focused) == "Go on from e, 4.98%"
    page.keyboard.press("Escape")
    assert page.evaluate(focused) == "b, 90.5%"
    expect(chat.last("assistant").get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("Enter")
    server.say([*said("z"), *ended()])
    page.keyboard.press("Enter")
    chat.answered()
    assert server.bodies[1]["continue_token_ids"] == [number("a"), number("d")]


def test_bytes_that_are_no_character_are_shown_as_bytes(server: Scripted, chat: Chat) -> None:
    chunks = said("x")
    chunks[0]["choices"][0]["logprobs"]["content"] = [
        entry("bytes:\\xe2\\x82", bytes=[0xE2, 0x82], top_logprobs=[]), entry("", bytes=[], top_logprobs=[]),
    ]  # fmt: skip
    server.say([*chunks, *ended()])
    assert chat.tokens(chat.say("x")).all_inner_texts() == ["‹e2 82›", "∅"]


def test_markdown_and_latex_are_rendered(server: Scripted, chat: Chat) -> None:
    text = (
        "# Big\n\nIt costs $5 or $6, and $x^2$ or \\(y\\).\n\n$$\\frac{1}{2}$$\n\n\\[\\undefined\\]\n\n"
        "| a | b |\n|---|--:|\n| 1 | 2 |\n\n```python\nprint('<b>')\n```\n\n- [x] done\n\n![cat](https://example.org/cat.png) "
        "[go](https://example.org/) [bad](javascript:pwned(1))"
    )
    server.say([*said(text), *ended()])
    body = chat.say("x").locator(".body")
    expect(body.locator(".katex")).to_have_count(3)
    assert body.locator("h3").inner_text() == "Big"
    assert "It costs $5 or $6, and " in body.inner_text()
    assert body.locator(".katex annotation").all_text_contents() == ["x^2", "y", "\\frac{1}{2}"]
    assert body.locator(".unread").inner_text() == "\\[\\undefined\\]"
    assert body.locator("td").last.evaluate("(cell) => getComputedStyle(cell).textAlign") == "right"
    assert body.locator(".code pre").inner_text() == "print('<b>')\n"
    assert "☑ done" in body.inner_text()
    assert body.locator("img").count() == 0
    links = [
        (link.inner_text(), link.get_attribute("href"), link.get_attribute("rel")) for link in body.locator("a").all()
    ]
    rel = "noopener noreferrer"
    assert links == [
        ("cat", "https://example.org/cat.png", rel),
        ("go", "https://example.org/", rel),
        ("bad", None, rel),
    ]
    chat.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    click(body, "Copy code")
    expect(body.locator(".code button")).to_have_text("Copied")
    assert chat.page.evaluate("navigator.clipboard.readText()") == "print('<b>')\n"
    # What KaTeX needs of styles passes the policy, because it sets them one by one.
    assert body.locator(".katex .vlist span[style]").count() > 0


ATTACKS = [
    "<img src=x onerror=pwned(1)>",
    "<script>pwned(2)</script><svg onload=pwned(3)></svg>",
    '<a href="javascript:pwned(4)">a</a> [b](javascript:pwned(5)) [c](data:text/html,<script>pwned(6)</script>)',
    "<iframe srcdoc='<script>parent.pwned(7)</script>'></iframe><style>@import 'https://example.org/a.css'</style>",
    "$\\href{javascript:pwned(8)}{x}$ $\\includegraphics{https://example.org/a.png}$ "
    "$\\htmlStyle{background:url(https://example.org/)}{x}$",
    '```"><img src=x onerror=pwned(9)>\ncode\n```',
    '![x"onerror="pwned(10)](https://example.org/a.png "t\\" onload=pwned(11)")',
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=x onerror=pwned(12)&gt;'>",
    "| <img src=x onerror=pwned(13)> | ` </code><script>pwned(14)</script>` |\n|---|---|\n"
    "| $</span><img src=x onerror=pwned(15)>$ | b |",
    "[x]: javascript:pwned(16)\n[x] &lt;img src=x onerror=pwned(17)&gt; <p id=messages name=send>",
]


def test_nothing_that_a_text_holds_is_executed(server: Scripted, open_chat: Open, tmp_path: Path) -> None:
    """In prompts, answers, reasoning, calls and their arguments, tokens, errors, names of models and titles."""
    all_of_it = "\n\n".join(ATTACKS)
    server.about = ABOUT | {"model": ATTACKS[0], "format": ATTACKS[1]}
    server.models = [ATTACKS[0], ATTACKS[1]]
    chat = open_chat(server.url)
    setting(chat, "System prompt").fill(all_of_it)
    answers = [
        [
            *said(all_of_it, kind="reasoning_content"),
            *said(all_of_it, others=[(one, -1.0) for one in ATTACKS]),
            *ended(),
        ],
        [*called(0, ATTACKS[0], json.dumps({ATTACKS[1]: all_of_it})), *ended("tool_calls")],
        Refusal(400, all_of_it, ATTACKS[0]),
    ]
    for attack in ATTACKS:
        server.say([*said(attack), *ended()])
    for attack in ATTACKS:
        assert chat.say(attack).locator("script, img, iframe, style, svg[onload]").count() == 0
    server.say(*answers)
    answer = chat.say(all_of_it)
    answer.locator("summary").click()
    for link in answer.locator("a").all():
        assert (link.get_attribute("href") or "https:").startswith("https:")
    chat.tokens(answer).nth(1).click()
    expect(answer.locator(".alternative")).to_have_count(len(ATTACKS) + 1)
    chat.page.keyboard.press("Escape")
    chat.say("call")
    chat.say("fail")
    assert chat.last("assistant").locator(".trouble .error").text_content() == all_of_it
    with chat.page.expect_download() as download:
        click(chat.page.locator("#chats"), "Export")
    file = tmp_path / "<img src=x onerror=pwned(18)>.json"
    download.value.save_as(file)
    again = open_chat(server.url)
    again.page.locator("#import-file").set_input_files(file)
    expect(again.page.locator(".message")).to_have_count(2 * len(ATTACKS) + 6)
    file.write_text("no JSON")
    again.page.locator("#import-file").set_input_files(file)
    expect(again.page.locator("#notice")).to_contain_text(f"{file.name} is not JSON: ")
    again.page.wait_for_timeout(200)


def test_a_key_is_asked_for_and_kept_for_the_tab(server: Scripted, open_chat: Open) -> None:
    server.key = "se cret"
    chat = open_chat(server.url)
    dialog = chat.page.get_by_role("dialog")
    expect(dialog).to_contain_text("the key is missing or wrong")
    dialog.get_by_label("Key").fill("wrong")
    click(dialog, "Use this key")
    expect(chat.page.locator("#key-said")).to_have_text("the key is missing or wrong")
    expect(dialog).to_be_visible()
    dialog.get_by_label("Key").fill("schlüssel€")
    click(dialog, "Use this key")
    expect(chat.page.locator("#key-said")).to_contain_text("ASCII")
    dialog.get_by_label("Key").fill("se cret")
    chat.page.keyboard.press("Enter")
    expect(chat.page.locator("#model")).to_have_text("scripted")
    server.say([*said("in"), *ended()])
    assert chat.say("x").locator(".body").inner_text() == "in"
    assert set(server.keys) == {"", "Bearer wrong", "Bearer se cret"}
    assert "se cret" not in json.dumps(chat.page.evaluate("({...localStorage})"))
    chat.page.reload()
    expect(chat.page.locator("#model")).to_have_text("scripted")
    # The server got another key: the answer that was refused comes once the key is there.
    server.key = "new"
    server.say([*said("again"), *ended()])
    chat.send("y")
    expect(dialog).to_be_visible()
    dialog.get_by_label("Key").fill("new")
    click(dialog, "Use this key")
    expect(chat.last("assistant").locator(".body")).to_have_text("again")
    assert server.bodies[-1]["messages"] == [user("x"), model("in"), user("y")]


def test_an_answer_that_breaks_off_is_kept_and_goes_on(server: Scripted, chat: Chat) -> None:
    begun = said("One two")
    begun[0]["choices"][0] |= {"token_ids": [], "logprobs": None}
    server.say([*said("One", " two"), BREAK], [*begun, *said(" three"), *ended()])
    chat.send("Count")
    expect(chat.last("assistant").locator(".body")).to_have_text("One two")
    server.shown.set()
    answer = chat.answered()
    assert answer.locator(".body").inner_text() == "One two"
    assert answer.locator(".trouble p").all_inner_texts() == [
        "The connection to the server broke off.",
        "Look whether `nmoe serve` still runs, then try again. The answer so far is kept.",
    ]
    chat.page.reload()
    answer = chat.last("assistant")
    assert answer.locator(".body").inner_text() == "One two"
    click(answer.locator(".trouble"), "Go on")
    expect(chat.answered().locator(".body")).to_have_text("One two three")
    assert server.bodies[1]["continue_token_ids"] == [number("One"), number(" two")]
    expect(answer.locator(".trouble")).to_be_hidden()


def test_a_server_that_is_busy_failed_or_gone(server: Scripted, chat: Chat) -> None:
    failed: dict[str, Any] = {"error": {"message": "the engine has ended", "type": "server_error"}}
    server.say(Refusal(429, "too many requests", headers={"Retry-After": "7"}), [*said("a"), failed])
    answer = chat.say("x")
    wanted = ["too many requests", "The server is busy: try again in 7 s."]
    assert answer.locator(".trouble p").all_inner_texts() == wanted
    click(answer, "Try again")
    expect(answer.locator(".trouble .error")).to_have_text("the engine has ended")
    assert answer.locator(".body").inner_text() == "a"
    chat.page.context.set_offline(True)
    click(answer.locator(".trouble"), "Try again")
    expect(chat.answered().locator(".trouble .error")).to_have_text("The server cannot be reached.")
    chat.page.context.set_offline(False)
    server.say([*said("back"), *ended()])
    click(chat.last("assistant"), "Try again")
    expect(chat.answered().locator(".body")).to_have_text("back")


def test_conversations_are_exported_imported_and_deleted(server: Scripted, chat: Chat, tmp_path: Path) -> None:
    for word in ("a", "b"):
        server.say([*said(word, others=[("z", -2.0)]), *ended(experts=[[[1, 2]]])])
    chat.say("first")
    click(chat.page.locator("#chats"), "New chat")
    chat.say("second")
    titles = chat.page.locator("#chat-list .chat")
    expect(titles).to_have_text(["second", "first"])
    before = chat.stored()
    with chat.page.expect_download() as download:
        click(chat.page.locator("#chats"), "Export")
    download.value.save_as(tmp_path / "chats.json")
    exported = json.loads((tmp_path / "chats.json").read_text())
    assert (exported["format"], exported["version"]) == ("nmoe-chats", 1)
    assert sorted(exported["chats"], key=lambda one: one["id"]) == sorted(before, key=lambda one: one["id"])
    chat.page.get_by_label("Delete second").click()
    expect(titles).to_have_text(["second", "first"])
    chat.page.get_by_label("Press again to delete second").click()
    expect(titles).to_have_text(["first"])
    assert [one["title"] for one in chat.stored()] == ["first"]
    assert chat.texts("user") == ["first"]
    chat.page.locator("#import-file").set_input_files(tmp_path / "chats.json")
    expect(titles).to_have_count(3)
    assert sorted(titles.all_inner_texts()) == ["first", "first", "second"]
    assert len({one["id"] for one in chat.stored()}) == 3


WRONG_FILES: list[tuple[dict[str, Any], str]] = [
    ({"version": 2}, 'x.json is no file that this page exported: it needs "format": "nmoe-chats", "version": 1 and "chats"'),
    ({"chats": [{"id": "<b>"}]}, 'x.json: chats[0].id = "<b>": must be an id'),
    ({"role": "admin"}, 'x.json: chats[0].nodes.b.role = "admin": must be user, assistant or tool'),
    ({"content": 5}, "x.json: chats[0].nodes.b.content = 5: must be a text"),
    ({"parent": "c"}, 'x.json: chats[0].nodes.b.parent = "c": there is no such message'),
    ({"parent": "b"}, "x.json: chats[0].nodes.b.parent: is among the answers to it"),
    ({"tokens": [[1, "a", None, []]]}, 'x.json: chats[0].nodes.b.tokens = [[1,"a",null,[]]]: must be a list of tokens'),
    ({"html": "x"}, "x.json: chats[0].nodes.b.html: unknown; leave it out"),
    ({"chosen": {"": "b"}}, 'x.json: chats[0].chosen. = "b": is no answer to that message'),
]  # fmt: skip


def test_a_file_that_is_no_export_changes_nothing(server: Scripted, chat: Chat, tmp_path: Path) -> None:
    for change, message in WRONG_FILES:
        node = {"id": "b", "parent": "a", "role": "assistant", "content": "x"}
        one = {"id": "m1", "title": "t", "updated": 1, "system": "", "tools": "", "settings": {}, "chosen": {"": "a"}}
        one |= {key: value for key, value in change.items() if key == "chosen"}
        node |= {key: value for key, value in change.items() if key not in ("version", "chats", "chosen")}
        nodes = {"a": {"id": "a", "parent": "", "role": "user", "content": "q"}, "b": node}
        file: dict[str, Any] = {"format": "nmoe-chats", "version": 1, "chats": [one | {"nodes": nodes}]}
        file |= {key: value for key, value in change.items() if key in ("version", "chats")}
        (tmp_path / "x.json").write_text(json.dumps(file))
        chat.page.locator("#import-file").set_input_files(tmp_path / "x.json")
        expect(chat.page.locator("#notice")).to_have_text(message)
    assert chat.stored() == []


FILL = """() => {
    let size = 1 << 22;
    for (let at = 0; size > 8; at++) {
        try { localStorage.setItem(`fill${at}`, "x".repeat(size)); } catch { size >>= 1; }
    }
}"""


def test_full_storage_gives_up_experts_first(server: Scripted, chat: Chat) -> None:
    server.say([*said("a"), *ended(experts=[[[1, 2]] * 500])], [*said("b"), *ended(experts=[[[3, 4]]])])
    chat.say("old")
    click(chat.page.locator("#chats"), "New chat")
    chat.page.evaluate(FILL)
    chat.say("new")
    kept = {
        one["title"]: [node["tokens"] for node in one["nodes"].values() if "tokens" in node] for one in chat.stored()
    }
    assert [tokens[0][0][4] for tokens in (kept["old"], kept["new"])] == [None, [[3, 4]]]
    assert kept["old"][0][0][1] == "a"


def test_full_storage_gives_up_tokens_of_the_oldest_first(server: Scripted, chat: Chat) -> None:
    server.say([*said("a", others=[("other" * 500, -2.0)]), *ended()], *([*said(word), *ended()] for word in "bc"))
    chat.say("old")
    click(chat.page.locator("#chats"), "New chat")
    chat.say("new")
    chat.page.evaluate(FILL)
    chat.say("more")
    kept = {one["title"]: [bool(node.get("tokens")) for node in one["nodes"].values()] for one in chat.stored()}
    assert kept == {"old": [False, False], "new": [False, True, False, True]}
    chat.page.evaluate(FILL)
    chat.page.locator("#title").fill("t" * 5000)
    expect(chat.page.locator("#notice")).to_contain_text("storage is full: export conversations")


def test_stored_text_that_is_damaged_is_left_alone(server: Scripted, chat: Chat) -> None:
    chat.page.evaluate("localStorage.setItem('nmoe.chat.bad', '{')")
    chat.page.reload()
    expect(chat.page.locator("#notice")).to_have_text(
        "Stored conversations that cannot be read were left as they are: nmoe.chat.bad"
    )
    assert chat.page.evaluate("localStorage.getItem('nmoe.chat.bad')") == "{"


def test_keys_do_what_the_help_says(server: Scripted, chat: Chat) -> None:
    page = chat.page
    server.say(*([*said(word), *ended()] for word in ("a", "b", "c", "d", "e")))
    chat.say("x")
    page.keyboard.press("ArrowUp")
    page.get_by_label("Edited message").fill("y")
    page.keyboard.press("Escape")
    expect(page.locator(".message.user .body")).to_have_text(["x"])
    press = page.keyboard.press
    press("e")
    page.get_by_label("Edited message").fill("y")
    press("Enter")
    chat.answered()
    assert chat.texts("assistant") == ["b"]
    page.locator("#scroll").focus()
    press("r")
    chat.answered()
    assert chat.texts("assistant") == ["c"]
    page.locator("#scroll").focus()
    press("[")
    assert chat.texts("assistant") == ["b"]
    press("]")
    assert chat.texts("assistant") == ["c"]
    page.locator("#scroll").focus()
    focused = "document.activeElement.className + document.activeElement.id"
    press("k")
    assert page.evaluate(focused).startswith("message assistant")
    press("k")
    assert page.evaluate(focused).startswith("message user")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    press("/")
    assert page.evaluate(focused) == "draft"
    page.keyboard.type("rest")
    press("Shift+Enter")
    page.keyboard.type("n?")
    assert page.locator("#draft").input_value() == "rest\nn?"
    page.locator("#scroll").focus()
    press("s")
    expect(page.locator("#settings")).to_be_visible()
    press("Escape")
    expect(page.locator("#settings")).to_be_hidden()
    press("?")
    expect(page.locator("#help")).to_be_visible()
    keys = page.locator("#keys kbd").all_inner_texts()
    assert keys == ["Enter", "Escape", "/", "ArrowUp", "j", "k", "e", "r", "[", "]", "t", "n", "c", "s", "d", "?"]
    page.get_by_label("Letters are shortcuts").uncheck()
    press("Escape")
    page.locator("#scroll").focus()
    press("s")
    expect(page.locator("#settings")).to_be_hidden()
    page.evaluate("localStorage.removeItem('nmoe.letters')")
    press("n")
    assert chat.texts("user") == []


def test_the_theme_follows_the_browser_until_it_is_chosen(server: Scripted, open_chat: Open) -> None:
    chat = open_chat(server.url, scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    light, dark = "rgb(251, 250, 247)", "rgb(22, 21, 18)"
    seen = [chat.page.evaluate(paper)]
    for theme in ("light", "dark", "auto"):
        chat.page.locator("#theme").click()
        expect(chat.page.locator("html")).to_have_attribute("data-theme", theme)
        seen.append(chat.page.evaluate(paper))
    assert seen == [dark, light, dark, dark]
    chat.page.locator("#theme").click()
    chat.page.reload()
    assert chat.page.evaluate(paper) == light


def test_screen_readers_hear_of_an_answer_twice(server: Scripted, chat: Chat) -> None:
    chat.page.evaluate(
        """() => {
            window.heard = [];
            const listen = (element) => new MutationObserver(() => window.heard.push(element.textContent))
                .observe(element, {childList: true, characterData: true, subtree: true});
            document.querySelectorAll("[role=status], [role=alert], [aria-live]").forEach(listen);
        }"""
    )
    server.say([*said(*["many", "little", "tokens"] * 20), *ended()])
    chat.say("x")
    heard = [text for text in chat.page.evaluate("window.heard") if text]
    assert heard == ["The model answers.", "Answered: " + "manylittletokens" * 20]
    assert chat.last("assistant").get_attribute("aria-busy") == "false"


def test_a_phone_shows_all_without_scrolling_sideways(server: Scripted, open_chat: Open) -> None:
    chat = open_chat(server.url, width=360, height=640)
    wide = (
        "w" * 300
        + "\n\n```\n"
        + "c" * 300
        + "\n```\n\n$$"
        + "x+" * 90
        + "1$$\n\n|"
        + "a|" * 40
        + "\n|"
        + "-|" * 40
        + "\n|"
        + "b|" * 40
    )
    server.say([*said(wide, others=[("y" * 200, -1.0)]), *ended()])
    answer = chat.say("u" * 300)
    widths = "[document.documentElement.scrollWidth, document.getElementById('scroll').scrollWidth]"
    assert chat.page.evaluate(widths) == [360, 360]
    chat.tokens(answer).first.click()
    assert chat.page.evaluate(widths) == [360, 360]
    box = answer.get_by_role("dialog").bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360
    chat.page.keyboard.press("Escape")
    expect(chat.page.locator("#chats")).to_be_hidden()
    click(chat.page.locator("#bar"), "Conversations")
    chat.page.locator("#chat-list .chat").click()
    expect(chat.page.locator("#chats")).to_be_hidden()
    setting(chat, "Temperature").fill("0.5")
    assert chat.page.evaluate(widths) == [360, 360]


AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 360)])
def test_axe_finds_nothing_serious(server: Scripted, open_chat: Open, scheme: str, width: int) -> None:
    chat = open_chat(server.url, width=width, scheme=scheme)
    chat.page.evaluate(AXE)
    seen = list[str]()

    def look(where: str) -> None:
        found = chat.page.evaluate("axe.run({resultTypes: ['violations']})")
        assert len(found["passes"]) > 15
        for one in found["violations"]:
            if one["impact"] in ("serious", "critical"):
                seen.extend(
                    f"{where}: {one['id']}: {node['html'][:90]} {node['failureSummary'][-160:]}"
                    for node in one["nodes"]
                )

    texts = ("a", " b", " c", " d", "<|end|>")
    words = [chunk for index, word in enumerate(texts) for chunk in said(word, logprob=-0.9 * index)]
    markdown = (
        "# Big\n\n`code` [link](https://example.org)\n\n```py\nx\n```\n\n> quote\n\n$$x^2$$\n\n|a|b|\n|-|-|\n|1|2|"
    )
    server.say(
        [*said("thought", kind="reasoning_content"), *said(markdown), *ended()],
        [*words, *ended(experts=[[[1, 2], [3, 4]]] * 5)],
        [*called(0, "weather", "{}"), *ended("tool_calls")],
        Refusal(400, "top_k = -1: no", "top_k"),
        [*said("x"), HANG],
    )
    chat.say("one").locator("summary").click()
    chat.tokens(chat.say("two"))
    tokens = chat.page.locator(".token")
    expect(chat.say("three").get_by_label("Answer of weather")).to_be_visible()
    chat.last("user").get_by_role("button", name="Edit").click()
    tokens.nth(1).click()
    look("formula, tokens, call, edited message")
    chat.page.keyboard.press("Escape")
    chat.say("four")
    look("error, settings")
    chat.page.keyboard.press("Escape")
    chat.send("five")
    expect(chat.last("assistant").locator(".body")).to_have_text("x")
    if width == 360:
        click(chat.page.locator("#bar"), "Conversations")
    look("streaming, conversations")
    chat.page.keyboard.press("Escape")
    chat.page.locator("#open-help").click(force=True)
    look("help")
    assert seen == []
