"""Every option of chat and completions: OpenAI's schemas hold, and a stream is the whole reply in parts."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from openai_schemas import check
from served_client import Client

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "6 * 7?"}]

CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0},
    "truncated": {"temperature": 0.8, "top_p": 0.7, "top_k": 9, "min_p": 0.05},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    "bias": {"logit_bias": {"70": 8, "71": -100}},
    "several": {"n": 3},
    "log-probabilities": {"logprobs": True, "top_logprobs": 3},
    "log-probabilities without alternatives": {"logprobs": True, "n": 2},
    "stop": {"stop": ["a", "e", "0"], "max_tokens": 200},
    "stop kept": {"stop": "e", "include_stop_str_in_output": True, "max_tokens": 200},
    "stop with log-probabilities": {"stop": "e", "logprobs": True, "max_tokens": 200, "n": 2},
    "stop token": {"stop_token_ids": list(range(60, 100)), "max_tokens": 100},
    "ids": {"return_token_ids": True, "logprobs": True, "top_logprobs": 1},
    "names by ids": {"return_tokens_as_token_ids": True, "logprobs": True, "top_logprobs": 1},
    "experts": {"return_experts": True, "n": 2},
    "begun": {"continue_token_ids": [70, 71], "return_token_ids": True},
    "begun and echoed": {"continue_token_ids": [70, 71], "echo": True, "return_token_ids": True},
    "no end": {"ignore_eos": True, "max_tokens": 40},
    "usage": {"stream_options": {"include_usage": True}},
}
TEXTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several prompts": {"prompt": ["One", "Two", "Three"], "n": 2},
    "ids": {"prompt": [70, 71, 72], "return_token_ids": True},
    "lists of ids": {"prompt": [[70, 71, 72], [73]], "logprobs": 2},
    "echo": {"echo": True},
    "echo with log-probabilities": {"echo": True, "logprobs": 1, "temperature": 0},
    "echo of several": {"prompt": ["One", [73, 74]], "echo": True, "logprobs": 2, "n": 2},
    "echo alone": {"echo": True, "logprobs": 0, "max_tokens": 0},
    "log-probabilities": {"logprobs": 5, "n": 2},
    "stop": {"stop": ["e", "a"], "logprobs": 0, "max_tokens": 100},
    "control tokens": {"skip_special_tokens": False, "max_tokens": 60, "ignore_eos": True},
    "several": {"n": 2, "best_of": 2, "temperature": 0.5},
    "names by ids": {"logprobs": 1, "return_tokens_as_token_ids": True, "echo": True},
    "usage": {"stream_options": {"include_usage": True}},
}


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole reply that the chunks of a stream make."""
    reply = {name: value for name, value in chunks[0].items() if name not in ("choices", "object", "usage")}
    usage = next((chunk["usage"] for chunk in chunks if chunk.get("usage")), None)
    parts = sorted((choice for chunk in chunks for choice in chunk["choices"]), key=lambda one: one["index"])
    choices = [_choice(index, list(of_it)) for index, of_it in groupby(parts, lambda one: one["index"])]
    return reply | {"choices": choices, "usage": usage}


def _choice(index: int, parts: list[dict[str, Any]]) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "logprobs": None}
    if "text" in parts[0]:
        choice["text"] = "".join(part["text"] for part in parts)
    else:
        choice["message"] = _message([part["delta"] for part in parts])
    for part in parts:
        for name, value in part.items():
            if name == "token_ids":
                choice[name] = choice.get(name, []) + value
            elif name == "logprobs" and value is not None:
                so_far = choice[name] or {key: [] for key in value}
                choice[name] = {key: None if value[key] is None else so_far[key] + value[key] for key in value}
            elif name not in ("index", "logprobs", "text", "delta"):
                choice[name] = value
    return choice


def _message(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    content = "".join(delta.get("content") or "" for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for part in delta.get("tool_calls", []):
            if "id" in part:
                assert part["index"] not in calls, "a call's id comes once"
                calls[part["index"]] = {key: part[key] for key in ("id", "type")} | {"function": dict(part["function"])}
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    message: dict[str, Any] = {"role": deltas[0]["role"], "content": None if calls and not content else content}
    message["refusal"] = None
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message


def comparable(reply: dict[str, Any]) -> dict[str, Any]:
    """Returns what two replies to one request have in common."""
    kept = {name: value for name, value in reply.items() if name not in ("id", "created", "object")}
    for choice in kept["choices"]:
        choice.pop("prompt_token_ids", None)  # a stream has them in its first chunk alone
        for number, call in enumerate(choice.get("message", {}).get("tool_calls", [])):
            call["id"] = number
    return kept


@pytest.mark.parametrize("name", CHATS)
def test_a_streamed_chat_is_the_whole_one(client: Client, name: str) -> None:
    body = {"messages": MESSAGES, "seed": 11, "max_tokens": 12} | CHATS[name]
    whole, chunks = client.ask(CHAT, **body), client.stream(CHAT, **body)
    check("CreateChatCompletionResponse", whole)
    for chunk in chunks:
        check("CreateChatCompletionStreamResponse", chunk)
    assert len({chunk["id"] for chunk in chunks}) == 1
    usage = whole["usage"]
    if name != "usage":
        whole["usage"] = None
    assert comparable(joined(chunks)) == comparable(whole)
    assert len(chunks) >= 3
    assert len(whole["choices"]) == body.get("n", 1)
    for choice in whole["choices"]:
        if choice["logprobs"]:
            entries = choice["logprobs"]["content"]
            assert len(entries) * len(whole["choices"]) == usage["completion_tokens"] or len(whole["choices"]) > 1
            assert {len(one["top_logprobs"]) for one in entries} == {body.get("top_logprobs", 0)}


@pytest.mark.parametrize("name", TEXTS)
def test_a_streamed_completion_is_the_whole_one(client: Client, name: str) -> None:
    body = {"prompt": "The sum of", "seed": 11, "max_tokens": 8} | TEXTS[name]
    whole, chunks = client.ask(TEXT, **body), client.stream(TEXT, **body)
    for reply in (whole, *chunks):
        if not ("echo" in body and "logprobs" in body):  # OpenAI's schema has no null for a prompt's first token
            final = [choice for choice in reply["choices"] if choice["finish_reason"] is not None]
            check("CreateCompletionResponse", reply | {"choices": final})
    if name != "usage":
        whole["usage"] = None
    assert comparable(joined(chunks)) == comparable(whole)


def test_a_stop_string_ends_the_text_before_it(client: Client) -> None:
    body = {"messages": MESSAGES, "seed": 5, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True}
    text = client.ask(CHAT, **body)["choices"][0]["message"]["content"]
    for stop in (text[10], text[10:13], text[20:]):
        reply = client.ask(CHAT, **body, stop=[stop])
        (choice,) = reply["choices"]
        assert choice["message"]["content"] == text[: text.index(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        assert reply["usage"]["completion_tokens"] == len(choice["token_ids"]) <= 60
        kept = client.ask(CHAT, **body, stop=[stop], include_stop_str_in_output=True)["choices"][0]
        assert kept["message"]["content"] == text[: text.index(stop)] + stop


def test_samples_are_as_alone_under_their_seed(client: Client) -> None:
    body = {"messages": MESSAGES, "seed": 11, "max_tokens": 12, "n": 3}
    three = [choice["message"]["content"] for choice in client.ask(CHAT, **body)["choices"]]
    assert len(set(three)) == 3
    assert client.ask(CHAT, **body | {"n": 1})["choices"][0]["message"]["content"] == three[0]
    free = {client.ask(CHAT, messages=MESSAGES, max_tokens=12)["choices"][0]["message"]["content"] for _ in range(3)}
    assert len(free) == 3, "without a seed every request has another"


def test_the_likeliest_of_several_samples_are_returned(client: Client) -> None:
    body = {"prompt": "The sum", "seed": 2, "max_tokens": 6, "logprobs": 0}
    five = client.ask(TEXT, **body, n=5)["choices"]

    def mean(choice: dict[str, Any]) -> float:
        logprobs = choice["logprobs"]["token_logprobs"]
        return sum(logprobs) / len(logprobs)

    best = client.ask(TEXT, **body, n=2, best_of=5)
    assert [one["text"] for one in best["choices"]] == [one["text"] for one in sorted(five, key=mean, reverse=True)[:2]]
    assert [one["index"] for one in best["choices"]] == [0, 1]
    assert best["usage"]["completion_tokens"] == 30
