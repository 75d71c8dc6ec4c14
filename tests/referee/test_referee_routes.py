"""Rounds over servers of other routes, and over one that serves an adapter: nothing is wrong with them."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import served_client
from chat_templates import qwen
from referee_servers import drawn_checkpoint, serving
from tiny_models import tiny_family

from nmoe.model.checkpoint import export_model, fingerprint, load_model
from nmoe.model.lora import Lora, LoraSettings, choose
from nmoe.model.peft_format import save_adapter
from nmoe.referee.client import Exchange
from nmoe.referee.command import judge_of
from nmoe.referee.rounds import Round, hold
from nmoe.referee.target import Asked, Completions, Reply

pytestmark = pytest.mark.timeout(1200)
FAKE = Path(__file__).parents[1] / "engine/sglang_fake/sglang/launch_server.py"


def round_of(url: str, checkpoint: Path, *, publish: bool = False, key: str = "", only: tuple[str, ...] = ()) -> Round:
    judge, _ = judge_of(checkpoint, "float32")
    return asyncio.run(hold(url, judge, seed=2, key=key, publish=publish, only=only))


def route_of(round_: Round) -> str:
    assert round_.served is not None
    return round_.served.route.name


def states(round_: Round) -> dict[str, str]:
    return {outcome.check.name: outcome.state for outcome in round_.outcomes}


def skipped(round_: Round) -> dict[str, str]:
    return {outcome.check.name: outcome.why for outcome in round_.outcomes if outcome.state == "skipped"}


def seen(round_: Round) -> list[str]:
    found = [f"{one.check.name}: {it.fault}: {it.seen}" for one in round_.outcomes for it in one.findings]
    return found + [f"{one.check.name}: {one.why}" for one in round_.outcomes if one.state == "late"]


def test_a_served_adapter_is_published_and_judged(tmp_path: Path) -> None:
    base, directory = drawn_checkpoint(tmp_path / "base", "dense_untied"), tmp_path / "adapter"
    model = load_model(base).requires_grad_(False)
    lora = Lora(model, LoraSettings(rank=4, alpha=8), choose(model, ()), str(base), fingerprint(base)).initialize(0)
    directory.mkdir()
    save_adapter(lora, directory)
    with serving(directory) as url:
        round_ = round_of(url, directory, publish=True, only=("logprobs.plain", "publishes"))
    assert seen(round_) == []
    assert (
        states(round_)["publishes.full"] == states(round_)["publishes.torn"] == states(round_)["publishes.back"] == "ok"
    )
    assert skipped(round_)["publishes.partial"] == "an adapter's tensors come in one file"


@pytest.fixture(scope="module")
def of_texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Serves a model by OpenAI's route."""
    checkpoint = tmp_path_factory.mktemp("texts")
    tokenizer = qwen(checkpoint)
    export_model(tiny_family("qwen3_moe", 0, context_tokens=256, vocab_size=tokenizer.vocab_size), checkpoint)
    tokenizer.save(checkpoint)
    with served_client.serving(checkpoint) as client:
        yield str(client.http.base_url), checkpoint


def round_of_texts(of_texts: tuple[str, Path], only: tuple[str, ...]) -> Round:
    # The server speaks both routes: as one would without the first.
    with patch("nmoe.referee.target.GENERATE", "/no/such/route"):
        round_ = round_of(*of_texts, only=only)
    assert route_of(round_) == "OpenAI's completions"
    return round_


def test_completions_of_openai_are_compared_as_far_as_they_go(of_texts: tuple[str, Path]) -> None:
    assert route_of(round_of(*of_texts, only=("logprobs.plain",))) == "the token route"
    round_ = round_of_texts(of_texts, ())
    assert seen(round_) == []
    left = skipped(round_)
    assert set(states(round_).values()) == {"ok", "skipped"}
    assert {one for one in left if not one.startswith(("aborts.", "publishes."))} == {
        "tokens.beyond", "logprobs.kept", "logprobs.routes", "prefixes.salt",
    }  # fmt: skip
    assert left["publishes.full"] == "needs the token route, which this server does not speak"
    assert left["logprobs.kept"] == "the server gives no kept ids"
    assert states(round_)["ends.text"] == states(round_)["logprobs.stream"] == states(round_)["ends.limit"] == "ok"


def test_faults_of_texts_and_of_their_streams_are_found(
    of_texts: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    body, read, read_stream = Completions.body, Completions.read, Completions.read_stream

    def later(self: Completions, asked: Asked, exchange: Exchange) -> Reply:
        reply = read_stream(self, asked, exchange)
        for choice in reply.choices:
            choice.logprobs = [one - 0.1 for one in choice.logprobs]
        return reply

    def of_another(self: Completions, asked: Asked, exchange: Exchange) -> Reply:
        reply = read(self, asked, exchange)
        reply.prompt = [*asked.prompt[:-1], asked.prompt[-1] ^ 1]
        return reply

    def faults(*only: str) -> list[str]:
        return [finding.fault for one in round_of_texts(of_texts, only).outcomes for finding in one.findings]

    def without(name: str) -> None:
        monkeypatch.setattr(
            Completions,
            "body",
            lambda self, asked: {key: value for key, value in body(self, asked).items() if key != name},
        )

    without("stop")
    assert faults("ends.text") == ["end_ignored"]
    without("stop_token_ids")
    assert skipped(round_of_texts(of_texts, ("ends.one",)))["ends.one"].startswith(
        "the server does not know stop_token"
    )
    monkeypatch.setattr(Completions, "read_stream", later)
    assert "unexplained" in faults("logprobs.stream")
    monkeypatch.setattr(Completions, "read", of_another)
    assert faults("tokens.reply") == ["late_answer"]


@contextmanager
def fake_sglang(checkpoint: Path, key: str) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    of = {"model-path": checkpoint, "host": "127.0.0.1", "port": port, "dtype": "float32", "api-key": key}
    command = [sys.executable, str(FAKE), "--max-running-requests", "64"]
    command += [part for name, value in of.items() for part in (f"--{name}", str(value))]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        while process.poll() is None:
            try:
                opener.open(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def test_the_fake_of_sglang_is_right(tmp_path: Path) -> None:
    checkpoint = tmp_path / "moe"
    export_model(load_model(drawn_checkpoint(tmp_path / "own", "moe_untied")), checkpoint)
    with fake_sglang(checkpoint, "secret") as url:
        round_ = round_of(url, checkpoint, publish=True, key="secret")
    assert route_of(round_) == "SGLang's route"
    assert seen(round_) == []
    assert (
        states(round_)["publishes.full"] == states(round_)["publishes.back"] == states(round_)["logprobs.kept"] == "ok"
    )
    assert skipped(round_)["publishes.torn"].startswith("SGLang takes files without digests")
