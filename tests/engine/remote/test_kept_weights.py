"""Servers that keep their weights, by a script: which of their answers count, and what they are known by after a loss."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tiny_models import DENSE

from nmoe.engine.api import Request
from nmoe.engine.remote.fleet import Fleet
from nmoe.engine.remote.served import served_engine
from nmoe.engine.remote.server import PROBED, ServerLostError
from nmoe.engine.remote.wire import encode_samples
from nmoe.model.checkpoint import save_model
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.types import FinishReason, Sample, Sampling

URLS = ("http://one:1", "http://two:1")
ASKED = Request((1, 2), 1, Sampling(3, seed=5), "asked")


class Scripted:
    """What a server answers: every token is 7, and has this log-probability."""

    def __init__(self) -> None:
        self.logprob, self.probed = -0.5, 0
        self.reason: FinishReason = "length"
        self.lost = 0  # requests that it loses from now on

    def answer(self, asked: httpx2.Request) -> httpx2.Response:
        if asked.url.path == "/nmoe/info":
            described = {"engine": "nmoe", "fingerprint": "f" * 32, "context_tokens": DENSE["context_tokens"]}
            return httpx2.Response(200, json=described | {"vocab_size": DENSE["vocab_size"]})
        body = json.loads(asked.content)
        request, count = body["request_id"], body["sampling_params"]["max_tokens"]
        if request.startswith("probe"):
            assert count == PROBED
            self.probed += 1
        elif self.lost:
            self.lost -= 1
            return httpx2.Response(500, json={"error": {"message": "lost"}})
        reason = "length" if request.startswith("probe") else self.reason
        sample = Sample([7] * count, [self.logprob] * count, [0] * count, reason)
        of = Request(tuple(body["token_ids"]), 1, Sampling(count), request)
        return httpx2.Response(200, json=encode_samples(of, [sample]))


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    servers = [Scripted(), Scripted()]
    by_host = {"one": servers[0], "two": servers[1]}
    answers = httpx2.MockTransport(lambda asked: by_host[asked.url.host].answer(asked))
    monkeypatch.setattr(httpx2, "AsyncClient", partial(httpx2.AsyncClient, transport=answers))
    save_model(Transformer(ModelConfig(**DENSE)).initialize(0), tmp_path)

    @contextmanager
    def opened(count: int = 1) -> Iterator[tuple[Fleet, list[Scripted], list[str]]]:
        notes: list[str] = []
        with served_engine(URLS[:count], tmp_path, notes.append) as fleet:
            yield fleet, servers, notes

    return opened


def test_an_answer_that_a_server_was_made_to_abort_is_no_answer(scripted: Callable[..., Any]) -> None:
    with scripted() as (fleet, (server, _), _):
        server.reason = "abort"
        with pytest.raises(ServerLostError, match="was made to abort request 'asked'"):
            fleet.run(fleet.generate(ASKED))


def test_a_healed_server_that_rounds_differently_is_named_as_before(scripted: Callable[..., Any]) -> None:
    with scripted() as (fleet, (server, _), notes):
        before = fleet.served()
        server.lost, server.logprob = 1, -0.5000001
        (sample,) = fleet.run(fleet.generate(ASKED))
        assert sample.logprobs == [-0.5000001] * 3
        assert (fleet.served(), server.probed) == (before, 2)
        assert before[0].weights == fleet.served()[0].weights
        assert notes[-1] == "engine http://one:1 serves again"
