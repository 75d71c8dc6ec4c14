"""Tool calls of a chat, whole and streamed; and the routes of tokens beside OpenAI's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai_schemas import check
from served_client import Client

from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.engine.remote.wire import GENERATE, decode_samples, encode_request
from nmoe.model.transformer import Transformer
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Sampling

CHAT = "/v1/chat/completions"
CALLS = """<think>
Two.
</think>

Let me see.<tool_call>
{"name": "square", "arguments": {"x": 2}}
</tool_call>
<tool_call>
{"name": "square", "arguments": {"x": -3}}
</tool_call>"""
TOOL = {
    "type": "function",
    "function": {"name": "square", "parameters": {"type": "object", "properties": {"x": {"type": "number"}}}},
}


@pytest.fixture(scope="module")
def body(tokenizer: Tokenizer) -> dict[str, Any]:
    """A chat whose turn begins with calls and then ends, because the bias leaves nothing else."""
    (end, *_) = tokenizer.end_ids
    return {
        "messages": [{"role": "user", "content": "Square 2 and -3."}],
        "tools": [TOOL],
        "continue_token_ids": tokenizer.encode(CALLS, control_tokens=True),
        "echo": True,
        "logit_bias": {str(end): 100},
        "max_tokens": 2,
    }


def test_calls_have_ids_and_their_arguments_as_text(client: Client, body: dict[str, Any]) -> None:
    reply = client.ask(CHAT, **body)
    check("CreateChatCompletionResponse", reply)
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["reasoning_content"].strip(), message["content"].strip()) == ("Two.", "Let me see.")
    functions = [call["function"] for call in message["tool_calls"]]
    assert [(one["name"], json.loads(one["arguments"])) for one in functions] == [
        ("square", {"x": 2}),
        ("square", {"x": -3}),
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert "reasoning_content" not in client.ask(CHAT, **body, include_reasoning=False)["choices"][0]["message"]
    none = client.ask(CHAT, **body | {"tool_choice": "none"})["choices"][0]
    assert none["finish_reason"] == "stop"
    answers = [{"role": "tool", "tool_call_id": call["id"], "content": "4"} for call in message["tool_calls"]]
    said = {"role": "assistant", "content": None, "tool_calls": message["tool_calls"]}
    messages = [*body["messages"], said, *answers]
    rendered = client.ask("/tokenize", messages=messages, tools=[TOOL], return_token_strs=True)["token_strs"]
    assert "".join(rendered).count("<tool_response>\n4") == 2


def test_a_streamed_call_has_its_id_once_and_an_index_always(client: Client, body: dict[str, Any]) -> None:
    chunks = client.stream(CHAT, **body)
    parts: list[dict[str, Any]] = []
    for chunk in chunks:
        check("CreateChatCompletionStreamResponse", chunk)
        for choice in chunk["choices"]:
            parts += choice["delta"].get("tool_calls", [])
    for index in (0, 1):
        first, *later = [part for part in parts if part["index"] == index]
        assert first["id"]
        assert (first["type"], first["function"]["name"]) == ("function", "square")
        assert all(part.keys() == {"index", "function"} for part in later)
        assert json.loads("".join(part["function"]["arguments"] for part in (first, *later))) == {"x": (2, -3)[index]}
    assert [choice["finish_reason"] for choice in chunks[-1]["choices"]] == ["tool_calls"]


def test_tokens_are_served_and_weights_are_not(client: Client, model: Transformer) -> None:
    request = Request((70, 71, 72), 2, Sampling(9, temperature=0.7, top_p=0.9, seed=3), "tokens")
    engine = NativeEngine(model, 2)
    expected = engine.run(engine.generate(request))
    reply = client.post(GENERATE, **encode_request(request))
    samples = decode_samples(reply.status_code, reply.content, request)
    assert [(one.token_ids, one.logprobs) for one in samples] == [(one.token_ids, one.logprobs) for one in expected]
    scores = client.ask("/score", token_ids=[70, 71, 72, 73])["logprobs"]
    assert scores == engine.run(engine.score([70, 71, 72, 73]))
    for path in ("/update_weights", "/start_weight_update", "/pause", "/init_weight_transfer_engine"):
        assert client.post(path).status_code == 404
