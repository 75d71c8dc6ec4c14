"""The rewards of an environment as OpenRLHF asks for them, by HTTP and as a file. Its own client: `.ci/other_trainers.py`."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from test_shared import by_word, capitals

import nmoe.adapters.openrlhf as adapter
from nmoe.adapters.environment import SharedEnvironment
from nmoe.errors import UserError

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

    with SharedEnvironment(capitals()) as shared, TestClient(adapter.application(shared)) as client:
        for word, said in (("bug", "the grader has a bug"), ("lost", "the judge does not answer")):
            body = {"query": ["?X"], "prompts": ["?"], "labels": [by_word(shared)[word]]}
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
    found = loaded.reward_func([f"{PROMPT}{gold}<|im_end|>"], [PROMPT], [label])
    assert found["rewards"].tolist() == [pytest.approx(1.1)]
    assert found["scores"].tolist() == [1.0]
    assert found["extra_logs"]["correctness"].dtype == torch.float32
    monkeypatch.setenv("NMOE_ENVIRONMENT", "guess")
    with pytest.raises(UserError, match="a remote reward sees the end alone"):
        loaded.reward_func([PROMPT], [PROMPT], [label])
