"""The rewards of an environment as OpenRLHF asks for them, by HTTP and as a file."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from test_shared import by_word, capitals, rewarded

import nmoe.adapters.openrlhf as adapter
from nmoe.adapters.environment import SharedEnvironment
from nmoe.errors import UserError

END = "<|im_end|>"
PROMPT = "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def row() -> tuple[str, str]:
    """A label of `word_problems`, and its right answer."""
    with SharedEnvironment("word_problems") as shared:
        label = shared.rows(1)[0]["label"]
        return label, shared.problem(label).gold


# documented: nmoe env serve word_problems --port 5000 --end '<|im_end|>'
@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "nmoe", "env", "serve", "word_problems", "--port", "0", "--end", "<|im_end|>"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.fullmatch(
            r"rewards of word_problems: (http://127.0.0.1:\d+/get_reward)\n", process.stdout.readline()
        )
        try:
            assert found is not None
            yield found[1]
        finally:
            process.terminate()


def test_the_server_answers_as_theirs(url: str, row: tuple[str, str]) -> None:
    label, gold = row
    responses = [f"{gold}<|im_end|>", f"<think>so</think>{gold}<|im_end|>\n", f"{gold}", "many<|im_end|>"]
    body = {"query": [PROMPT + one for one in responses], "prompts": [PROMPT] * 4, "labels": [label] * 4}
    reply = httpx2.post(url, json=body, timeout=60)
    assert reply.status_code == 200
    assert reply.json() == {
        "rewards": [1.1, 1.1, 0.0, 0.1],
        "scores": [1.0, 1.0, 0.0, 0.0],
        "extra_logs": {
            "format": [1.0, 1.0, 0.0, 1.0],
            "structure": [1.0, 1.0, 0.0, 1.0],
            "reasoning": [0.0, 1.0, 0.0, 0.0],
            "correctness": [1.0, 1.0, 0.0, 0.0],
        },
    }


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "the body is not JSON"),
        (b"[]", "the body is not a JSON object"),
        ({"query": ["a"], "prompts": ["a"]}, "labels is None, and has to be a list of texts"),
        ({"query": ["a"], "prompts": ["a"], "labels": [3]}, "labels is [3], and has to be a list of texts"),
        ({"query": ["a"], "prompts": [], "labels": ["x"]}, "1 queries, 0 prompts and 1 labels do not belong together"),
        ({"query": ["a"], "prompts": ["b"], "labels": ["x"]}, "does not begin with its prompt"),
        ({"query": ["a"], "prompts": ["a"], "labels": ["x"]}, "'x' is no label of a record of nmoe"),
    ],
)
def test_a_bad_request_is_no_zero(url: str, body: Any, said: str) -> None:
    reply = httpx2.post(url, content=body if isinstance(body, bytes) else json.dumps(body), timeout=60)
    assert reply.status_code == 400
    assert said in reply.json()["error"]


def test_a_grader_that_raises_is_no_zero() -> None:
    from starlette.testclient import TestClient

    with SharedEnvironment(capitals()) as shared, TestClient(adapter.application(shared, [END])) as client:
        for word, said in (("bug", "the grader has a bug"), ("lost", "the judge does not answer")):
            body = {"query": [f"?X{END}"], "prompts": ["?"], "labels": [by_word(shared)[word]]}
            reply = client.post("/get_reward", json=body)
            assert reply.status_code == 500
            assert said in reply.json()["error"]


def test_the_file_that_they_import(row: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    label, gold = row
    path = Path(adapter.__file__)
    spec = importlib.util.spec_from_file_location("reward_func", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    with pytest.raises(UserError, match="NMOE_ENVIRONMENT is not set"):
        loaded.reward_func([PROMPT], [PROMPT], [label])
    monkeypatch.setenv("NMOE_ENVIRONMENT", "word_problems")
    with pytest.raises(UserError, match="NMOE_END is not set"):
        loaded.reward_func([PROMPT], [PROMPT], [label])
    monkeypatch.setenv("NMOE_END", "<|im_end|> <|endoftext|>")
    cut = loaded.reward_func([f"{PROMPT}{gold}"] * 2, [PROMPT] * 2, [label] * 2)
    assert cut["rewards"].tolist() == [0.0, 0.0]
    assert loaded.reward_func([f"{PROMPT}{gold}<|endoftext|>"], [PROMPT], [label])["scores"].tolist() == [1.0]
    found = loaded.reward_func([f"{PROMPT}{gold}<|im_end|>"], [PROMPT], [label])
    assert found["rewards"].tolist() == [pytest.approx(1.1)]
    assert found["scores"].tolist() == [1.0]
    assert found["extra_logs"]["correctness"].dtype == torch.float32
    monkeypatch.setenv("NMOE_ENVIRONMENT", "guess")
    with pytest.raises(UserError, match="a remote reward sees the end alone"):
        loaded.reward_func([PROMPT], [PROMPT], [label])


def test_reasoning_that_the_prompt_opened(row: tuple[str, str]) -> None:
    label, gold = row
    thinking = f"{PROMPT}<think>\n"
    with SharedEnvironment("word_problems") as shared:
        queries = [f"{thinking}so</think>{gold}{END}", f"{thinking}{gold}{END}", f"{PROMPT}so</think>{gold}{END}"]
        found = adapter.rewards_of(shared, queries, [thinking, thinking, PROMPT], [label] * 3, [END])
        assert found["rewards"] == [1.1, 0.0, 0.0]
        assert found["extra_logs"]["reasoning"] == [1.0, 0.0, 0.0]


def test_responses_lose_the_tokens_that_end_them_alone(row: tuple[str, str]) -> None:
    label, gold = row
    with SharedEnvironment("word_problems") as shared:
        said = [f"{gold}{END}\n{END} ", f"{gold}</s>{END}", f"{gold}"]
        responses, finishes, opened = adapter._parsed(
            shared, [PROMPT + one for one in said], [PROMPT] * 3, [label] * 3, [END]
        )
    assert responses == [gold, f"{gold}</s>", gold]
    assert finishes == ["stop", "stop", "length"]
    assert opened == [False] * 3
    # A response of white space alone costs no more than its length.
    began = time.process_time()
    with SharedEnvironment("word_problems") as shared:
        adapter._parsed(shared, ["a" + " " * 400_000 + "b"], ["a"], [label], [END])
    assert time.process_time() - began < 5


def test_a_prompt_that_was_decoded_from_tokens() -> None:
    """OpenRLHF decodes the query, so that its prompt is composed, and spaced, as the tokenizer writes it."""
    composed, decomposed = "The caf\u00e9 .\nuser: ", "The cafe\u0301.\nuser: "
    assert adapter.response_of(f"{composed}Say caf\u00e9 e\u0301", decomposed, "x") == "Say caf\u00e9 e\u0301"
    assert adapter.response_of("The caf\u00e9. user:42", decomposed, "x") == "42"
    # A response that repeats its prompt is the response all the same.
    assert adapter.response_of(composed + composed + "7", decomposed, "x") == composed + "7"
    for query in ("user: 42", "The caff\u00e9. user: 42", "The caf"):
        with pytest.raises(UserError, match=r"the record 'train/0/1f': the query .* does not begin with its prompt"):
            adapter.response_of(query, decomposed, "train/0/1f")


def test_rewards_that_one_completion_does_not_suffice_for() -> None:
    def own(completions: Any, trainer_state: Any = None, **_: Any) -> list[float]:
        return [1.0] * len(completions)

    with (
        SharedEnvironment(rewarded(own)) as shared,
        pytest.raises(UserError, match="takes trainer_state, which this trainer"),
    ):
        adapter.application(shared, [END])


def test_all_that_is_asked_is_graded_at_once_and_given_up_with_its_client() -> None:
    begun: list[int] = []
    cancelled: list[int] = []
    enough = asyncio.Event()

    async def own(completions: Any, **_: Any) -> list[float]:
        begun.append(1)
        try:
            if len(begun) == 100:
                enough.set()
            # None ends before all have begun; threads of the default executor were at most 32.
            await (enough.wait() if completions[0][-1]["content"] == "short" else asyncio.sleep(60))
        except asyncio.CancelledError:
            cancelled.append(1)
            raise
        return [2.0] * len(completions)

    async def asked(app: Any, label: str) -> list[Any]:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://here") as client:
            body = {"query": [f"?short{END}"], "prompts": ["?"], "labels": [label]}
            sent = asyncio.gather(*(client.post("/get_reward", json=body) for _ in range(100)))
            return [reply.json()["rewards"] for reply in await asyncio.wait_for(sent, 60)]

    async def gone(app: Any, label: str) -> None:
        body = json.dumps({"query": [f"?long{END}"], "prompts": ["?"], "labels": [label]}).encode()
        messages = iter([{"type": "http.request", "body": body}])

        async def receive() -> Any:
            if (message := next(messages, None)) is not None:
                return message
            while len(begun) < 101:
                await asyncio.sleep(0.01)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        scope = {"type": "http", "method": "POST", "path": "/get_reward", "headers": [], "query_string": b""}
        await asyncio.wait_for(app(scope, receive, send), 30)
        for _ in range(500):
            if cancelled:
                break
            await asyncio.sleep(0.01)

    with SharedEnvironment(rewarded(own)) as shared:
        app, label = adapter.application(shared, [END]), by_word(shared)["expert"]
        assert asyncio.run(asked(app, label)) == [[2.0]] * 100
        asyncio.run(gone(app, label))
        assert cancelled == [1]


def test_the_key_of_other_machines(row: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    label, gold = row
    monkeypatch.delenv(adapter.KEY, raising=False)
    with pytest.raises(
        UserError, match="other machines could have code run here, and find the answers; set NMOE_REWARDS_KEY"
    ):
        adapter.serve("word_problems", "0.0.0.0", 0, [END])
    with pytest.raises(UserError, match="--end is empty"):
        adapter.serve("word_problems", "127.0.0.1", 0, [""])
    body = {"query": [f"{PROMPT}{gold}{END}"], "prompts": [PROMPT], "labels": [label]}

    async def asked(app: Any, url: str, **more: Any) -> Any:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app)) as client:
            return await client.post(url, json=body, **more)

    with SharedEnvironment("word_problems") as shared:
        app = adapter.with_key(adapter.application(shared, [END]), "secret", "0.0.0.0")
        # OpenRLHF's client sends the name and the key of its address so.
        reply = asyncio.run(asked(app, "http://nmoe:secret@there:5000/get_reward"))
        assert (reply.status_code, reply.json()["rewards"]) == (200, [1.1])
        for url in ("http://there:5000/get_reward", "http://nmoe:wrong@there:5000/get_reward"):
            refused = asyncio.run(asked(app, url))
            assert refused.status_code == 401
            assert (
                "http://nmoe:KEY@HOST:PORT/get_reward, with the NMOE_REWARDS_KEY of the server"
                in refused.json()["error"]
            )
        plain = adapter.with_key(adapter.application(shared, [END]), "", "127.0.0.1")
        assert asyncio.run(asked(plain, "http://localhost:5000/get_reward")).status_code == 200
        page = asyncio.run(asked(plain, "http://localhost:5000/get_reward", headers={"Origin": "http://elsewhere"}))
        assert page.status_code == 403
