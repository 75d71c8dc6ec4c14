"""Requests that `nmoe serve` has to answer with 200, every option among them, for the checks that replay and mutate them."""

from __future__ import annotations

from typing import Any

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Oslo"}'}}
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
SHORT = {"messages": HI, "max_tokens": 6, "temperature": 0}
CHATS: list[dict[str, Any]] = [
    {},
    {"stream": True},
    {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
    {"n": 3, "temperature": 1.0, "seed": 5},
    {"n": 2, "temperature": 0.7, "seed": -5, "stream": True, "stream_options": {"include_usage": True}},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 5, "stream": True},
    {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True},
    {"return_token_ids": True, "logprobs": True, "top_logprobs": 2},
    {"stop": "e"},
    {"stop": ["xyz", " "], "stream": True, "include_stop_str_in_output": True},
    {"top_p": 0.9, "top_k": 20, "min_p": 0.01, "temperature": 0.9, "seed": 1},
    {"presence_penalty": 0.5, "frequency_penalty": -0.5},
    {"logit_bias": {"5": 3, "17": -100}},
    {"messages": [{"role": "system", "content": "Be brief."}, *HI, {"role": "assistant", "content": "Hello."}, *HI]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi "}, {"type": "text", "text": "there"}]}]},
    {"messages": [{"role": "developer", "content": "Be brief."}, *HI]},
    {"tools": [WEATHER], "tool_choice": "auto"},
    {"tools": [WEATHER], "stream": True, "parallel_tool_calls": True},
    {
        "tools": [WEATHER],
        "messages": [
            *HI,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        ],
    },
    {"max_tokens": None, "max_completion_tokens": 3, "store": True, "metadata": {"a": "b"}, "user": "me"},
    {"response_format": {"type": "text"}, "service_tier": "auto", "modalities": ["text"]},
    {"ignore_eos": True, "stop_token_ids": [9], "max_tokens": 9},
    {"messages": [{"role": "user", "content": "<|im_end|> <script>alert(1)</script> \u0000 \U0001f600"}]},
]
TEXTS: list[dict[str, Any]] = [
    {"prompt": "Once"},
    {"prompt": ["Once", "upon a time"], "n": 2, "temperature": 1, "seed": 3},
    {"prompt": [5, 6, 7]},
    {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234},
    {"prompt": "Once", "echo": True, "logprobs": 0},
    {"prompt": "Once", "logprobs": 5},
    {"prompt": "Once", "stream": True, "logprobs": 2},
    {"prompt": ["Once", "upon"], "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True},
    {"prompt": "Once", "stop": ["a", "b"], "top_p": 0.5, "temperature": 1},
]
OTHERS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("GET", "/health", None),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/tiny", None),
    ("GET", "/metrics", None),
    ("GET", "/tokenizer_info", None),
    ("POST", "/tokenize", {"prompt": "Once upon", "add_special_tokens": False}),
    ("POST", "/tokenize", {"messages": HI}),
    ("POST", "/detokenize", {"tokens": [5, 6, 7]}),
    (
        "POST",
        "/inference/v1/generate",
        {"request_id": "1", "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, "seed": 1, "logprobs": 0}},
    ),
]
REQUESTS: list[tuple[str, str, dict[str, Any] | None]] = [
    *(("POST", "/v1/chat/completions", {"model": "tiny"} | SHORT | changes) for changes in CHATS),
    *(("POST", "/v1/completions", {"model": "tiny", "max_tokens": 6, "temperature": 0} | changes) for changes in TEXTS),
    *OTHERS,
]
