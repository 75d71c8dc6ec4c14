"""Requests that are refused: status, OpenAI's error shape, the field at fault; and the server lives on."""

from __future__ import annotations

import functools
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai_schemas import check
from served_client import CONTEXT, Client, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONE = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
DEEP = functools.reduce(lambda inner, _: {"a": inner}, range(900), dict[str, Any]())


def image(text: str) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": "x"}}]}
    ]


CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": "hi"}, "messages", "must be a list"),
    ({"messages": ["hi"]}, "messages[0]", "must be an object"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role", "is missing"),
    ({"messages": [{"role": "pope", "content": "hi"}]}, "messages[0].role", "must be system or developer or user"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "must be a text or a list of parts"),
    ({"messages": image("what?")}, "messages[0].content[1]", "only parts of type text"),
    ({"messages": [{"role": "user", "content": "hi", "colour": 1}]}, "messages[0].colour", "unknown"),
    ({"messages": [{"role": "tool", "content": "4"}]}, "messages[0].tool_call_id", "is missing"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]}, "messages[0].tool_calls[0]", "must have an id"),
    ({"temperature": 3}, "temperature", "from 0 to 2"),
    ({"temperature": "hot"}, "temperature", "must be a number"),
    ({"temperature": True}, "temperature", "must be a number"),
    ({"temperature": 10**400}, "temperature", "must be a number"),
    ({"top_p": -0.1}, "top_p", "from 0 to 1"),
    ({"min_p": 2}, "min_p", "from 0 to 1"),
    ({"top_k": 1.5}, "top_k", "must be a whole number"),
    ({"n": 0}, "n", "from 1 to 128"),
    ({"n": 129}, "n", "from 1 to 128"),
    ({"max_tokens": -1}, "max_tokens", "at least 1"),
    ({"max_tokens": 10**30}, "messages", "has no room"),
    ({"seed": 2**64}, "seed", "must be a whole number"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop": [""]}, "stop", "none of them empty"),
    ({"stop": 3}, "stop", "must be a text"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "must be a list of token ids"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "from -100 to 100"),
    ({"logit_bias": {"foo": 1}}, "logit_bias.foo", "must be the id of a token"),
    ({"logit_bias": {"99999": 1}}, "logit_bias.99999", "token ids lie in"),
    ({"stop_token_ids": [99999]}, "stop_token_ids", "token ids lie in"),
    ({"logit_bias": [5]}, "logit_bias", "must be an object"),
    ({"presence_penalty": 2.5}, "presence_penalty", "from -2 to 2"),
    ({"logprobs": 3}, "logprobs", "must be true or false"),
    ({"top_logprobs": 3}, "top_logprobs", "needs logprobs = true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
    ({"response_format": {"type": "json_object"}}, "response_format", "only {'type': 'text'} is served"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "is served"),
    ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "auto or none"),
    ({"tools": [TOOL | {"type": "custom"}]}, "tools[0]", "of type function"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function", "with a name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
     "tools[0].function.parameters", "JSON schema of an object"),
    ({"tools": [TOOL, TOOL]}, "tools", "more than once"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]},
     "tools[0].function.parameters", "nested more than 100 deep"),
    ({"messages": [*HI, {"role": "assistant", "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": json.dumps(DEEP)}}]}]},
     "messages", "nested too deeply"),
    ({"functions": [{"name": "f"}]}, "functions", "replaced them by tools"),
    ({"stream_options": 5}, "stream_options", "must be an object"),
    ({"stream_options": {"include_all": True}}, "stream_options.include_all", "unknown"),
    ({"continue_token_ids": [10**6]}, "continue_token_ids", "token ids lie in"),
    ({"prompt_token_ids": []}, "prompt_token_ids", "has no tokens"),
    ({"frobnicate": 1}, "frobnicate", "unknown"),
    ({"reasoning_effort": "enormous"}, "reasoning_effort", "must be none or"),
    ({"chat_template_kwargs": {"messages": []}}, "messages", "given it already"),
    ({"messages": [{"role": "user", "content": "x" * CONTEXT}]}, "messages", "at most 4096"),
]  # fmt: skip
TEXTS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "must be a text"),
    ({"prompt": []}, "prompt", "has nothing in it"),
    ({"prompt": ""}, "prompt", "has no tokens"),
    ({"prompt": [[]]}, "prompt", "must be a text"),
    ({"prompt": [-1]}, "prompt", "must be a text"),
    ({"prompt": [10**6]}, "prompt", "token ids lie in"),
    ({"prompt": ["a", 5]}, "prompt", "must be a text"),
    ({"prompt": ["a"] * 2049}, "prompt", "at most 2048"),
    ({"prompt": [70] * (CONTEXT + 1)}, "prompt", "at most 4096"),
    ({"best_of": 21}, "best_of", "from 1 to 20"),
    ({"best_of": 1, "n": 2}, "best_of", "at least n = 2"),
    ({"best_of": 2, "stream": True}, "best_of", "no more than n"),
    ({"logprobs": 21}, "logprobs", "from 0 to 20"),
    ({"logprobs": True}, "logprobs", "must be a whole number"),
    ({"messages": HI}, "messages", "unknown"),
    ({"max_tokens": CONTEXT}, "prompt", "has no room"),
]


@pytest.mark.parametrize(("path", "change", "param", "message"), [
    *((CHAT, *one) for one in CHATS), *((TEXT, *one) for one in TEXTS)
])  # fmt: skip
def test_a_wrong_field_is_named(client: Client, path: str, change: dict[str, Any], param: str, message: str) -> None:
    good = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    reply = client.post(path, **(good | change))
    assert reply.status_code == 400, reply.text[:200]
    check("ErrorResponse", reply.json())
    error = reply.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"


def test_an_overflow_of_the_context_has_its_code(client: Client) -> None:
    for body in ({"max_tokens": CONTEXT}, {"messages": [{"role": "user", "content": "x" * CONTEXT}]}):
        error = client.refusal(CHAT, **({"messages": HI} | body))
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 10**5, b'{"messages": NaN}', b"null", LONE])
def test_a_body_that_is_no_object_is_refused(client: Client, content: bytes) -> None:
    reply = client.http.post(CHAT, content=content)
    assert reply.status_code == 400
    check("ErrorResponse", reply.json())


def test_routes_and_methods_that_are_none(client: Client) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", CHAT, 405), ("POST", "/health", 405)):
        reply = client.http.request(method, path)
        assert reply.status_code == status
        check("ErrorResponse", reply.json())


def test_inert_fields_are_named_and_zeroes_count_as_unset(client: Client) -> None:
    inert = {
        "store": True, "metadata": {"a": "b"}, "user": "u", "service_tier": "auto", "verbosity": "low", "modalities": ["text"],
        "prediction": {"type": "content", "content": "x"}, "web_search_options": {}, "parallel_tool_calls": True,
        "safety_identifier": "s", "prompt_cache_key": "k", "audio": {"format": "wav", "voice": "alloy"},
    }  # fmt: skip
    zeroes = {"max_tokens": 0, "logit_bias": {"foo": 0}}
    reply = client.post(CHAT, messages=HI, stop_token_ids=list(range(323)), **inert, **zeroes)
    assert reply.status_code == 200, reply.text
    ignored = reply.headers["x-nmoe-ignored"].split(", ")
    assert sorted(ignored) == sorted([*inert, "max_tokens"])
    assert "x-nmoe-ignored" not in client.post(CHAT, messages=HI, max_tokens=1).headers
    assert client.post(TEXT, prompt="a", best_of=0, max_tokens=0).headers["x-nmoe-ignored"] == "max_tokens, best_of"


def test_inert_fields_of_messages_are_named_once(client: Client) -> None:
    asked = [
        {"role": "user", "content": "a", "name": "u"},
        {"role": "assistant", "content": "b", "name": "m", "refusal": "no"},
    ]
    reply = client.post(CHAT, messages=[*asked * 20, asked[0]], max_tokens=1, store=True)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-nmoe-ignored"].split(", ") == ["messages.name", "messages.refusal", "store"]


@pytest.fixture(scope="module")
def strict(checkpoint: Path) -> Iterator[Client]:
    limits = (
        "--max-n",
        "2",
        "--max-stop",
        "1",
        "--max-body-mb",
        "1",
        "--max-prompt-tokens",
        "50",
        "--max-requests",
        "2",
    )
    with serving(checkpoint, "--strict", "--max-sequences", "2", *limits, key="secret") as running:
        yield running


def test_a_strict_server_refuses_fields_that_change_nothing(strict: Client) -> None:
    body = {"model": "tiny", "messages": HI, "max_tokens": 2}
    strict.ask(CHAT, **body)
    for name, value in (
        ("store", True),
        ("max_tokens", 0),
        ("logit_bias", {"foo": 0}),
        ("user", "u"),
        ("n", 3),
        ("stop", ["a", "b"]),
    ):
        assert strict.refusal(CHAT, **(body | {name: value}))["param"].partition(".")[0] == name
    assert strict.refusal(CHAT, 404, messages=HI)["code"] == "model_not_found"


def test_prompt_tokens_that_differ_from_the_messages(client: Client, strict: Client) -> None:
    rendered = client.ask("/tokenize", messages=HI)["tokens"]
    other = [*rendered[:4], 99, *rendered[5:]]
    body = {"messages": HI, "max_tokens": 5, "seed": 1, "return_token_ids": True}
    same = client.ask(CHAT, **body, prompt_token_ids=rendered)
    assert "retoken_mismatch" not in same
    differs = client.ask(CHAT, **body, prompt_token_ids=other)
    assert differs["retoken_mismatch"] == 4
    assert differs["prompt_token_ids"] == other
    assert client.stream(CHAT, **body, prompt_token_ids=other)[0]["retoken_mismatch"] == 4
    longer = client.ask(CHAT, **body, prompt_token_ids=[*rendered, 7])
    assert longer["retoken_mismatch"] == len(rendered)
    error = strict.refusal(CHAT, model="tiny", **body, prompt_token_ids=other)
    assert (error["param"], error["code"]) == ("prompt_token_ids", "retoken_mismatch")
    assert "position 4" in error["message"]


def test_limits_of_a_server(strict: Client) -> None:
    big = strict.http.post(CHAT, content=b'{"messages": "' + b"x" * 2**20 + b'"}')
    assert big.status_code == 413
    check("ErrorResponse", big.json())
    long = strict.refusal(CHAT, model="tiny", messages=[{"role": "user", "content": "x" * 60}])
    assert (long["code"], long["param"]) == ("context_length_exceeded", "messages")
    tokens = {"request_id": "r", "token_ids": [70] * 51, "sampling_params": {"max_tokens": 2, "seed": 1}}
    assert "at most 50" in strict.refusal("/inference/v1/generate", **tokens)["message"]
    assert "at most 50" in strict.refusal("/score", token_ids=[70] * 51)["message"]
    many = tokens | {"token_ids": [70], "sampling_params": {"max_tokens": 2, "seed": 1, "n": 3}}
    assert "must be at most 2" in strict.refusal("/inference/v1/generate", **many)["message"]
    big_tokens = strict.http.post("/inference/v1/generate", content=b" " * 2**20 + b"{}")
    assert big_tokens.status_code == 413
    body = {"model": "tiny", "prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with strict.http.stream("POST", TEXT, json=body) as first, strict.http.stream("POST", TEXT, json=body) as second:
        assert first.status_code == second.status_code == 200
        full = strict.post(TEXT, model="tiny", prompt="a")
        assert full.status_code == 429
        assert int(full.headers["retry-after"]) >= 1
        check("ErrorResponse", full.json())
    until = time.monotonic() + 5
    while strict.post(TEXT, model="tiny", prompt="a").status_code == 429:
        assert time.monotonic() < until, "the place is free again once the clients have gone"
        time.sleep(0.05)


def test_the_key_opens_all_routes_but_health(strict: Client) -> None:
    for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "secret"}):
        with httpx2.Client(base_url=strict.http.base_url, headers=headers, trust_env=False) as stranger:
            assert stranger.get("/health").status_code == 200
            for path in ("/v1/models", "/metrics", "/nmoe/page", "/tokenizer_info", "/nowhere"):
                reply = stranger.get(path)
                assert reply.status_code == 401
                assert reply.json()["error"]["code"] == "invalid_api_key"
            assert stranger.post("/inference/v1/generate", json={}).status_code == 401


def test_a_page_of_another_site_gets_nothing(client: Client) -> None:
    own = str(client.http.base_url).rstrip("/")
    assert client.http.get("/v1/models", headers={"Origin": own}).status_code == 200
    for origin in ("https://example.com", "null", "http://127.0.0.1:1"):
        reply = client.http.post(CHAT, json={"messages": HI}, headers={"Origin": origin})
        assert reply.status_code == 403
        assert "access-control-allow-origin" not in reply.headers


def test_a_server_without_a_key_answers_to_its_own_names_alone(client: Client, strict: Client) -> None:
    port = client.http.base_url.port
    for host in ("127.0.0.1", "localhost", "LOCALHOST", "[::1]"):
        assert client.http.get("/v1/models", headers={"Host": f"{host}:{port}"}).status_code == 200
    for host in ("evil.example:80", "evil.example", "localhost.evil.example", "[::1].evil.example:80", ""):
        reply = client.http.get("/v1/models", headers={"Host": host, "Origin": f"http://{host}"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "unknown_host"), host
    with socket.create_connection((client.http.base_url.host, port), timeout=10) as raw:
        raw.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")  # a request without a host
        assert raw.recv(12) == b"HTTP/1.1 403"
    assert strict.http.get("/v1/models", headers={"Host": "model.example"}).status_code == 200


def test_bytes_that_are_no_http_are_refused(client: Client) -> None:
    host, port = client.http.base_url.host, client.http.base_url.port
    for sent in (
        b"\x00\xff\x16\x03\x01",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    ):
        with socket.create_connection((host, port), timeout=10) as raw:
            raw.sendall(sent)
            raw.shutdown(socket.SHUT_WR)
            assert raw.recv(4096)[:12] in (b"", b"HTTP/1.1 400"), sent
    assert client.chat(max_tokens=2)["choices"]
