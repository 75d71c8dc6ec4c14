"""Servers that keep their weights, by a script: which of their answers count, and what they are known by after a loss."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tiny_models import DENSE

from nmoe.engine.api import Request
from nmoe.engine.remote import fleet as fleets
from nmoe.engine.remote import silence
from nmoe.engine.remote.served import ServedFleet, served_engine
from nmoe.engine.remote.server import PROBED, Probe, ServerLostError
from nmoe.engine.remote.wire import WEIGHTS_ID, encode_samples
from nmoe.errors import InfrastructureError, UserError
from nmoe.model.checkpoint import save_model
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.types import FinishReason, Sample, Sampling

URLS = ("http://one:1", "http://two:1")
ASKED = Request((1, 2), 1, Sampling(3, seed=5), "asked")


class Scripted:
    """What a server answers: every token and log-probability is the same. `weights` is its header."""

    def __init__(self) -> None:
        self.token, self.logprob, self.probed, self.weights = 7, -0.5, 0, "first"
        self.reason: FinishReason = "length"
        self.one = asyncio.Lock()
        self.silent_s = 0.0  # before each answer but a probe's
        self.lost = 0  # requests that it loses from now on

    def answer(self, asked: httpx2.Request) -> httpx2.Response:
        reply = self._answer(asked)
        reply.headers.update({WEIGHTS_ID: self.weights} if self.weights else {})
        return reply

    def _answer(self, asked: httpx2.Request) -> httpx2.Response:
        if asked.url.path == "/nmoe/info":
            described = {"engine": "nmoe", "fingerprint": "f" * 32, "context_tokens": DENSE["context_tokens"]} | {
                "precision": "float32"
            }
            return httpx2.Response(
                200, json=described | {name: DENSE[name] for name in ("vocab_size", "context_tokens")}
            )
        body = json.loads(asked.content)
        if asked.url.path == "/score":
            scores = [self.logprob] * (len(body["token_ids"]) - 1)
            return httpx2.Response(200, json={"logprobs": scores, "weight_version": "0"})
        request, count = body["request_id"], body["sampling_params"]["max_tokens"]
        if request.startswith("probe"):
            assert count == PROBED
            self.probed += 1
        elif self.lost:
            self.lost -= 1
            return httpx2.Response(500, json={"error": {"message": "lost"}})
        reason = "length" if request.startswith("probe") else self.reason
        sample = Sample([self.token] * count, [self.logprob] * count, [0] * count, reason)
        of = Request(tuple(body["token_ids"]), 1, Sampling(count), request)
        return httpx2.Response(200, json=encode_samples(of, [sample]))


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    servers = [Scripted(), Scripted()]
    by_host = {"one": servers[0], "two": servers[1]}

    async def answer(asked: httpx2.Request) -> httpx2.Response:
        if b"probe" not in asked.content and asked.url.path != "/nmoe/info":
            server = by_host[asked.url.host]
            async with server.one:
                await asyncio.sleep(server.silent_s)
        return by_host[asked.url.host].answer(asked)

    answers = httpx2.MockTransport(answer)
    monkeypatch.setattr(fleets, "Connections", lambda _: httpx2.AsyncClient(transport=answers))
    save_model(Transformer(ModelConfig(**DENSE)).initialize(0), tmp_path)

    @contextmanager
    def opened(count: int = 1) -> Iterator[tuple[ServedFleet, list[Scripted], list[str]]]:
        notes: list[str] = []
        with served_engine(URLS[:count], tmp_path, notes.append) as fleet:
            yield fleet, servers, notes

    return opened


def test_an_answer_that_a_server_was_made_to_abort_is_no_answer(scripted: Callable[..., Any]) -> None:
    with scripted() as (fleet, (server, _), _):
        server.reason = "abort"
        with pytest.raises(ServerLostError, match=r"was made to abort request 'asked'"):
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


@pytest.mark.parametrize("attribute", ["token", "logprob"])
def test_a_teacher_started_again_with_other_weights_is_refused(scripted: Callable[..., Any], attribute: str) -> None:
    """It has the first one's address, name and version."""
    with scripted() as (fleet, (server, _), notes):
        assert fleet.run(fleet.score([1, 2, 3])) == [-0.5] * 2
        server.weights = "second"
        setattr(server, attribute, getattr(server, attribute) + 1 / 64 if attribute == "logprob" else 8)
        for _ in range(2):
            with pytest.raises(
                InfrastructureError, match=r"one:1 has other weights than .*one:1 began, under the same name"
            ):
                fleet.run(fleet.score([1, 2, 3]))
        assert "one:1 was started again or has taken weights" in notes[2]


def test_a_teacher_started_again_with_its_weights_goes_on(scripted: Callable[..., Any]) -> None:
    with scripted() as (fleet, (server, _), notes):
        server.weights = "second"
        assert fleet.run(fleet.score([1, 2, 3])) == [-0.5] * 2
        assert notes[-1] == "engine http://one:1 serves again"
        server.weights = ""
        assert fleet.run(fleet.score([1, 2, 3])) == [-0.5] * 2
        assert server.probed == 3, "a server that names no weights is another one too"


def test_servers_of_one_name_with_different_weights_are_refused(scripted: Callable[..., Any]) -> None:
    with scripted(2) as (fleet, (_, other), _):
        assert len(fleet.served()) == 2
        other.logprob -= 1e-2
    with pytest.raises(UserError, match=r"two:1 has other weights than those with which .*one:1 began"), scripted(2):
        pass


def test_probes_are_compared_up_to_a_token_that_rounding_chose() -> None:
    first = Probe([1, 2, 3], [-0.5, -1.0, -2.0], 1e-3)
    for tokens, logprobs, rounding, other in (
        ([1, 2, 3], [-0.5005, -1.0, -2.0], 1e-3, False),
        ([1, 2, 3], [-0.5, -1.0, -2.002], 1e-3, True),
        ([1, 2, 3], [-0.5, -1.0, -2.1], 0.2, False),
        ([1, 4, 9], [-0.5, -3.0, -7.0], 1e-3, False),
        ([2, 2, 3], [-0.5, -1.0, -2.0], 1e-3, True),
    ):
        assert Probe(tokens, logprobs, rounding).is_of_other_weights(first) == other


def test_a_silent_server_is_lost_and_a_slow_one_is_not(
    scripted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight requests wait for each other for longer than a server may be silent."""
    monkeypatch.setattr(fleets, "DEADLINE_S", 1.0)
    monkeypatch.setattr(fleets, "_SCORED_S", 0.0)
    monkeypatch.setattr(silence, "_NOTED_S", 0.7)

    async def scores(fleet: ServedFleet, count: int) -> list[list[float]]:
        return await asyncio.gather(*(fleet.score([1, 2, 3]) for _ in range(count)))

    with scripted() as (fleet, (server, _), notes):
        server.silent_s = 0.25
        assert fleet.run(scores(fleet, 8)) == [[-0.5] * 2] * 8
        assert len(notes) == 2, "nothing was fenced"
        server.silent_s = 60.0
        with pytest.raises(ServerLostError, match="one:1 has answered nothing for 1 s"):
            fleet.run(scores(fleet, 3))
        assert sum("it is lost after 1 s" in note for note in notes) >= 1
