"""OpenAI's routes, held against an engine in this process."""

from __future__ import annotations

from typing import Any

import pytest
from served_client import Client

from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.model.transformer import Transformer
from nmoe.text.chat_template import ChatTemplate
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Message, Sample, Sampling

# By the fixture `client`, which serves another directory.
# documented: nmoe serve runs/real
# documented: nmoe serve runs/speedrun/rl
# documented: nmoe serve runs/speedrun/sort_grpo
# documented: nmoe serve models/Qwen3-0.6B --host 0.0.0.0 --served-model-name gpt-5.4
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def sampled(model: Transformer, prompt: list[int], ends: tuple[int, ...], **settings: Any) -> Sample:
    engine = NativeEngine(model, 1)
    request = Request(tuple(prompt), 1, Sampling(stop_ids=ends, **settings), "a")
    (sample,) = engine.run(engine.generate(request))
    return sample


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for chunk in chunks
        for choice in chunk["choices"]
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_chat_has_the_text_that_the_engine_samples(
    client: Client, model: Transformer, tokenizer: Tokenizer, seed: int
) -> None:
    prompt = ChatTemplate(tokenizer).prompt_ids([Message("system", "Be brief."), Message("user", "6 * 7?")])
    sample = sampled(model, prompt, tokenizer.end_ids, max_new_tokens=30, seed=seed, temperature=0.9, top_p=0.9)
    said = [one for one in sample.token_ids if one not in tokenizer.end_ids]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "6 * 7?"}]},
    ]
    body = {"messages": messages, "max_tokens": 30, "seed": seed, "temperature": 0.9, "top_p": 0.9}
    reply = client.ask(CHAT, **body)
    (choice,) = reply["choices"]
    assert choice["message"]["content"] == tokenizer.decode(said)
    assert choice["finish_reason"] == sample.finish_reason
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(sample.token_ids)}
    assert reply["usage"] == usage | {"total_tokens": sum(usage.values())}
    chunks = client.stream(CHAT, **body, stream_options={"include_usage": True})
    assert text_of(chunks) == tokenizer.decode(said)
    assert chunks[-1]["usage"] == reply["usage"]
    assert chunks[-1]["choices"] == []
    assert {chunk["usage"] is None for chunk in chunks[:-1]} == {True}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_completions_have_the_texts_that_the_engine_samples(
    client: Client, model: Transformer, tokenizer: Tokenizer
) -> None:
    prompts: list[Any] = ["The sum is", tokenizer.encode("One")]
    settings = {"max_tokens": 12, "seed": 3}
    texts = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        sample = sampled(model, ids, tokenizer.end_ids, max_new_tokens=12, seed=3)
        texts.append(tokenizer.decode([one for one in sample.token_ids if one not in tokenizer.control_ids]))
    for prompt, text in zip(prompts, texts, strict=True):
        assert client.ask(TEXT, prompt=prompt, **settings)["choices"][0]["text"] == text
        assert text_of(client.stream(TEXT, prompt=prompt, **settings)) == text
        echoed = client.ask(TEXT, prompt=prompt, echo=True, **settings)["choices"][0]["text"]
        assert echoed == (prompt if isinstance(prompt, str) else "One") + text
    both = client.ask(TEXT, prompt=["The sum is", "One"], **settings)
    assert [(choice["index"], choice["text"]) for choice in both["choices"]] == list(enumerate(texts))
    streamed = client.stream(TEXT, prompt=[tokenizer.encode("The sum is"), tokenizer.encode("One")], **settings)
    for index, text in enumerate(texts):
        assert text_of([chunk for chunk in streamed if chunk["choices"][0]["index"] == index]) == text


def test_models_are_listed_by_the_names_that_clients_use(client: Client) -> None:
    listed = client.http.get("/v1/models").json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("tiny", "model", "nmoe")
    assert client.http.get("/v1/models/tiny").json() == model
    assert client.http.get("/v1/models/other/name").status_code == 404
    error = client.refusal(CHAT, 404, model="other", messages=[{"role": "user", "content": "hi"}])
    assert (error["code"], error["param"]) == ("model_not_found", "model")
