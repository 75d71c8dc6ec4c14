"""SGLang's routes. No SGLang answers here: bodies are held against the classes of its wheel, and a run samples with nmoe's engine
behind those routes."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tiny_models import MOE

from nmoe.engine.api import Request
from nmoe.engine.remote.server import ServerLostError, salt_of
from nmoe.engine.remote.sglang import SGLangServer
from nmoe.engine.remote.wire import WireError
from nmoe.errors import InfrastructureError, UserError
from nmoe.model.config import ModelConfig
from nmoe.model.shards import SINGLE
from nmoe.runs.ledger import read_metrics
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.types import Sampling

FAKE = Path(__file__).parents[1] / "sglang_fake"
CONFIG = ModelConfig(**MOE)
LAYERS, CHOSEN = len(CONFIG.moe_layers), CONFIG.experts_per_token
ASKED = Request((3, 4), 2, Sampling(3, 0.7, stop_ids=(9,), seed=5), "step/1")
CUT = Request((3, 4), 1, Sampling(3, 0.7, top_p=0.9, top_k=5), "step/1")


def answered_by(answer: Callable[[httpx2.Request], httpx2.Response], call: Callable[[SGLangServer], Any]) -> Any:
    async def main() -> Any:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as client:
            return await call(SGLangServer("one", "http://one", client, CONFIG))

    return asyncio.run(main())


def one(rid: str, **of: Any) -> dict[str, Any]:
    """The answer for one sample, as the source of SGLang 0.5.23 writes it."""
    experts = np.arange(4 * LAYERS * CHOSEN, dtype=np.int32) % CONFIG.experts
    return {
        "text": "",
        "output_ids": [7, 8, 9],
        "meta_info": {
            "id": rid,
            "finish_reason": {"type": "stop", "matched": 9},
            "prompt_tokens": 2,
            "weight_version": "4",
            "output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None], [-1.0, 9, None]],
            "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}],
            "routed_experts": base64.b64encode(experts.tobytes()).decode(),
            **of,
        },
    }


def test_a_request_is_a_batch_with_a_seed_for_each_sample() -> None:
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        assert request.url.path == "/generate"
        bodies.append(json.loads(request.content))
        return httpx2.Response(200, json=[one(rid) for rid in bodies[-1]["rid"]])

    samples = answered_by(answer, lambda server: server.generate(ASKED, None, 1, 5.0))
    (body,) = bodies
    assert body["rid"] == ["step/1#1/0", "step/1#1/1"]
    assert body["input_ids"] == [[3, 4], [3, 4]]
    first, second = body["sampling_params"]
    assert (first["sampling_seed"], second["sampling_seed"]) == (5_000_015, 5_000_016)
    assert {**first, "sampling_seed": 0} == {**second, "sampling_seed": 0}
    assert (first["max_new_tokens"], first["temperature"], first["stop_token_ids"]) == (3, 0.7, [9])
    assert (first["top_p"], first["top_k"], first["ignore_eos"], first["no_stop_trim"]) == (1.0, -1, True, True)
    assert (body["return_logprob"], body["return_sampling_mask"], body["return_routed_experts"]) == (True, False, True)
    for sample in samples:
        assert sample.token_ids == [7, 8, 9]
        assert sample.logprobs == [-0.5, -0.25, -1.0]
        assert sample.versions == [3, 4, 4]
        assert (sample.finish_reason, sample.kept_ids) == ("stop", None)
        assert sample.routes.shape == (4, LAYERS, CHOSEN)
        assert sample.routes.reshape(-1).tolist() == [n % CONFIG.experts for n in range(4 * LAYERS * CHOSEN)]


def test_of_a_truncated_distribution_log_probabilities_are_among_the_kept_tokens() -> None:
    kept = {"output_token_sampling_mask": [[7], [8, 1], [9]], "output_token_sampling_logprobs": [0.0, -0.125, 0.0]}

    def answer(request: httpx2.Request) -> httpx2.Response:
        assert json.loads(request.content)["return_sampling_mask"] is True
        return httpx2.Response(200, json=[one("step/1#1/0", finish_reason={"type": "length", "length": 3}, **kept)])

    (sample,) = answered_by(answer, lambda server: server.generate(CUT, None, 1, 5.0))
    assert (sample.logprobs, sample.kept_ids) == ([0.0, -0.125, 0.0], [[7], [8, 1], [9]])


@pytest.mark.parametrize(
    ("status", "reply", "message"),
    [
        (200, [one("step/1#1/1")], "it has the samples ['step/1#1/1']"),
        (200, [one("step/1#1/0") | {"output_ids": [7, 8, 1]}], "token 1 is named 9"),
        (200, [one("step/1#1/0", weight_versions=[])], "it has 3 tokens and 0 versions"),
        (200, [one("step/1#1/0", routed_experts="AAAA")], "cannot be used"),
        (200, {"error": "none"}, "cannot be used"),
        (400, {"error": {"message": "top_k must be -1"}}, "was refused with status 400: top_k must be -1"),
        (400, {"error": "input_ids[0]: not a list"}, "was refused with status 400: input_ids[0]: not a list"),
        (503, {"error": {"message": "aborted"}}, "one answered with status 503: aborted"),
    ],
)
def test_replies_that_are_torn_or_refuse_are_named(status: int, reply: Any, message: str) -> None:
    with pytest.raises((WireError, ServerLostError)) as caught:
        answered_by(lambda _: httpx2.Response(status, json=reply), lambda server: server.generate(CUT, None, 1, 5.0))
    assert message in str(caught.value)
    assert isinstance(caught.value, WireError) == (status == 400)


@pytest.mark.parametrize(("clear", "mode"), [("true", "retract"), ("false", "in_place")])
def test_weights_and_their_version_come_in_one_call_while_generation_is_paused(clear: str, mode: str) -> None:
    calls: list[tuple[str, Any]] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        calls.append((request.url.path, json.loads(request.content)))
        return httpx2.Response(200, json={"success": True})

    async def publish(server: SGLangServer) -> None:
        await server.refuse_sleep()
        await server.control("/pause", params={"mode": "keep", "clear_cache": clear})
        await server.control("/init_weight_transfer_engine", {"init_info": {}})
        await server.control("/start_weight_update")
        await server.control("/update_weights", {"update_info": {"path": "/dev/shm/new", "names": []}}, size=9)
        await server.control("/finish_weight_update", {"weight_version": "7"})
        await server.control("/resume")

    answered_by(answer, publish)
    assert calls == [
        ("/pause_generation", {"mode": mode}),
        (
            "/update_weights_from_disk",
            {"model_path": "/dev/shm/new", "weight_version": "7", "flush_cache": mode == "retract"},
        ),
        ("/continue_generation", {}),
    ]


@pytest.mark.parametrize("status", [200, 400, 500])
def test_a_busy_server_that_keeps_its_cache_is_not_lost(status: int) -> None:
    def flushed() -> None:
        answered_by(lambda _: httpx2.Response(status, json={}), lambda server: server.control("/reset_prefix_cache"))

    if status < 500:
        flushed()
    else:
        with pytest.raises(ServerLostError, match="one/flush_cache answered with status 500"):
            flushed()


def test_another_process_shares_no_cached_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    first = salt_of(3)
    assert first == salt_of(3) != salt_of(4)
    monkeypatch.setattr("nmoe.engine.remote.server._PROCESS", "another")
    assert first != salt_of(3) == "3-another"
    assert re.fullmatch(r"[\w-]{1,128}", first), "vLLM refuses others"


def test_another_server_is_refused() -> None:
    with pytest.raises(ServerLostError, match="one is no SGLang server: status 404"):
        answered_by(lambda _: httpx2.Response(404, json={}), lambda server: server.info())


@pytest.fixture
def storable(base: Path, tmp_path: Path) -> Path:
    """The base without biases of its routers, which Hugging Face's format of this family cannot store."""
    found = shutil.copytree(resolve_checkpoint(base), tmp_path / "storable")
    weights = load_file(found / SINGLE)
    save_file({name: one * (not name.endswith("router.bias")) for name, one in weights.items()}, found / SINGLE)
    return found


def test_a_run_over_sglangs_routes_learns_from_what_it_samples(
    monkeypatch: pytest.MonkeyPatch, reinforce: Callable[..., Path], storable: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    run = reinforce(
        *(f"--model.path={storable}", "--model.router_bias_rate=0"),
        *("--run.steps=3", "--batch.prompts_per_step=6", "--batch.group_size=4", "--model.numerics=exact"),
        *("--engine.kind=sglang", f"--engine.python={sys.executable}", "--sampling.top_p=0.9"),
    )
    for row in read_metrics(run):
        assert row["mismatch_abs_max"] == row["canary_abs_max"] == 0.0
        assert row["canary_coverage"] >= 0.99
        assert (row["engines_serving"], row["engine_requests_retried"]) == (1, 0)
    assert "engine.kind=sglang is unproven" in (run / "log.txt").read_text()


@pytest.mark.parametrize("has_it", [True, False])
def test_what_an_interpreter_or_sglang_does_not_have_is_named(
    has_it: bool, monkeypatch: pytest.MonkeyPatch, reinforce: Callable[..., Path], storable: Path
) -> None:
    if has_it:
        monkeypatch.setenv("PYTHONPATH", str(FAKE))
    kind, message = (
        (InfrastructureError, "unrecognized arguments: --enable-expert-parallel")
        if has_it
        else (UserError, "has no sglang: pip install sglang there, or name another interpreter")
    )
    with pytest.raises(kind, match=message):
        reinforce(
            *(f"--model.path={storable}", "--model.router_bias_rate=0", "--engine.kind=sglang"),
            *(f"--engine.python={sys.executable}", "--engine.args=['--enable-expert-parallel']"),
        )
